"""A member of a raft group: what it does at each event. No sockets, clocks or files in here.

docs/reference/raft.md says which rule comes from where.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cometmq.errors import RaftMessageError, RaftRefused
from cometmq.raft.account import LogAccount
from cometmq.raft.following import Following
from cometmq.raft.leading import Leading, Status
from cometmq.raft.members import Members, MembersEntry
from cometmq.raft.messages import (
    MOST_INDEX,
    MOST_RUN,
    MOST_TERM,
    NO_INDEX,
    AnyMessage,
    AppendOwn,
    AppendRequest,
    AppendResponse,
    Effects,
    HardState,
    LogChange,
    LogView,
    Proposed,
    RaftOptions,
    Role,
    RoleChange,
    TransferRequest,
    VoteRequest,
    VoteResponse,
    check,
)  # fmt: skip
from cometmq.raft.outbox import Outbox
from cometmq.raft.trust import Trust, is_blank


class RaftNode:
    """One member of a group.

    The shell calls `tick` at the beginning of each turn of its loop and hands over what happened. At the
    end it takes `effects`, carries them out, and takes `messages`. All calls are quick and do no I/O.

    me, group: own id, and the group's name. log: what the log holds now, all of it durable. state: as it was
    saved last; its members entries are those found in the log, and in front of them what the group started
    with. between: a whole number between two, both included (`random.Random(seed).randint`). committed: what
    was reported as committed before the restart, if known.
    """

    def __init__(
        self,
        me: str,
        group: str,
        log: LogView,
        state: HardState,
        between: Callable[[int, int], int],
        options: RaftOptions | None = None,
        committed: int | None = None,
    ) -> None:
        self.me = me
        self.group = group
        self._log = log
        self._options = options or RaftOptions()
        self._between = between
        self._account = LogAccount(log, state, committed)
        state = msgspec.structs.replace(state, members=self._account.history.entries)
        self._saved = self._asked_to_save = state
        self._state = self._account.corrected(state, me)
        self._clock = 0  # ms, only ever forward
        self._now: int | None = None  # the shell's clock, at the last tick
        self.role = Role.FOLLOWER
        self.leader = ""
        self._heard_at = -self._options.election_ms  # of the leader
        self._following = Following(self._account)
        self._trust = Trust(me, between(1, MOST_RUN)) if state.suspect else None
        self._reply_due = False
        self._votes: set[str] = set()
        self._handed_over = False  # the leader asked this member to stand
        self._leading: Leading | None = None
        self._able = True
        self.stands = True  # whether it may lead: not when it is about to stop
        self.full = False  # whether its disk has little room; the leader hears of it
        self._changes: list[LogChange] = []
        self._outbox = Outbox(group, me)
        self._reported = (self.role, self.term, self.leader)
        self._reason = ""
        self._reported_commit = self._account.first - 1
        self._election_at = 0
        self._wait_for_leader()

    @property
    def term(self) -> int:
        return self._state.term

    @property
    def members(self) -> Members:
        return self._account.history.newest.members

    @property
    def ready(self) -> bool:
        """Whether this member leads, and all entries of former leaders are committed."""
        return self._leading is not None and self._account.commit >= self._leading.first_own

    def status(self) -> Status:
        account = self._account
        return Status(
            self.role,
            self.term,
            self.leader,
            self.members,
            account.first,
            account.last,
            account.durable,
            account.visible,
            {} if self._leading is None else self._leading.statuses(self._clock),
        )

    # -- events

    def tick(self, now_ms: int) -> None:
        """The time is `now_ms`, on a clock of the shell's. A step back or a pause does no harm."""
        if self._now is not None:
            self._clock += min(max(now_ms - self._now, 0), self._options.election_ms)
        self._now = now_ms
        if self._leading is not None:
            self._lead_on(self._leading)
        elif self._clock >= self._election_at:
            self._stand()
        if self._trust is not None:
            every = self._options.heartbeat_ms
            self._trust.ask(self._outbox, self._clock, every, self._state, self._account)
            self._regain_trust()

    def receive(self, message: AnyMessage) -> None:
        """A member said something. RaftMessageError for what no member of this group would say; that changes
        nothing of the log."""
        check(message)
        if message.group != self.group:
            raise RaftMessageError("group", message.group, f"expected {self.group}")
        if message.to != self.me or message.sender == self.me:
            raise RaftMessageError("to", message.to, f"{message.sender} said so to {self.me}")
        if self._trust is not None and isinstance(message, VoteResponse):
            self._trust.told(message)
        if self._is_disturbing(message) or not self._is_of_this_term(message):
            return
        match message:
            case AppendRequest():
                self._on_append_request(message)
            case AppendResponse():
                self._on_append_response(message)
            case VoteRequest():
                self._on_vote_request(message)
            case VoteResponse():
                self._on_vote_response(message)
            case TransferRequest() if message.sender == self.leader and self._may_lead():
                self._campaign(handed_over=True)
            case _:
                pass

    def propose(self, count: int) -> int:
        """`count` new entries follow the last one, of the current term; returns the index of the first.

        They are written when `effects` says Proposed, in order with other changes. RaftRefused when this
        member does not lead, has not yet committed the first entry of its term, hands its leadership over,
        or has too many proposals outstanding.
        """
        leading = self._needs_ready_leader()
        account = self._account
        outstanding = account.last - account.commit + count
        if leading.transfer is not None:
            raise RaftRefused("the leadership is being handed over", leading.transfer[0])
        if outstanding > self._options.outstanding or account.last + count > MOST_INDEX:
            raise RaftRefused(f"{outstanding} entries would not be committed yet", self.me)
        if count < 1:
            raise RaftRefused(f"{count} entries cannot be proposed", self.me)
        first = account.last + 1
        account.append(count, self.term)
        self._changes.append(Proposed(first, count, self.term))
        return first

    def persisted(self, index: int, term: int) -> None:
        """The log is durable (as the flush mode promises) up to the entry `index` of `term`.

        A sync that began before a Truncate or Reset says nothing about entries behind the cut: the shell
        reports it with an index before the cut, or not at all.
        """
        if self._account.persisted(index, term):
            self._reply_due = True
            self._regain_trust()
            self._commit_more()

    def state_saved(self, state: HardState) -> None:
        """What `effects` asked to save is durable."""
        if state != self._state or self._saved is self._state:
            return
        self._saved = self._state
        if self.role is Role.CANDIDATE and not self._votes:
            self._votes.add(self.me)
            self._ask_for_votes(pre=False)
        self._commit_more()

    def disk_failed(self, last: int, reason: str) -> None:
        """The disk did not take a change of the log, which ends at `last` now: of the changes taken before,
        those behind the failed one were left out, but everything was cut that was to be cut. A leader steps
        down, and hands over to the member that has most. Until `disk_works` this member neither leads nor
        takes entries."""
        if self._changes:
            raise RaftRefused("there are changes of the log to be taken first")
        if last < self._account.visible:
            raise RaftRefused(
                f"the entries up to {self._account.visible} are committed, the log ends at {last}"
            )
        self._able = False
        if self._leading is not None:
            self._hand_over(self._leading.most_advanced())
        if self.role is not Role.FOLLOWER:
            self._follow(self.term, "", reason)
        if last < self._account.last:
            self._following.cut(last + 1)
            self._keep_members()

    def disk_works(self) -> None:
        """The disk takes writes again."""
        self._able = True
        self._asked_to_save = self._saved  # what was not saved is asked for again

    def settled(self, term: int) -> None:
        """What the group keeps outside of its log was copied from the leader of this term, and is durable. A
        member that has lost its disk counts again only then."""
        if self._trust is not None:
            self._trust.settled(term)

    def begins_at(self, first: int) -> None:
        """Retention has deleted the entries before `first`. That one is committed."""
        if first > self._account.visible:
            raise RaftRefused(f"entries from {self._account.visible} on are to be kept")
        if first > self._account.first:
            self._account.begins_at(first)
            self._keep_members()
            if self._leading is not None:
                self._leading.begins_at(first)

    # -- what operators ask. RaftRefused says why not.

    def transfer(self, to: str) -> None:
        """Hand the leadership over to a voter, once it has all entries. Given up after an election
        time-out."""
        leading = self._needs_ready_leader()
        if leading.transfer is not None:
            raise RaftRefused("the leadership is being handed over already", leading.transfer[0])
        if to == self.me or to not in self.members.voters:
            raise RaftRefused(f"{to} is not one of the other voters", self.me)
        leading.transfer = (to, self._clock + self._options.election_ms)
        self._transfer_on()

    def add_learner(self, member: str) -> None:
        """Let a member receive the log. As for all changes: one at a time, and none before the leader has
        committed an entry of its own term (docs/reference/raft.md, Membership)."""
        self._change(self._changeable().with_learner(member))

    def promote(self, member: str) -> None:
        """Give a learner that has caught up a vote."""
        members = self._changeable().with_voter(member)
        peer = self.status().peers[member]
        lacks = self._account.last - peer.match
        if lacks > self._options.caught_up or peer.silent_ms > self._options.election_ms:
            raise RaftRefused(f"{member} lacks {lacks} entries, silent for {peer.silent_ms} ms", self.me)
        if peer.suspect or peer.match < 0:
            raise RaftRefused(f"{member} is not whole yet, or has not heard all other members", self.me)
        self._change(members)

    def remove(self, member: str) -> None:
        """Take a member out, voter or learner. A leader that removes itself steps down once that is
        committed."""
        left = self._changeable().without(member)
        if not left.has_quorum(self._needs_ready_leader().without_suspects(left)):
            raise RaftRefused(f"without {member} too many of the others are not whole yet", self.me)
        self._change(left)

    # -- what is to do

    def effects(self) -> Effects:
        """What is to do after the events of this turn."""
        effects = Effects()
        if self._changes:
            effects.log, self._changes = self._changes, []
        if self._state is not self._saved and self._state is not self._asked_to_save:
            effects.state = self._asked_to_save = self._state
        if self._account.visible > self._reported_commit:
            effects.committed = self._reported_commit = self._account.visible
        now = (self.role, self.term, self.leader)
        if now != self._reported:
            self._reported = now
            effects.role = RoleChange(*now, self._reason)
            self._reason = ""
        return effects

    def messages(self) -> list[AnyMessage]:
        """What is to be sent, each may be lost. To be taken when `effects` are carried out: entries that
        are to be sent have been written then, so that `fit` of the log view can tell their size."""
        if self._state is not self._saved:
            return []
        messages = self._outbox.take()
        if self._leading is not None:
            messages += self._leading.requests(self._clock)
        elif self._reply_due and self.leader:
            messages.append(self._response(self.leader))
        self._reply_due = False
        return messages

    def due_ms(self) -> int:
        """The latest time at which `tick` must be called again, on the shell's clock."""
        due = self._election_at
        if self._leading is not None:
            due = min([self._leading.quorum_at, *(p.beat_at for p in self._leading.peers.values())])
        if self._trust is not None:
            due = min(due, self._clock + self._options.heartbeat_ms)
        if self._state is not self._saved:  # nothing is sent before
            due = max(due, self._clock + self._options.heartbeat_ms)
        return (self._now or 0) + max(due - self._clock, 0)

    # -- terms and roles

    def _is_disturbing(self, message: AnyMessage) -> bool:
        """Whether a candidate wants a vote while this member hears its leader: it is not listened to."""
        if not isinstance(message, VoteRequest) or message.transfer or message.term <= self.term:
            return False
        if self.role is not Role.LEADER and (
            not self.leader or self._clock - self._heard_at >= self._options.election_ms
        ):
            return False
        if message.pre:
            self._vote(message, granted=False)
        return True

    def _is_of_this_term(self, message: AnyMessage) -> bool:
        """Whether the message is to be handled. A higher term is taken over first; who has a lower one is
        told."""
        if message.term > self.term:
            asks = isinstance(message, VoteRequest) and message.pre
            would = isinstance(message, VoteResponse) and message.pre and message.granted
            if not asks and not would:
                self._follow(message.term, message.sender if isinstance(message, AppendRequest) else "")
        elif message.term < self.term:
            if isinstance(message, AppendRequest):
                self._outbox.add([self._response(message.sender, NO_INDEX)])
            elif isinstance(message, VoteRequest):
                self._vote(message, granted=False)
            return False
        return True

    def _follow(self, term: int, leader: str, reason: str = "") -> None:
        if self._leading is not None:
            self._reason = reason or f"there is term {term}"
        if term > self.term or leader != self.leader:
            self._following.agreed = self._account.commit
        if term > self.term:
            self._state = msgspec.structs.replace(self._state, term=term, vote="")
            self._outbox.take()
        self.role = Role.FOLLOWER
        self.leader = leader
        self._leading = None
        self._wait_for_leader()

    def _wait_for_leader(self) -> None:
        least = self._options.election_ms
        self._election_at = self._clock + self._between(least, 2 * least)

    def _may_lead(self) -> bool:
        return (
            self._able
            and self.stands
            and not self._state.suspect
            and self._has_vote()
            and self.term + 1 < MOST_TERM
            and self._account.last < MOST_INDEX
        )

    def _has_vote(self) -> bool:
        """Whether this member is a voter, or may have to lead until its removal is committed
        (docs/reference/raft.md, Membership)."""
        history = self._account.history
        return self.me in history.newest.members.voters | history.at(self._account.commit).members.voters

    def _stand(self) -> None:
        """The leader was not heard for too long. Ask who would vote for this member."""
        if not self._may_lead():
            self._follow(self.term, "")
            return
        self.role = Role.PRE_CANDIDATE
        self.leader = ""
        self._votes = {self.me}
        self._handed_over = False
        self._wait_for_leader()
        self._ask_for_votes(pre=True)

    def _campaign(self, handed_over: bool) -> None:
        """A new term, with this member as candidate. It asks for votes once that is saved."""
        self._follow(self.term + 1, "")
        self._state = msgspec.structs.replace(self._state, vote=self.me)
        self.role = Role.CANDIDATE
        self._votes = set()
        self._handed_over = handed_over

    def _ask_for_votes(self, pre: bool) -> None:
        account = self._account
        for voter in sorted(self.members.voters - {self.me}):
            self._outbox.say(
                VoteRequest, voter, term=self.term + pre, last_index=account.last,
                last_term=account.last_term, pre=pre, transfer=self._handed_over,
            )  # fmt: skip
        self._count_votes()

    def _count_votes(self) -> None:
        if not self.members.has_quorum(self._votes):
            return
        if self.role is Role.PRE_CANDIDATE:
            self._campaign(handed_over=False)
        else:
            self._lead()

    def _on_vote_request(self, request: VoteRequest) -> None:
        """Of this term, or the question whether a vote would be given in this or a later one."""
        if (
            (
                request.term == self.term
                and self._state.vote != request.sender
                and (self._state.vote or self.leader)
            )
            or self._state.suspect
            or not self._account.is_up_to_date(request.last_index, request.last_term)
        ):
            self._vote(request, granted=False)
        else:
            if not request.pre:
                self._follow(self.term, "")
                self._state = msgspec.structs.replace(self._state, vote=request.sender)
            self._vote(request, granted=True)

    def _vote(self, request: VoteRequest, granted: bool) -> None:
        term, blank = request.term if granted else self.term, is_blank(self._state, self._account)
        about = {"pre": request.pre, "run": request.run, "blank": blank}
        self._outbox.say(VoteResponse, request.sender, term=term, granted=granted, **about)

    def _on_vote_response(self, response: VoteResponse) -> None:
        wanted = (Role.PRE_CANDIDATE, self.term + 1) if response.pre else (Role.CANDIDATE, self.term)
        valid = response.granted and response.sender in self.members.voters
        if valid and (self.role, response.term) == wanted:
            self._votes.add(response.sender)
            self._count_votes()

    # -- following

    def _on_append_request(self, request: AppendRequest) -> None:
        if self._leading is not None or self.leader not in ("", request.sender):
            raise RaftMessageError("sender", request.sender, f"{self.leader} leads in term {self.term}")
        self._following.check(request)
        if not self.leader:
            self._follow(self.term, request.sender)
        self._heard_at = self._clock
        self._wait_for_leader()
        if self._trust is not None:
            self._trust.contacted(request)
        changes = self._following.take(request) if self._able else []
        if changes is None:
            self._outbox.add([self._rejection(request)])
            return
        self._reply_due = True
        self._changes += changes
        self._keep_members()
        self._regain_trust()

    def _rejection(self, request: AppendRequest) -> AppendResponse:
        hint = self._account.last_at_most(request.prev_index - 1, request.prev_term)
        return msgspec.structs.replace(
            self._response(request.sender),
            rejected=True,
            prev_index=request.prev_index,
            hint_index=hint,
            hint_term=self._account.term_of(hint),
        )

    def _keep_members(self) -> None:
        """The members entries of the log are part of what is saved."""
        entries = self._account.history.entries
        if entries != self._state.members:
            self._state = msgspec.structs.replace(self._state, members=entries)

    def _regain_trust(self) -> None:
        agreed = min(self._following.agreed, self._account.durable)
        state = None if self._trust is None else self._trust.regained(self._state, self._account, agreed)
        if state is not None:
            self._state, self._trust = state, None

    def _response(self, to: str, written: int | None = None) -> AppendResponse:
        if written is None:
            written = self._following.agreed
        run = 0 if self._trust is None else self._trust.run
        return AppendResponse(
            group=self.group,
            sender=self.me,
            to=to,
            term=self.term,
            match=NO_INDEX if run else min(written, self._account.durable),
            written=written,
            full=self.full,
            run=run,
        )

    # -- leading

    def _lead(self) -> None:
        self.role = Role.LEADER
        self.leader = self.me
        whose = (self.group, self.me, self.term)
        self._leading = Leading(whose, self._account, self._log, self._options, self._clock)
        self._leading.follow_members(self._clock)
        self._append_own(None)

    def _append_own(self, members: MembersEntry | None) -> None:
        self._account.append(1, self.term)
        self._changes.append(AppendOwn(self._account.last, self.term, members))

    def _lead_on(self, leading: Leading) -> None:
        """The time has moved."""
        if leading.transfer is not None and self._clock >= leading.transfer[1]:
            leading.transfer = None
        if self._clock >= leading.quorum_at:
            if not self.members.has_quorum(
                leading.heard_since(leading.quorum_at - self._options.election_ms)
            ):
                self._follow(self.term, "", "a majority has not answered for an election time-out")
                return
            leading.quorum_at = self._clock + self._options.election_ms

    def _on_append_response(self, response: AppendResponse) -> None:
        if self._leading is not None:
            self._leading.answered(response, self._clock)
            self._commit_more()
            self._transfer_on()

    def _commit_more(self) -> None:
        """Entries of the own term that a majority has are committed, and with them all before
        (docs/reference/raft.md, Commits)."""
        leading, account = self._leading, self._account
        if leading is None or self._state is not self._saved:
            return
        index = leading.quorum_index(account.durable)
        if index <= account.commit or not self._is_own(index):
            return
        account.commit = index
        if account.history.newest.index <= index and self.me not in self.members.voters:
            self._hand_over(leading.most_advanced())
            self._outbox.add(leading.requests(self._clock))
            self._follow(self.term, "", "it is not a voter any more")

    def _is_own(self, index: int) -> bool:
        return self._account.term_of(index) == self.term

    def _transfer_on(self) -> None:
        if self._leading is not None and self._leading.transfer is not None:
            to = self._leading.transfer[0]
            if self._leading.peers[to].match == self._account.last:
                self._hand_over(to)

    def _hand_over(self, to: str) -> None:
        if to:
            self._outbox.say(TransferRequest, to, term=self.term)

    def _needs_ready_leader(self) -> Leading:
        if self._leading is None:
            raise RaftRefused(f"{self.me} does not lead", self.leader)
        if not self.ready:
            raise RaftRefused("the leader has not committed the first entry of its term yet", self.me)
        return self._leading

    def _changeable(self) -> Members:
        """The members, if they may be changed now."""
        if self._needs_ready_leader().transfer is not None:
            raise RaftRefused("the leadership is being handed over", self.me)
        newest = self._account.history.newest
        if newest.index > self._account.commit:
            raise RaftRefused("a change of the members is not committed yet", self.me)
        if self._account.history.full:
            raise RaftRefused("the log holds too many changes of the members", self.me)
        return newest.members

    def _change(self, members: Members) -> None:
        entry = MembersEntry(self._account.last + 1, self.term, members)
        self._append_own(entry)
        self._account.history.add(entry)
        self._keep_members()
        if self._leading is not None:
            self._leading.follow_members(self._clock)
