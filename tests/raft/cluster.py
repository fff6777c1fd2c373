"""A raft group in memory, driven by a seed: network, disks and clocks fail, and the rules must still hold.

Only the raft core is real. `Member` replaces the code around a member's core. Its log is a list of entries
(term, value), of which the synced part survives a crash. After every event the checks below run on new
entries.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec

from cometmq.errors import RaftRefused
from cometmq.raft import (
    AnyMessage,
    Append,
    AppendOwn,
    AppendRequest,
    AppendResponse,
    HardState,
    Members,
    MembersEntry,
    Proposed,
    RaftNode,
    RaftOptions,
    Reset,
    Role,
    Truncate,
    VoteRequest,
    VoteResponse,
)  # fmt: skip

Entry = tuple[
    int, Any
]  # term and value: a proposed number, a MembersEntry, or None for a leader's first entry


class Broken(AssertionError):
    """A violation of a rule that must always hold."""


def hold(condition: object, rule: str) -> None:
    if not condition:
        raise Broken(rule)


@dataclass
class Disk:
    """The data that a member has written, and the part that survives a power failure."""

    state: HardState
    first: int = 0
    log: list[Entry] = field(default_factory=list)
    synced_first: int = 0
    synced: list[Entry] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.first + len(self.log) - 1

    def term_of(self, index: int) -> int:
        return self.log[index - self.first][0]

    def fit(self, first: int, stop: int) -> int:
        return min(first + 3, stop)

    def begin(self, first: int, log: list[Entry]) -> None:
        """Set the log, all of it synced."""
        self.first = self.synced_first = first
        self.log, self.synced = log, log[:]

    def members(self) -> Members:
        """Return the members according to the log."""
        entries = [value for _, value in self.log if isinstance(value, MembersEntry)]
        return ([*self.state.members, *entries] or [MembersEntry(-1, -1, Members())])[-1].members

    def has_synced(self, index: int, entry: Entry) -> bool:
        at = index - self.synced_first
        return at < 0 or (at < len(self.synced) and self.synced[at] == entry)


@dataclass
class Faults:
    """The severity of faults: probabilities, and times in ms."""

    drop: float = 0.0
    twice: float = 0.0
    delay: int = 10  # maximum delay of a message
    sync: int = 5  # maximum duration of a sync
    lose_unsynced: bool = True  # whether a crash is a power failure
    trap: float = 0.0  # probability of a fault directly after an important event
    hurry: int = 1  # factor by which election timeouts are shorter

    @classmethod
    def of(cls, rng: random.Random) -> Faults:
        return cls(
            drop=rng.choice((0, 0, 0.02, 0.1)),
            twice=rng.choice((0, 0.02, 0.1)),
            delay=rng.choice((2, 20, 80)),
            sync=rng.choice((1, 10, 80)),
            lose_unsynced=rng.random() < 0.8,
            trap=rng.choice((0, 0.1, 0.4)),
            hurry=rng.choice((1, 5)),
        )


class Member:
    """A raft node with a replacement for the code around it."""

    def __init__(self, cluster: Cluster, name: str, state: HardState, terms: Sequence[int] = ()) -> None:
        self.cluster = cluster
        self.name = name
        self.begun = state.members  # the members according to its settings
        self.disk = Disk(state, log=[(term, None) for term in terms])
        self.offset = cluster.rng.randrange(1 << 40)
        self.committed = -1
        self.run = 0  # number of starts
        self.rotten_until = 0  # runs before this one receive no messages
        self.node: RaftNode | None = None
        self.syncing = False
        self.dirty = False
        self.saved_at = 0  # time of the last requested save; saves are done in order
        self.cut = 1 << 60  # lowest entry truncated since the running sync began
        self.tick_at = 1 << 60
        self.held: list[Callable[[RaftNode], object]] | None = None  # events that wait while it is paused
        self.start()

    def start(self) -> None:
        cluster, disk = self.cluster, self.disk
        found = [value for _, value in disk.log if isinstance(value, MembersEntry)]
        before = [each for each in disk.state.members if each.index < disk.first]
        disk.state = msgspec.structs.replace(disk.state, members=(*before, *found))
        disk.begin(disk.first, disk.log)
        committed = self.committed if cluster.rng.random() < 0.5 else None
        self.run += 1
        self.syncing = self.dirty = False
        self.node = cluster.make(
            self.name, "g", disk, disk.state, cluster.rng.randint, cluster.options, committed=committed
        )
        self.tick_at = 1 << 60
        self.do(lambda node: None)

    def do(self, event: Callable[[RaftNode], object]) -> None:
        """Handle an event, and then the node's effects."""
        node = self.node
        if node is None:
            return
        if self.held is not None:
            self.held.append(event)
            return
        node.tick(self.cluster.now + self.offset)
        if self.disk.state.forgot and node.leader:
            node.tables_copied(node.term)
        event(node)
        self.turn(node)
        self.cluster.events += 1

    def turn(self, node: RaftNode) -> None:
        cluster = self.cluster
        effects = node.effects()
        works = self.change_log(effects.log)
        if effects.state is not None:
            self.saved_at = max(self.saved_at, cluster.now + cluster.rng.randint(1, cluster.faults.sync))
            cluster.at(self.saved_at - cluster.now, self.save, self.run, effects.state)
        if effects.committed is not None:
            cluster.check_committed(self, effects.committed)
        if effects.role is not None and effects.role.role is Role.LEADER:
            cluster.check_leader(self, effects.role.term)
        if cluster.faults.trap and (effects.committed is not None or effects.role is not None or effects.log):
            cluster.spring(self)
        if not works:
            node.disk_failed(self.disk.last, "the disk is full")
            cluster.at(cluster.rng.randint(100, 3_000), self.mend, self.run)
            self.turn(node)
            return
        for message in node.messages():
            cluster.check_sent(self, message)
            if isinstance(message, AppendRequest) and message.count:
                start = message.prev_index + 1 - self.disk.first
                payload = self.disk.log[start : start + message.count]
                hold(len(payload) == message.count and start >= 0, "a leader sends what it has")
                message = msgspec.structs.replace(message, payload=payload)
            cluster.send(message)
        due = node.due_ms() - self.offset
        if due < self.tick_at:
            self.tick_at = max(due, cluster.now + 1)
            cluster.at(self.tick_at - cluster.now, self.tick, self.run, self.tick_at)

    def pause(self, ms: int) -> None:
        """Pause as after SIGSTOP; events wait meanwhile."""
        if self.node is not None and self.held is None:
            self.held = []
            self.cluster.at(ms, self.resume, self.run)

    def resume(self, run: int) -> None:
        if run == self.run:
            held, self.held = self.held or [], None
            for event in held:
                self.do(event)

    def tick(self, run: int, at: int) -> None:
        if run == self.run and at == self.tick_at:
            self.tick_at = 1 << 60
            self.do(lambda node: None)

    def change_log(self, changes: list[Any]) -> bool:
        """Apply changes to the log; return whether all were written. Truncations are always applied."""
        cluster, disk = self.cluster, self.disk
        works = True
        for change in changes:
            match change:
                case Truncate():
                    hold(change.first > self.committed, "nothing committed is cut")
                    if change.first <= disk.last:
                        del disk.log[change.first - disk.first :]
                        self.cut = min(self.cut, change.first)
                    continue
                case Reset():
                    hold(change.first > self.committed, "nothing committed is dropped")
                    self.committed = change.first - 1
                    disk.begin(change.first, [])
                    self.cut = -1
                    continue
                case Proposed():
                    first = change.first
                    new = [(change.term, cluster.next_value()) for _ in range(change.count)]
                case Append():
                    first, new = change.first, change.payload[change.skip :]
                    hold(len(new) == change.count, "all entries are written")
                case AppendOwn():
                    first, new = change.index, [(change.term, change.members)]
            if cluster.failing_disk == self.name:
                cluster.failing_disk = ""
                works = False
            if works:
                hold(first == disk.last + 1, "entries follow each other")
                for index, entry in enumerate(new, first):
                    cluster.check_entry(index, entry, disk.log[-1][0] if disk.log else None)
                    disk.log.append(entry)
        if changes:
            self.dirty = True
            self.sync()
        return works

    def sync(self) -> None:
        if self.dirty and not self.syncing:
            self.dirty = False
            self.syncing = True
            self.cut = 1 << 60
            faults, disk = self.cluster.faults, self.disk
            delay = self.cluster.rng.randint(1, faults.sync) if faults.lose_unsynced else 1
            self.cluster.at(delay, self.synced, self.run, disk.first, disk.log[:])

    def synced(self, run: int, first: int, log: list[Entry]) -> None:
        if run != self.run:
            return
        disk = self.disk
        self.syncing = False
        if self.cut >= 0:
            disk.synced, disk.synced_first = log, first
            last = min(first + len(log), self.cut) - 1
            if last >= max(first, disk.first):
                term = log[last - first][0]
                self.do(lambda node: node.persisted(last, term))
        self.sync()

    def save(self, run: int, state: HardState) -> None:
        if run == self.run and self.node is not None:
            hold(state.term >= self.disk.state.term, "terms do not fall")
            self.disk.state = state
            self.do(lambda node: node.state_saved(state))

    def mend(self, run: int) -> None:
        if run == self.run:
            self.do(lambda node: node.disk_recovered())

    def retain(self) -> None:
        """Delete old entries."""
        if self.node is None or self.held is not None:
            return
        disk, committed = self.disk, self.node.status().committed
        if committed > disk.first:
            first = self.cluster.rng.randint(disk.first, committed)
            self.do(lambda node: node.log_trimmed(first))
            del disk.log[: first - disk.first]
            disk.first = first

    def crash(self, rot: bool = False) -> None:
        """Crash. With `rot` the log is damaged and ends before the damage."""
        if self.node is None:
            return
        self.node = self.held = None
        self.run += 1
        rng, disk = self.cluster.rng, self.disk
        if self.cluster.faults.lose_unsynced:
            kept = disk.synced[max(disk.first - disk.synced_first, 0) :]
            same = next(
                (i for i, (new, old) in enumerate(zip(disk.log, kept, strict=False)) if new != old),
                min(len(disk.log), len(kept)),
            )
            disk.log = disk.log[: rng.randint(same, len(disk.log))] if rng.random() < 0.5 else kept
        hold(disk.last >= self.committed, "what was reported as committed outlives a crash")
        if rot and disk.log:
            del disk.log[rng.randrange(len(disk.log)) :]
            disk.state = msgspec.structs.replace(disk.state, suspect=True)
            self.committed = min(self.committed, disk.last)
            self.rotten_until = self.run + 1

    def lose_disk(self) -> None:
        """Crash and lose the disk; the member keeps only its name."""
        self.crash()
        self.disk = Disk(HardState(members=self.begun, suspect=True, forgot=True))
        self.committed = -1
        self.rotten_until = self.run + 1
        own = [key for key, choice in self.cluster.votes.items() if key[0] == self.name == choice]
        for key in own:  # its vote for itself is lost with the disk
            del self.cluster.votes[key]


