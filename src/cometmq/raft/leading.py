"""The leader's side of log replication: the progress of the other members, and the requests to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from cometmq.errors import RaftMessageError
from cometmq.raft.log_state import LogState
from cometmq.raft.members import Members
from cometmq.raft.messages import NO_INDEX, NO_TERM, AppendRequest, AppendResponse, LogView, RaftOptions, Role


class PeerStatus(msgspec.Struct, frozen=True):
    """The state of another member as its leader knows it.

    Attributes:
        match: The index of the last entry that the member is known to hold durably.
        silent_ms: The time since the member's last response, in ms.
        full: Whether the member's disk is nearly full.
        suspect: Whether the member's log may have lost entries. Such a log counts for no majority.
    """

    match: int
    silent_ms: int
    full: bool = False
    suspect: bool = False


class Status(msgspec.Struct, frozen=True):
    """The state of a node. `peers` holds the other members by id; it is empty if this node does not lead."""

    role: Role
    term: int
    leader: str
    members: Members
    first: int
    last: int
    durable: int
    committed: int
    peers: dict[str, PeerStatus]


class Peer(msgspec.Struct, eq=False):
    """The replication progress of one member.

    While `probing` is set, the leader searches for the last entry that is equal in its own log and the
    member's. It then sends one request with one entry at a time. Afterwards it sends requests without waiting
    for responses.

    Attributes:
        match: The index of the last entry that the member is known to hold durably.
        next: The index of the next entry to send.
        probe_sent: Whether a probe has been sent and not answered yet.
        in_flight_ends: For each unanswered request, the index of its last entry.
        last_response_at, heartbeat_at: The time of the last response, and of the next heartbeat.
        sent_commit: The commit index in the last request.
        leaving: Whether the member has been removed, but the removal is not committed yet.
        full, run: The fields of these names in the member's last response.
    """

    next: int
    last_response_at: int
    heartbeat_at: int
    match: int = NO_INDEX
    probing: bool = True
    probe_sent: bool = False
    in_flight_ends: deque[int] = msgspec.field(default_factory=deque)
    sent_commit: int = NO_INDEX
    leaving: bool = False
    full: bool = False
    run: int = 0

    def start_probing(self, next_index: int) -> None:
        """Start to search for the last entry that the member's log has in common with the leader's log.

        The first probe sends the entry `next_index`. Each later probe sends an earlier entry.
        """
        self.next = next_index
        self.probing = True
        self.probe_sent = False
        self.in_flight_ends.clear()

    def accept(self, match: int, written: int) -> None:
        """Process a member's response that accepts the entries of a request."""
        self.match = max(self.match, match)
        if self.probing:
            self.probing = False
            self.next = written + 1
        self.next = max(self.next, self.match + 1)
        while self.in_flight_ends and self.in_flight_ends[0] <= written:
            self.in_flight_ends.popleft()

    def reject(self, prev_index: int, agrees: int) -> None:
        """Process a member's response that rejects a request, because the member lacks entry `prev_index`.

        `agrees` is the last entry before it that may be equal in both logs.
        """
        if prev_index != self.next - 1 if self.probing else prev_index < self.match:
            return  # The response belongs to an outdated request
        if prev_index == self.match:
            self.match = agrees  # The member lost durable entries: its disk was wiped or ignores syncs
        self.start_probing(max(agrees, self.match) + 1)


