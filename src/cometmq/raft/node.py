"""The Raft state machine of one member. It uses no sockets, clocks or files.

docs/reference/raft.md cites the source of each rule.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cometmq.errors import RaftMessageError, RaftRefused
from cometmq.raft.leading import Leading, Status
from cometmq.raft.log_state import Following, LogState
from cometmq.raft.members import Members, MembersEntry
from cometmq.raft.messages import (
    MAX_INCARNATION,
    MAX_INDEX,
    MAX_TERM,
    NO_INDEX,
    AnyMessage,
    AppendOwn,
    AppendRequest,
    AppendResponse,
    Effects,
    HardState,
    LogChange,
    LogView,
    Outbox,
    Proposed,
    RaftOptions,
    Role,
    RoleChange,
    TransferRequest,
    VoteRequest,
    VoteResponse,
    check_message,
)  # fmt: skip
from cometmq.raft.trust import Trust, is_blank


class RaftNode:
    """One member of a group.

    The caller, which does the I/O for the node, calls `tick` at the beginning of each iteration of its event
    loop and then reports the events of the iteration. At the end of the iteration, the caller calls
    `effects`, does the work that `effects` returns, and calls `messages`. No method does I/O.

    Args:
        log: The log at the start. All of its entries are durable.
        state: The saved state, with the group's first member list and those found in the log.
        between: Returns a random integer between its two arguments, both included
            (`random.Random(seed).randint`).
        committed: The last entry reported as committed before the restart, if known.

    Attributes:
        may_stand: Whether this member may lead. A member that is about to stop clears it.
        full: Whether this member's disk is nearly full. Responses report it to the leader.
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
        self._log_state = LogState(log, state, committed)
        state = msgspec.structs.replace(state, members=self._log_state.history.entries)
        self._saved = self._asked_to_save = state
        self._state = self._log_state.corrected(state, me)
        self._clock = 0  # The node's clock in ms; it never runs backwards
        self._now: int | None = None  # The caller's time at the last tick
        self.role = Role.FOLLOWER
        self.leader = ""
        self._leader_contact_at = -self._options.election_ms
        self._following = Following(self._log_state)
        self._trust = Trust(me, between(1, MAX_INCARNATION)) if state.suspect else None
        self._reply_due = False
        self._votes: set[str] = set()
        self._by_transfer = False  # Whether a leader asked this candidate to take over
        self._leading: Leading | None = None
        self._disk_writable = True
        self.may_stand = True
        self.full = False
        self._changes: list[LogChange] = []
        self._outbox = Outbox(group, me)
        self._reported = (self.role, self.term, self.leader)
        self._reason = ""
        self._reported_commit = self._log_state.first - 1
        self._election_at = 0
        self._wait_for_leader()

    @property
    def term(self) -> int:
        return self._state.term

    @property
    def members(self) -> Members:
        return self._log_state.history.newest.members

    @property
    def ready(self) -> bool:
        """Whether this member leads and has committed all entries of earlier terms."""
        return self._leading is not None and self._log_state.commit >= self._leading.first_own

    def status(self) -> Status:
        log_state = self._log_state
        peers = {} if self._leading is None else self._leading.statuses(self._clock)
        return Status(
            self.role, self.term, self.leader, self.members, log_state.first, log_state.last,
            log_state.durable, log_state.visible, peers,
        )  # fmt: skip

    # -- events that the caller reports

    def tick(self, now_ms: int) -> None:
        """Advance the node's clock to the caller's time: by at most an election timeout, and never back."""
        if self._now is not None:
            self._clock += min(max(now_ms - self._now, 0), self._options.election_ms)
        self._now = now_ms
        if self._leading is not None:
            self._check_quorum(self._leading)
        elif self._clock >= self._election_at:
            self._start_pre_vote()
        if self._trust is not None:
            interval_ms = self._options.heartbeat_ms
            self._trust.request_terms(self._outbox, self._clock, interval_ms, self._state, self._log_state)
            self._end_suspicion()

    def receive(self, message: AnyMessage) -> None:
        """Process a message. An invalid message raises RaftMessageError and changes nothing."""
        check_message(message)
        if message.group != self.group:
            raise RaftMessageError("group", message.group, f"expected {self.group}")
        if message.to != self.me or message.sender == self.me:
            raise RaftMessageError("to", message.to, f"{message.sender} sent it to {self.me}")
        if self._trust is not None and isinstance(message, VoteResponse):
            self._trust.record_vote_response(message)
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
                self._start_election(by_transfer=True)
            case _:
                pass

    def propose(self, count: int) -> int:
        """Reserve the next `count` entries of the current term, and return the index of the first of them.

        The caller writes the entries when `effects` contains `Proposed`, in order with other changes. Raises
        RaftRefused if this member cannot lead now, or if too many entries are not committed yet.
        """
        leading = self._require_ready_leader()
        log_state = self._log_state
        outstanding = log_state.last - log_state.commit + count
        if leading.transfer is not None:
            raise RaftRefused("the leadership is being transferred", leading.transfer[0])
        if outstanding > self._options.outstanding or log_state.last + count > MAX_INDEX:
            raise RaftRefused(f"the limit of uncommitted entries is reached: {outstanding}", self.me)
        if count < 1:
            raise RaftRefused(f"cannot propose {count} entries: at least 1 is required", self.me)
        first = log_state.last + 1
        log_state.append(count, self.term)
        self._changes.append(Proposed(first, count, self.term))
        return first

    def persisted(self, index: int, term: int) -> None:
        """Record that the entries up to `index`, which has the term `term`, are durable.

        The flush mode determines when entries count as durable.

        A sync that began before a `Truncate` or `Reset` does not cover the entries written after that change.
        The caller reports such a sync with an index before the first removed entry, or not at all.
        """
        if self._log_state.persisted(index, term):
            self._reply_due = True
            self._end_suspicion()
            self._commit_more()

    def state_saved(self, state: HardState) -> None:
        """Record that `state`, which `effects` has returned, is saved and synced."""
        if state != self._state or self._saved is self._state:
            return
        self._saved = self._state
        if self.role is Role.CANDIDATE and not self._votes:
            self._votes.add(self.me)
            self._ask_for_votes(pre=False)
        self._commit_more()

    def disk_failed(self, last: int, reason: str) -> None:
        """Record that the disk failed to write a change of the log, which now ends at the entry `last`.

        The caller has carried out all removals of entries and has omitted all other changes after the failed
        one. A leader steps down for `reason` and requests that the member with the most entries starts an
        election. Until `disk_recovered` is called, this member neither leads nor stores entries.
        """
        if self._changes:
            raise RaftRefused("earlier changes of the log have not been carried out yet")
        if last < self._log_state.visible:
            raise RaftRefused(
                f"the entries up to {self._log_state.visible} are committed, but the log ends at {last}"
            )
        self._disk_writable = False
        if self._leading is not None:
            self._send_transfer_request(self._leading.most_advanced())
        if self.role is not Role.FOLLOWER:
            self._become_follower(self.term, "", reason)
        if last < self._log_state.last:
            self._following.cut(last + 1)
            self._keep_members()

    def disk_recovered(self) -> None:
        """Record that the disk accepts writes again.

        `effects` then returns the state to save and the last committed entry once more.
        """
        self._disk_writable = True
        self._asked_to_save, self._reported_commit = self._saved, self._log_state.first - 1

    def tables_copied(self, term: int) -> None:
        """Record that the tables outside the log were copied from the leader of `term` and are durable."""
        if self._trust is not None:
            self._trust.record_copied_tables(term)

    def log_trimmed(self, first: int) -> None:
        """Record that retention has deleted the entries before `first`, all of which are committed."""
        if first > self._log_state.visible:
            raise RaftRefused(f"entries from {self._log_state.visible} on must be kept")
        if first > self._log_state.first:
            self._log_state.trim_before(first)
            self._keep_members()
            if self._leading is not None:
                self._leading.log_trimmed(first)

    @property
    def transferring(self) -> bool:
        """Whether this leader is transferring its leadership. Meanwhile it accepts no proposals."""
        return self._leading is not None and self._leading.transfer is not None

    # -- requests of operators. Each raises RaftRefused, with the reason, if it is not possible now.

    def transfer(self, to: str) -> None:
        """Transfer the leadership to a voter once it has all entries, within an election timeout."""
        leading = self._require_ready_leader()
        if leading.transfer is not None:
            raise RaftRefused("a transfer of the leadership is already in progress", leading.transfer[0])
        if to == self.me or to not in self.members.voters:
            raise RaftRefused(f"{to} is not one of the other voters", self.me)
        leading.transfer = (to, self._clock + self._options.election_ms)
        self._continue_transfer()

    def add_learner(self, member: str) -> None:
        """Add a member that receives the log and has no vote (docs/reference/raft.md, Membership)."""
        self._change_members(self._require_changeable_members().with_learner(member))

    def promote(self, member: str) -> None:
        members = self._require_changeable_members().with_voter(member)
        peer = self.status().peers[member]
        lacks = self._log_state.last - peer.match
        if lacks > self._options.caught_up or peer.silent_ms > self._options.election_ms:
            raise RaftRefused(
                f"{member} lacks {lacks} entries and sent its last message {peer.silent_ms} ms ago", self.me
            )
        if peer.suspect or peer.match < 0:
            raise RaftRefused(f"{member} has not recovered its log yet", self.me)
        self._change_members(members)

    def remove(self, member: str) -> None:
        """Remove a voter or learner. A leader that removes itself steps down once the change is committed."""
        left = self._require_changeable_members().without(member)
        if not left.has_quorum(self._require_ready_leader().without_suspects(left)):
            raise RaftRefused(f"without {member} no majority of the voters has a complete log", self.me)
        self._change_members(left)

    # -- results that the caller collects

    def effects(self) -> Effects:
        """Return the work that follows from the events of this loop iteration. Each item is returned once."""
        effects = Effects()
        if self._changes:
            effects.log, self._changes = self._changes, []
        if self._state is not self._saved and self._state is not self._asked_to_save:
            effects.state = self._asked_to_save = self._state
        if self._log_state.visible > self._reported_commit:
            effects.committed = self._reported_commit = self._log_state.visible
        now = (self.role, self.term, self.leader)
        if now != self._reported:
            self._reported = now
            effects.role = RoleChange(*now, self._reason)
            self._reason = ""
        return effects

    def messages(self) -> list[AnyMessage]:
        """Return the messages to send. The caller must first do the work that `effects` has returned."""
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
        """Return the time by which the caller must call `tick` again, in ms on the caller's clock."""
        due = self._election_at
        if self._leading is not None:
            due = min([self._leading.quorum_at, *(p.heartbeat_at for p in self._leading.peers.values())])
        if self._trust is not None:
            due = min(due, self._clock + self._options.heartbeat_ms)
        if self._state is not self._saved:  # No message is sent until the state is saved
            due = max(due, self._clock + self._options.heartbeat_ms)
        return (self._now or 0) + max(due - self._clock, 0)

    # -- terms and roles

    def _is_disturbing(self, message: AnyMessage) -> bool:
        """Return whether the message is a vote request that is ignored, because there is an active leader.

        This is so if this member leads, or has received a message from its leader within the last election
        timeout. The vote is then refused if the request is a pre-vote request, and not answered otherwise. A
        request on behalf of a leadership transfer is never ignored.
        """
        if not isinstance(message, VoteRequest) or message.transfer or message.term <= self.term:
            return False
        if self.role is not Role.LEADER and (
            not self.leader or self._clock - self._leader_contact_at >= self._options.election_ms
        ):
            return False
        if message.pre:
            self._vote(message, granted=False)
        return True

    def _is_of_this_term(self, message: AnyMessage) -> bool:
        """Adopt the term of a message if it is higher and no pre-vote's. Reject a request of a lower term."""
        if message.term > self.term:
            is_pre_vote_request = isinstance(message, VoteRequest) and message.pre
            is_pre_vote_grant = isinstance(message, VoteResponse) and message.pre and message.granted
            if not is_pre_vote_request and not is_pre_vote_grant:
                leader = message.sender if isinstance(message, AppendRequest) else ""
                self._become_follower(message.term, leader)
        elif message.term < self.term:
            if isinstance(message, AppendRequest):
                self._outbox.add([self._response(message.sender, NO_INDEX)])
            elif isinstance(message, VoteRequest):
                self._vote(message, granted=False)
            return False
        return True

    def _become_follower(self, term: int, leader: str, reason: str = "") -> None:
        if self._leading is not None:
            self._reason = reason or f"term {term} has begun"
        if term > self.term or leader != self.leader:
            self._following.agreed = self._log_state.commit
        if term > self.term:
            self._state = msgspec.structs.replace(self._state, term=term, vote="")
            self._outbox.take()
        self.role = Role.FOLLOWER
        self.leader = leader
        self._leading = None
        self._wait_for_leader()

    def _wait_for_leader(self) -> None:
        timeout_ms = self._options.election_ms
        self._election_at = self._clock + self._between(timeout_ms, 2 * timeout_ms)

    def _may_lead(self) -> bool:
        return (
            self._disk_writable
            and self.may_stand
            and not self._state.suspect
            and self._has_vote()
            and self.term + 1 < MAX_TERM
            and self._log_state.last < MAX_INDEX
        )

    def _has_vote(self) -> bool:
        """Return whether this member may vote. A removed member may vote until its removal is committed."""
        history = self._log_state.history
        return self.me in history.newest.members.voters | history.at(self._log_state.commit).members.voters

    def _start_pre_vote(self) -> None:
        """Send pre-vote requests to the voters, because the leader sent nothing for an election timeout."""
        if not self._may_lead():
            self._become_follower(self.term, "")
            return
        self.role = Role.PRE_CANDIDATE
        self.leader = ""
        self._votes = {self.me}
        self._by_transfer = False
        self._wait_for_leader()
        self._ask_for_votes(pre=True)

    def _start_election(self, by_transfer: bool) -> None:
        """Start a new term as its candidate. Votes are requested once the new term has been saved."""
        self._become_follower(self.term + 1, "")
        self._state = msgspec.structs.replace(self._state, vote=self.me)
        self.role = Role.CANDIDATE
        self._votes = set()
        self._by_transfer = by_transfer

    def _ask_for_votes(self, pre: bool) -> None:
        log_state = self._log_state
        for voter in sorted(self.members.voters - {self.me}):
            self._outbox.send(
                VoteRequest, voter, term=self.term + pre, last_index=log_state.last,
                last_term=log_state.last_term, pre=pre, transfer=self._by_transfer,
            )  # fmt: skip
        self._count_votes()

    def _count_votes(self) -> None:
        if not self.members.has_quorum(self._votes):
            return
        if self.role is Role.PRE_CANDIDATE:
            self._start_election(by_transfer=False)
        else:
            self._become_leader()

    def _on_vote_request(self, request: VoteRequest) -> None:
        """Process a vote request of the current term, or a pre-vote request of this or a later term."""
        vote = self._state.vote
        taken = request.term == self.term and vote != request.sender and (vote or self.leader)
        up_to_date = self._log_state.is_up_to_date(request.last_index, request.last_term)
        granted = not taken and not self._state.suspect and up_to_date
        if granted and not request.pre:
            self._become_follower(self.term, "")
            self._state = msgspec.structs.replace(self._state, vote=request.sender)
        self._vote(request, granted)

    def _vote(self, request: VoteRequest, granted: bool) -> None:
        term, blank = request.term if granted else self.term, is_blank(self._state, self._log_state)
        fields = {"pre": request.pre, "run": request.run, "blank": blank}
        self._outbox.send(VoteResponse, request.sender, term=term, granted=granted, **fields)

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
        self._following.check_request(request)
        if not self.leader:
            self._become_follower(self.term, request.sender)
        self._leader_contact_at = self._clock
        self._wait_for_leader()
        if self._trust is not None:
            self._trust.record_leader_contact(request)
        changes = self._following.apply(request) if self._disk_writable else []
        if changes is None:
            self._outbox.add([self._rejection(request)])
            return
        self._reply_due = True
        self._changes += changes
        self._keep_members()
        self._end_suspicion()

    def _rejection(self, request: AppendRequest) -> AppendResponse:
        hint = self._log_state.last_at_most(request.prev_index - 1, request.prev_term)
        response, hint_term = self._response(request.sender), self._log_state.term_of(hint)
        return msgspec.structs.replace(
            response, rejected=True, prev_index=request.prev_index, hint_index=hint, hint_term=hint_term
        )

    def _keep_members(self) -> None:
        """Copy the member lists of the log into the state, so that they are saved."""
        entries = self._log_state.history.entries
        if entries != self._state.members:
            self._state = msgspec.structs.replace(self._state, members=entries)

    def _end_suspicion(self) -> None:
        if self._trust is not None:
            agreed = min(self._following.agreed, self._log_state.durable)
            state = self._trust.trusted_state(self._state, self._log_state, agreed)
            if state is not None:
                self._state, self._trust = state, None

    def _response(self, to: str, written: int | None = None) -> AppendResponse:
        if written is None:
            written = self._following.agreed
        run = 0 if self._trust is None else self._trust.incarnation
        match = NO_INDEX if run else min(written, self._log_state.durable)
        return AppendResponse(
            group=self.group, sender=self.me, to=to, term=self.term, run=run, match=match, written=written,
            full=self.full,
        )  # fmt: skip

    # -- leading

    def _become_leader(self) -> None:
        self.role = Role.LEADER
        self.leader = self.me
        identity = (self.group, self.me, self.term)
        self._leading = Leading(identity, self._log_state, self._log, self._options, self._clock)
        self._leading.follow_members(self._clock)
        self._append_own(None)

    def _append_own(self, members: MembersEntry | None) -> None:
        self._log_state.append(1, self.term)
        self._changes.append(AppendOwn(self._log_state.last, self.term, members))

    def _check_quorum(self, leading: Leading) -> None:
        """Abort an expired leadership transfer. Step down if no majority responds for an election timeout."""
        if leading.transfer is not None and self._clock >= leading.transfer[1]:
            leading.transfer = None
        if self._clock >= leading.quorum_at:
            responded = leading.responded_since(leading.quorum_at - self._options.election_ms)
            if not self.members.has_quorum(responded):
                self._become_follower(self.term, "", "no majority has responded for an election timeout")
                return
            leading.quorum_at = self._clock + self._options.election_ms

    def _on_append_response(self, response: AppendResponse) -> None:
        if self._leading is not None:
            self._leading.process_response(response, self._clock)
            self._commit_more()
            self._continue_transfer()

    def _commit_more(self) -> None:
        """Commit the entries of the current term that a majority holds (docs/reference/raft.md, Commits)."""
        leading, log_state = self._leading, self._log_state
        if leading is None or self._state is not self._saved:
            return
        index = leading.quorum_index(log_state.durable)
        if index <= log_state.commit or not self._is_own(index):
            return
        log_state.commit = index
        if log_state.history.newest.index <= index and self.me not in self.members.voters:
            self._send_transfer_request(leading.most_advanced())
            self._outbox.add(leading.requests(self._clock))
            self._become_follower(self.term, "", "it is no longer a voter")

    def _is_own(self, index: int) -> bool:
        return self._log_state.term_of(index) == self.term

    def _continue_transfer(self) -> None:
        if self._leading is not None and self._leading.transfer is not None:
            to = self._leading.transfer[0]
            if self._leading.peers[to].match == self._log_state.last:
                self._send_transfer_request(to)

    def _send_transfer_request(self, to: str) -> None:
        if to:
            self._outbox.send(TransferRequest, to, term=self.term)

    def _require_ready_leader(self) -> Leading:
        if self._leading is None:
            raise RaftRefused(f"{self.me} does not lead", self.leader)
        if not self.ready:
            raise RaftRefused("the leader has not committed the first entry of its term yet", self.me)
        return self._leading

    def _require_changeable_members(self) -> Members:
        """Return the current members, so that the caller can change them. Raises RaftRefused."""
        if self._require_ready_leader().transfer is not None:
            raise RaftRefused("the leadership is being transferred", self.me)
        newest = self._log_state.history.newest
        if newest.index > self._log_state.commit:
            raise RaftRefused("the previous change of the members is not committed yet", self.me)
        if self._log_state.history.full:
            raise RaftRefused("the log contains too many changes of the members", self.me)
        return newest.members

    def _change_members(self, members: Members) -> None:
        entry = MembersEntry(self._log_state.last + 1, self.term, members)
        self._append_own(entry)
        self._log_state.history.add(entry)
        self._keep_members()
        if self._leading is not None:
            self._leading.follow_members(self._clock)