class Cluster:
    """Members, the network between them, and the history so far."""

    def __init__(
        self,
        seed: int,
        size: int = 3,
        faults: Faults | None = None,
        make: Callable[..., RaftNode] = RaftNode,
        terms: Sequence[Sequence[int]] = (),
    ) -> None:
        """Create a group; `terms` are those of the entries with which all members start."""
        self.rng = random.Random(seed)
        self.make = make
        self.faults = faults or Faults()
        hurry = self.faults.hurry
        self.options = RaftOptions(
            heartbeat_ms=200 // hurry,
            election_ms=1_000 // hurry,
            frame_entries=8,
            frames=4,
            outstanding=64,
            caught_up=5,
        )
        self.now = 0
        self.events = 0
        self.queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.queued = 0
        self.blocked: set[tuple[str, str]] = set()
        self.failing_disk = ""
        self.value = 0
        self.leaders: dict[int, str] = {}
        self.votes: dict[tuple[str, int], str] = {}
        self.entries: dict[tuple[int, int], tuple[Entry, int | None]] = {}
        self.committed: list[Entry] = []
        self.committed_in: list[int] = []  # the terms in which these entries were reported as committed
        self.filter: Callable[[AnyMessage], AnyMessage | None] = lambda message: message
        names = [f"n{i}" for i in range(size)]
        start = MembersEntry(-1, -1, Members(frozenset(names)))
        self.members: dict[str, Member] = {}
        state = HardState(max((term for log in terms for term in log), default=0), "", (start,))
        for name, log in zip_longest(names, terms, fillvalue=()):
            self.members[str(name)] = Member(self, str(name), state, [int(term) for term in log])

    # -- the world

    def at(self, delay: int, what: Callable[..., None], *args: Any) -> None:
        self.queued += 1
        heapq.heappush(self.queue, (self.now + delay, self.queued, what, args))

    def run(self, ms: int, until: Callable[[], bool] | None = None) -> bool:
        """Let `ms` pass, or less if `until` becomes true; return whether it did."""
        end = self.now + ms
        while self.queue and self.queue[0][0] <= end:
            self.now, _, what, args = heapq.heappop(self.queue)
            what(*args)
            if until is not None and until():
                return True
        self.now = end
        return False

    def send(self, message: AnyMessage) -> None:
        faults, rng = self.faults, self.rng
        kept = self.filter(message)
        if kept is None or kept.to not in self.members:
            return
        message = kept
        if (message.sender, message.to) in self.blocked or (faults.drop and rng.random() < faults.drop):
            return
        run = self.members[message.to].run
        self.at(rng.randint(1, faults.delay), self.deliver, message, run)
        if faults.twice and rng.random() < faults.twice:
            self.at(rng.randint(1, 4 * faults.delay), self.deliver, message, run)

    def deliver(self, message: AnyMessage, run: int) -> None:
        member = self.members[message.to]
        if run >= member.rotten_until and (message.sender, message.to) not in self.blocked:
            member.do(lambda node: node.receive(message))

    def next_value(self) -> int:
        self.value += 1
        return self.value

    def join(self, name: str) -> Member:
        """Add a new member, which has no member list."""
        self.members[name] = Member(self, name, HardState(suspect=True, forgot=True))
        return self.members[name]

    def spring(self, member: Member) -> None:
        """Perhaps cause a fault for a member that has just become leader, committed or written."""
        rng = self.rng
        leads = member.node is not None and member.node.role is Role.LEADER
        if rng.random() < (self.faults.trap if leads else self.faults.trap / 10):
            if rng.random() < 0.5:
                self.at(rng.randint(1, 10), member.crash)
                self.at(rng.randint(20, 2_000), self.wake, member)
            else:
                others = [name for name in self.members if name != member.name and rng.random() < 0.7]
                pairs = {(member.name, name) for name in others} | {(name, member.name) for name in others}
                self.blocked |= pairs
                self.at(rng.randint(20, 3_000), self.blocked.difference_update, pairs)

    def wake(self, member: Member) -> None:
        if member.node is None:
            member.start()

    # -- queries

    def leader(self) -> Member | None:
        """Return the leader of the highest term that is ready."""
        ready = [m for m in self.members.values() if m.node is not None and m.node.ready]
        return max(ready, key=lambda m: m.node.term if m.node else 0, default=None)

    def lead(self) -> Member:
        """Wait for a leader."""
        self.run(20_000, until=lambda: self.leader() is not None)
        leader = self.leader()
        hold(leader is not None, "there is a leader in time")
        assert leader is not None
        return leader

    def ask(self, member: Member, what: Callable[[RaftNode], object]) -> str:
        """Run a request of a client or operator; return the reason of a refusal, or ""."""
        refusal = ""

        def event(node: RaftNode) -> None:
            nonlocal refusal
            try:
                what(node)
            except RaftRefused as refused:
                refusal = str(refused)

        if member.held is None:  # a paused member would handle it too late
            member.do(event)
        return refusal

    def put(self, count: int = 1) -> int:
        """Propose entries to the leader until they are committed there; return the last index."""
        end = self.now + 20_000
        while self.now < end:
            leader = self.lead()
            if self.ask(leader, lambda node: node.propose(count)):
                self.run(100)  # the leader hands over or steps down
                continue
            last = leader.disk.last
            if self.run(5_000, until=lambda: leader.committed >= last):  # noqa: B023 (runs before the next turn)
                return last
        raise Broken("a proposal is committed in time")

    # -- invariants

    def check_leader(self, member: Member, term: int) -> None:
        hold(self.leaders.setdefault(term, member.name) == member.name, "a term has one leader")
        disk = member.disk
        # A paused member may learn late that it was elected, in a term that has ended.
        for index in range(disk.first, bisect_left(self.committed_in, term)):
            ok = index <= disk.last and disk.log[index - disk.first] == self.committed[index]
            hold(ok, "a leader has all that is committed")

    def check_entry(self, index: int, entry: Entry, before: int | None) -> None:
        """Check: if two logs have an entry of the same index and term, all earlier entries are equal."""
        known, known_before = self.entries.setdefault((index, entry[0]), (entry, before))
        same_before = before is None or known_before is None or before == known_before
        hold(known == entry and same_before, "logs match")
        if known_before is None and before is not None:
            self.entries[index, entry[0]] = (entry, before)
        hold(before is None or before <= entry[0], "terms do not fall in a log")

    def check_committed(self, member: Member, index: int) -> None:
        disk = member.disk
        hold(index <= disk.last, "what is committed is there")
        for each in range(max(disk.first, member.committed + 1), index + 1):
            entry = disk.log[each - disk.first]
            hold(disk.has_synced(each, entry), "what is reported as committed is durable there")
            if each < len(self.committed):
                hold(self.committed[each] == entry, "members agree on what is committed")
            else:
                hold(each == len(self.committed), "commits have no gaps")
                self.committed.append(entry)
                terms = [member.node.term if member.node else 0, *self.committed_in[-1:]]
                self.committed_in.append(max(terms))
                self.check_majority(member, each, entry)
        member.committed = max(member.committed, index)

    def check_majority(self, member: Member, index: int, entry: Entry) -> None:
        """Check that a majority of the voters has a newly committed entry on disk.

        The voters are those that the member or a leader knows.
        """
        nodes = [each.node for each in (member, *self.members.values()) if each.node is not None]
        groups = {node.members.voters for node in nodes if node is member.node or node.role is Role.LEADER}
        # A member whose log was damaged may have lost the entry: it has no vote until it has the entry again.
        have = {
            each.name
            for each in self.members.values()
            if each.disk.has_synced(index, entry) or each.disk.state.suspect
        }
        hold(
            any(len(have & voters) > len(voters) // 2 for voters in groups),
            "a majority has what is committed on disk",
        )

    def check_sent(self, member: Member, message: AnyMessage) -> None:
        disk = member.disk
        if not getattr(message, "pre", False):
            hold(message.term <= disk.state.term, "a term is saved before it is said")
        match message:
            case VoteResponse(granted=True, pre=False):
                self.check_vote(member, message.term, message.to)
            case VoteRequest(pre=False):
                self.check_vote(member, message.term, member.name)
            case AppendResponse(rejected=False) if message.match >= disk.first:
                entry = disk.log[message.match - disk.first]
                hold(disk.has_synced(message.match, entry), "what is acknowledged is on disk")
            case _:
                pass

    def check_vote(self, member: Member, term: int, candidate: str) -> None:
        hold(self.votes.setdefault((member.name, term), candidate) == candidate, "one vote a term")