class Leading:
    """The state that a leader keeps during one term. Times are on the node's clock, in ms.

    `me` is the group, the leader's id and its term. The stored `log`, which `log_state` describes,
    determines how many entries fit into a request. The term begins at the time `clock`.

    Attributes:
        first_own: The index of the first entry of this term.
        quorum_at: The time at which the leader next checks that a majority has responded.
        peers: The other members, by id.
        transfer: During a leadership transfer, the member that is to become the leader, and the time at which
            the transfer is aborted. Otherwise None.
    """

    def __init__(
        self, me: tuple[str, str, int], log_state: LogState, log: LogView, options: RaftOptions, clock: int
    ) -> None:
        self._group, self._me, self._term = me
        self._log_state, self._log, self._options = log_state, log, options
        self.first_own = log_state.last + 1
        self.quorum_at = clock + options.election_ms
        self.peers: dict[str, Peer] = {}
        self.transfer: tuple[str, int] | None = None

    def follow_members(self, clock: int) -> None:
        """Adopt the newest member list. Removed members get entries until their removal is committed."""
        newest = self._log_state.history.newest
        for member in sorted(newest.members.all_ids - self.peers.keys() - {self._me}):
            self.peers[member] = Peer(self._log_state.last + 1, clock, clock)
        for member, peer in self.peers.items():
            peer.leaving = member not in newest.members.all_ids

    def quorum_index(self, own: int) -> int:
        """Return the last entry that a majority of voters holds; `own` is the leader's last durable entry."""
        voters = self._log_state.history.newest.members.voters
        matches = sorted(own if v == self._me else self.peers[v].match for v in voters)
        return matches[(len(matches) - 1) // 2]

    def without_suspects(self, members: Members) -> frozenset[str]:
        """Return the voters of `members` without those whose log is known to be suspect."""
        return members.voters - {member for member, peer in self.peers.items() if peer.run}

    def statuses(self, clock: int) -> dict[str, PeerStatus]:
        return {
            name: PeerStatus(peer.match, clock - peer.last_response_at, peer.full, peer.run > 0)
            for name, peer in self.peers.items()
        }

    def responded_since(self, clock: int) -> set[str]:
        """Return this leader and the members whose last response arrived at the time `clock` or later."""
        responded = {member for member, peer in self.peers.items() if peer.last_response_at >= clock}
        return responded | {self._me}

    def most_advanced(self) -> str:
        """Return the other voter that holds the most entries, or "" if there is no other voter."""
        voters = self._log_state.history.newest.members.voters & self.peers.keys()
        return max(sorted(voters), key=lambda member: self.peers[member].match, default="")

    def process_response(self, response: AppendResponse, clock: int) -> None:
        """Update the member's progress. Raises RaftMessageError for entries beyond the leader's log."""
        peer = self.peers.get(response.sender)
        if peer is None:
            return  # The member was removed before its response arrived
        log_state = self._log_state
        if max(response.match, response.written) > log_state.last:
            raise RaftMessageError("written", response.written, f"the leader's log ends at {log_state.last}")
        peer.last_response_at = clock
        peer.full = response.full
        peer.run = response.run
        if response.rejected:
            hint = min(response.hint_index, response.prev_index - 1)
            peer.reject(response.prev_index, log_state.last_at_most(hint, response.hint_term))
        else:
            peer.accept(response.match, response.written)
        if peer.next < log_state.first:
            peer.start_probing(log_state.first)
            # Do not probe before the next heartbeat, because the member may be unable to store entries.
            peer.probe_sent = True

    def log_trimmed(self, first: int) -> None:
        """Probe members that need entries before `first`, because those entries were deleted."""
        for peer in self.peers.values():
            if peer.next < first:
                peer.start_probing(first)

    def requests(self, clock: int) -> Iterator[AppendRequest]:
        """Yield the requests that are due: new entries within the limits, heartbeats, new commit indexes."""
        for member, peer in list(self.peers.items()):
            removed = peer.leaving and self._log_state.commit >= self._log_state.history.newest.index
            if removed:
                peer.heartbeat_at = clock  # A last request informs the member that its removal is committed
            yield from self._requests_to(member, peer, clock)
            if removed:
                del self.peers[member]

    def _requests_to(self, member: str, peer: Peer, clock: int) -> Iterator[AppendRequest]:
        due = clock >= peer.heartbeat_at
        if peer.probing:
            if due or not peer.probe_sent:
                yield self._request(member, peer, 1, clock)
                peer.probe_sent = True
            return
        sent = False
        while peer.next <= self._log_state.last and len(peer.in_flight_ends) < self._options.frames:
            request = self._request(member, peer, self._options.frame_entries, clock)
            peer.next += request.count
            peer.in_flight_ends.append(peer.next - 1)
            sent = True
            yield request
        if not sent and (due or (peer.sent_commit < self._log_state.commit and not peer.in_flight_ends)):
            yield self._request(member, peer, 0, clock)

    def _request(self, member: str, peer: Peer, max_entries: int, clock: int) -> AppendRequest:
        log_state = self._log_state
        first = max(peer.next, log_state.first)
        prev_term = log_state.term_of(first - 1)
        stop = min(first + max_entries, log_state.last + 1)
        entries_term = 0
        if first < stop:
            entries_term = log_state.term_of(first)
            stop = min(stop, log_state.end_of_term(first))
            stop = min(max(self._log.fit(first, stop), first + 1), stop)
        members = log_state.history.between(first, stop - 1)
        if prev_term == NO_TERM:
            members = (log_state.history.at(first - 1), *members)
        peer.sent_commit = log_state.commit
        peer.heartbeat_at = clock + self._options.heartbeat_ms
        return AppendRequest(
            group=self._group, sender=self._me, to=member, term=self._term, run=peer.run,
            prev_index=first - 1, prev_term=prev_term, count=stop - first, entries_term=entries_term,
            last=log_state.last, commit=log_state.commit, members=members,
        )  # fmt: skip
