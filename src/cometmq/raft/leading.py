"""What a leader knows of the other members, and what it sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from cometmq.errors import RaftMessageError
from cometmq.raft.account import LogAccount
from cometmq.raft.members import Members
from cometmq.raft.messages import NO_INDEX, NO_TERM, AppendRequest, AppendResponse, LogView, RaftOptions, Role


class PeerStatus(msgspec.Struct, frozen=True):
    """What a leader knows of a member. match: it has the log up to here; silent_ms: since it last answered;
    full: its disk has little room; suspect: its log is, so that it does not count."""

    match: int
    silent_ms: int
    full: bool = False
    suspect: bool = False


class Status(msgspec.Struct, frozen=True):
    """A node at a glance. peers: what a leader knows of the others, by id; empty elsewhere."""

    role: Role
    term: int
    leader: str
    members: Members
    first: int
    last: int
    durable: int
    committed: int
    peers: dict[str, PeerStatus]


class Peer:
    """How far one member is.

    match: it has the leader's log up to here, durably. next: the entry to be sent next. While `probing`,
    where its log and the leader's agree is looked for: one request at a time, with one entry. Afterwards
    requests follow each other without waiting, `ends` being the last entries of those not yet answered.
    """

    __slots__ = (
        "asked",
        "beat_at",
        "ends",
        "full",
        "heard_at",
        "leaving",
        "match",
        "next",
        "probing",
        "run",
        "told",
    )

    def __init__(self, next_index: int, clock: int) -> None:
        self.match = NO_INDEX
        self.next = next_index
        self.probing = True
        self.asked = False
        self.ends: deque[int] = deque()
        self.heard_at = clock
        self.beat_at = clock
        self.told = NO_INDEX  # the commit index it was sent
        self.leaving = False
        self.full = False
        self.run = 0  # of a member whose log is suspect

    def probe(self, next_index: int) -> None:
        self.next = next_index
        self.probing = True
        self.asked = False
        self.ends.clear()

    def accepted(self, match: int, written: int) -> None:
        self.match = max(self.match, match)
        if self.probing:
            self.probing = False
            self.next = written + 1
        self.next = max(self.next, self.match + 1)
        while self.ends and self.ends[0] <= written:
            self.ends.popleft()

    def rejected(self, prev_index: int, agrees: int) -> None:
        """It does not have entry prev_index. agrees: the last entry that may agree, before that one."""
        if prev_index != self.next - 1 if self.probing else prev_index < self.match:
            return  # the answer to a request from before
        if prev_index == self.match:
            self.match = agrees  # it has lost what it had: a disk that was wiped, or no flush before answers
        self.probe(max(agrees, self.match) + 1)


class Leading:
    """A leader's knowledge of the others, for the time of one leadership.

    whose: group, id and term of the leader. first_own: index of the first entry of its term. Times are on the
    node's clock.
    """

    def __init__(
        self,
        whose: tuple[str, str, int],
        account: LogAccount,
        log: LogView,
        options: RaftOptions,
        clock: int,
    ) -> None:
        self._group, self._me, self._term = whose
        self._account = account
        self._log = log
        self._options = options
        self.first_own = account.last + 1
        self.quorum_at = clock + options.election_ms
        self.peers: dict[str, Peer] = {}
        self.transfer: tuple[str, int] | None = None  # to whom, until when

    def follow_members(self, clock: int) -> None:
        """Members have come or gone. Who has gone is told until that is committed."""
        newest = self._account.history.newest
        for member in sorted(newest.members.everybody - self.peers.keys() - {self._me}):
            self.peers[member] = Peer(self._account.last + 1, clock)
        for member, peer in self.peers.items():
            peer.leaving = member not in newest.members.everybody

    def quorum_index(self, own: int) -> int:
        """What a majority of the voters has, `own` being the leader's own durable index."""
        voters = self._account.history.newest.members.voters
        matches = sorted(own if v == self._me else self.peers[v].match for v in voters)
        return matches[(len(matches) - 1) // 2]

    def without_suspects(self, members: Members) -> frozenset[str]:
        """The voters among these that are not known to be suspect."""
        return members.voters - {member for member, peer in self.peers.items() if peer.run}

    def statuses(self, clock: int) -> dict[str, PeerStatus]:
        """Of all of them."""
        return {
            name: PeerStatus(peer.match, clock - peer.heard_at, peer.full, peer.run > 0)
            for name, peer in self.peers.items()
        }

    def heard_since(self, clock: int) -> set[str]:
        """Who has answered since, and the leader itself."""
        heard = {member for member, peer in self.peers.items() if peer.heard_at >= clock}
        return heard | {self._me}

    def most_advanced(self) -> str:
        """The voter that has most, but for the leader; "" if there is none."""
        voters = self._account.history.newest.members.voters & self.peers.keys()
        return max(sorted(voters), key=lambda member: self.peers[member].match, default="")

    def answered(self, response: AppendResponse, clock: int) -> None:
        peer = self.peers.get(response.sender)
        if peer is None:
            return  # it has left meanwhile
        account = self._account
        if max(response.match, response.written) > account.last:
            raise RaftMessageError("written", response.written, f"the leader's log ends at {account.last}")
        peer.heard_at = clock
        peer.full = response.full
        peer.run = response.run
        if response.rejected:
            hint = min(response.hint_index, response.prev_index - 1)
            peer.rejected(response.prev_index, account.last_at_most(hint, response.hint_term))
        else:
            peer.accepted(response.match, response.written)
        if peer.next < account.first:
            peer.probe(account.first)
            peer.asked = True  # not at once: what answered so may be unable to take entries

    def begins_at(self, first: int) -> None:
        for peer in self.peers.values():
            if peer.next < first:
                peer.probe(first)

    def requests(self, clock: int) -> Iterator[AppendRequest]:
        """What is to be sent now: entries as far as there is room, heart-beats, the end of the committed."""
        for member, peer in list(self.peers.items()):
            gone = peer.leaving and self._account.commit >= self._account.history.newest.index
            if gone:
                peer.beat_at = clock  # its last word: what is committed
            yield from self._requests_to(member, peer, clock)
            if gone:
                del self.peers[member]

    def _requests_to(self, member: str, peer: Peer, clock: int) -> Iterator[AppendRequest]:
        due = clock >= peer.beat_at
        if peer.probing:
            if due or not peer.asked:
                yield self._request(member, peer, 1, clock)
                peer.asked = True
            return
        sent = False
        while peer.next <= self._account.last and len(peer.ends) < self._options.frames:
            request = self._request(member, peer, self._options.frame_entries, clock)
            peer.next += request.count
            peer.ends.append(peer.next - 1)
            sent = True
            yield request
        if not sent and (due or (peer.told < self._account.commit and not peer.ends)):
            yield self._request(member, peer, 0, clock)

    def _request(self, member: str, peer: Peer, most: int, clock: int) -> AppendRequest:
        account = self._account
        first = max(peer.next, account.first)
        prev_term = account.term_of(first - 1)
        stop = min(first + most, account.last + 1)
        entries_term = 0
        if first < stop:
            entries_term = account.term_of(first)
            stop = min(stop, account.run_stop(first))
            stop = min(max(self._log.fit(first, stop), first + 1), stop)
        members = account.history.between(first, stop - 1)
        if prev_term == NO_TERM:
            members = (account.history.at(first - 1), *members)
        peer.told = account.commit
        peer.beat_at = clock + self._options.heartbeat_ms
        return AppendRequest(
            group=self._group,
            sender=self._me,
            to=member,
            term=self._term,
            prev_index=first - 1,
            prev_term=prev_term,
            count=stop - first,
            entries_term=entries_term,
            last=account.last,
            commit=account.commit,
            members=members,
            run=peer.run,
        )
