"""A raft member at work: its node, its log, its connections, and what the broker does as leader or follower.

The node (cometmq.raft) decides; `turn`, at the end of each tick in which something happened and when the node
says, carries out what it wants: changes of the log, term and vote on the disk, messages, committed entries.
Sends become entries in the store's commit, which asks `propose` for their places. While something takes its
time (term and vote go to the disk, the log is cut) messages of members are dropped, as a bad network would.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from cometmq import logs
from cometmq.broker.replication import raft_state
from cometmq.broker.replication.commit_waits import CommitWaits
from cometmq.broker.replication.raft_entries import NodeLog, behind, body_of, with_entries
from cometmq.broker.replication.raft_peers import Peers
from cometmq.broker.replication.rates import Rate
from cometmq.errors import CometError, RaftMessageError, RaftRefused, StoreError
from cometmq.raft import (
    AnyMessage,
    Append,
    AppendOwn,
    AppendRequest,
    Effects,
    HardState,
    LogChange,
    Proposed,
    RaftNode,
    RaftOptions,
    Reset,
    RoleChange,
    Truncate,
)
from cometmq.remoting import Tick, port_error
from cometmq.store import CACHED, Buffer, Clock, Flag, Ledger, MessageStore, NotInMemory, Reads

log = logs.logger(__name__)

HAND_OVER_S = 1.0
"""A leader that stops waits so long for another one."""
DISK_AGAIN_S = 5.0
"""After a failure of the disk it is looked at again so often."""
PREFER_S = 10.0
"""A leader that is not preferred, or has a full disk, looks this often whether another one can take over."""


class Office(Protocol):
    """What the broker does when it becomes the leader, or stops being it."""

    async def prepare(self) -> None:
        """Read what a master must know before it takes anything. Raises OSError, StoreError."""
        ...

    def lead(self) -> None:
        """Deliver what is due, register as the master."""
        ...

    def follow(self) -> None:
        """Do none of it."""
        ...

    def met(self) -> None:
        """A member has said who it is, and where its broker is."""
        ...


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Which member this is. addresses: of all members, by name; this one's too. broker_addr: of this broker.
    joins: whether it waits to be taken into a group that is there. preferred: the members that are to lead
    rather than others (preferredLeaderId)."""

    me: str
    group: str
    addresses: Mapping[str, str]
    broker_addr: str
    joins: bool = False
    preferred: Collection[str] = ()


@dataclass(slots=True)
class Received:
    """What has come from the leader, for people who watch. last: index of its last entry; times in ms."""

    rate: Rate = field(default_factory=Rate)
    last: int = -1
    read_ms: int = 0
    written_ms: int = 0


class RaftMember:
    """One member. Made with a store that keeps a raft log; `start` begins to take part."""

    def __init__(
        self,
        seat: Seat,
        *,
        store: MessageStore,
        clock: Clock,
        timeout_s: float,
        tick: Tick,
        end_tick: Callable[[], None],
        office: Office,
        options: RaftOptions,
    ) -> None:
        """timeout_s: how long a send waits for its commit. tick: at its end `end_tick` is called, which
        commits what the broker has appended. Raises StoreError, OSError."""
        assert store.ledger is not None
        me, group = seat.me, seat.group
        self.me = me
        self._addresses = seat.addresses
        self._preferred = seat.preferred
        self._prefer_at = 0.0
        self._options = options
        self.received = Received()
        self._store = store
        self._ledger: Ledger = store.ledger
        self._clock = clock
        self._tick = tick
        self._commit_tick = end_tick
        self._office = office
        self._loop = asyncio.get_running_loop()
        voters = frozenset() if seat.joins else frozenset(seat.addresses)
        self._state = raft_state.load(store.disk, self._ledger, voters)
        self.node = RaftNode(
            me, group, NodeLog(self._ledger), self._state, random.SystemRandom().randint, self._options,
            self._ledger.committed,
        )  # fmt: skip
        self.peers = Peers(
            group, me, seat.addresses[me], seat.broker_addr,
            receive=self._receive, heard=self._schedule, met=self._met, begins=self._begins,
        )  # fmt: skip
        self.leading = False
        self._led = asyncio.Event()  # set when it leads no more
        self._slow: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[None] | None = None
        self._reading: set[asyncio.Task[None]] = set()
        self._first = self._ledger.first
        self.waits = CommitWaits(clock, timeout_s)
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self.failed = False
        """Whether it takes no part any more until it is started again."""
        self._due = False
        self._failed_at: float | None = None
        self._ledger.on_synced = self._synced
        self._ledger.propose = self.propose
        self._ledger.on_failure = self._not_written
        self._failure: CometError | OSError | None = None

    @property
    def suspect(self) -> bool:
        """Whether its log was found damaged, or empty, and is not whole again: it has no vote."""
        return self._state.suspect

    async def start(self, host: str) -> None:
        """Listen for members, and connect to them. Raises ConfigError for a port that is taken."""
        _, _, port = self._addresses[self.me].rpartition(":")
        try:
            await self.peers.listen(host, int(port))
        except OSError as error:
            raise port_error("dLegerPeers", int(port), error) from error
        self._use_members()
        self.turn()

    def retire(self) -> None:
        """It is about to stop: it does not become the leader any more."""
        self.node.may_stand = False

    async def stop(self) -> None:
        """Take part no more. A leader hands over first, so that the group need not miss it."""
        if self.leading and self._give_away():
            self._led = asyncio.Event()
            try:
                await asyncio.wait_for(self._led.wait(), HAND_OVER_S)
            except TimeoutError:
                log.warning("raft: %s stops, and nobody has taken over from it in time", self.me)
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = (self._slow, self._taking, *self._reading)
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        await self.peers.stop()
        self.waits.give_up("the broker stops")

    def _give_away(self) -> bool:
        """Begin to hand the leadership over to the voter that has most; False if nobody can have it."""
        peers = self.node.status().peers
        voters = self.node.members.voters & set(peers)
        try:
            self.transfer(max(sorted(voters), key=lambda member: peers[member].match, default=""))
        except RaftRefused:
            return False
        return True

    # -- sends

    def propose(self, count: int) -> int:
        """So many entries of this tick are to follow; returns the index of the first. Raises RaftRefused."""
        if self._slow is not None:
            raise RaftRefused("the group changes", self.me)
        first = self.node.propose(count)
        self._schedule()
        return first

    # -- events

    def _receive(self, message: AnyMessage) -> None:
        if isinstance(message, AppendRequest) and message.count and not isinstance(message.payload, bytes):
            raise RaftMessageError("payload", 0, f"expected {message.count} entries")
        if self._slow is None and not self._stopped:
            self.node.receive(message)
            if isinstance(message, AppendRequest) and message.sender == self.node.leader:
                self.received.last = message.last
                self.received.read_ms = self._clock.time_ms()
                self.received.rate.add(self._clock.monotonic(), len(message.payload or b""))

    def _synced(self, index: int) -> None:
        """The device has the log up to an entry."""
        if self._store.config.sync_flush:
            self.node.persisted(index, self._ledger.term_of(index))
            self._schedule()

    def _schedule(self) -> None:
        """A turn at the end of this tick."""
        if not self._stopped:
            self._due = True
            self._tick.schedule()

    def end_tick(self) -> None:
        """What came in this tick is to be looked at."""
        if self._due:
            self._due = False
            self.turn()

    def turn(self) -> None:
        """Carry out what the node wants."""
        if self._stopped or self._slow is not None:
            return
        try:
            if not self._carried_out():
                return
        except Exception as error:
            self._give_in(error)
            return
        if self._stopped:
            return
        messages = self.node.messages()
        if messages:
            self.peers.send([loaded for each in messages if (loaded := self._loaded(each)) is not None])
        if self._timer is not None:
            self._timer.cancel()
        due_s = max(0.001, self.node.due_ms() / 1000 - self._clock.boottime())  # the node counts in whole ms
        self._timer = self._loop.call_later(due_s, self.turn)

    def _carried_out(self) -> bool:
        """Whether that is done already; else a task does the rest, and comes back."""
        self._commit_tick()
        self._watch_disk()
        self.node.tick(int(self._clock.boottime() * 1000))
        while not self._stopped and _is_something(effects := self.node.effects()):
            if effects.role is not None:
                self._before_log(effects.role)  # first, so that nothing is appended while the log is cut
            if effects.state is not None or any(map(_cuts, effects.log)):
                self._slow = self._loop.create_task(self._carry_out_slowly(effects))
                return False
            self._carry_out(effects)
        self._forget_deleted()
        if self._may_take_office() and self._taking is None:
            self._taking = self._loop.create_task(self._take_office(self.node.term))
        now = self._clock.boottime()
        if self.leading and (self._preferred or self.node.full) and now >= self._prefer_at:
            self.prefer(now)
        return True

    async def _carry_out_slowly(self, effects: Effects) -> None:
        """What must be on the device before the node goes on."""
        cuts, state = any(map(_cuts, effects.log)), effects.state
        try:
            if state is not None:
                truncates = any(isinstance(change, Truncate) for change in effects.log)
                await self._save(raft_state.before_cut(state, self._state) if truncates else state)
                self.node.state_saved(state)
            while any(map(_cuts, effects.log)):
                change = effects.log.pop(0)
                if isinstance(change, Truncate):
                    await self._ledger.truncate(change.first)
                elif isinstance(change, Reset):
                    await self._ledger.reset(change.first)
                else:
                    self._write([change])
            cuts = False
            if state is not None and state is not self._state:
                await self._save(state)
            self._carry_out(effects)
        except (CometError, OSError) as error:
            if cuts:  # the node counts on them
                self._give_in(error)
            else:
                self._failed(error)
        except Exception as error:
            self._give_in(error)
        self._slow = None
        self.turn()

    async def _save(self, state: HardState) -> None:
        disk, directory = self._store.disk, self._ledger.directory
        await asyncio.to_thread(raft_state.save, disk, directory, state, self._state)
        if self._state.suspect and not state.suspect:
            log.warning("raft: the log of %s is whole, and has a vote", self.me)
        self._state = state

    def _carry_out(self, effects: Effects) -> None:
        """Changes of the log, and what is committed."""
        ledger = self._ledger
        try:
            self._write(effects.log)
            if effects.log and not self._store.config.sync_flush:
                self.node.persisted(ledger.last, ledger.term_of(ledger.last))
            elif effects.log:
                self._store.flusher.request()
            if effects.committed is not None:
                ledger.commit_to(effects.committed)
                self.waits.committed(ledger.place_of(effects.committed).end)
        except (CometError, OSError) as error:
            self._failed(error)
        if effects.role is not None or effects.state is not None:
            self._use_members()

    def _write(self, changes: list[LogChange]) -> None:
        """New entries. Raises CometError, OSError; those in front of the one that failed are written."""
        if not changes:
            return
        self._commit_tick()  # what waits there has somebody who wants an answer
        problem: CometError | OSError | None = None
        written = False
        try:
            for change in changes:
                if isinstance(change, AppendOwn):
                    self._ledger.lead(change.term)
                    self._ledger.append_own(body_of(change))
                    written = True
                elif isinstance(change, Append):
                    last = self._ledger.append(behind(change.payload, change.skip))
                    self.received.written_ms = self._clock.time_ms()
                    written = True
                    if last != change.first + change.count - 1:
                        raise StoreError(f"{last} is the last of the entries that came, not as was said")
                else:
                    assert isinstance(change, Proposed)  # the store's commit has written them
        except (CometError, OSError) as error:
            problem = error
        if written:
            problem = self._store.commit().error or problem
        if problem is not None:
            raise problem

    def _may_take_office(self) -> bool:
        """All that former leaders left is committed, and nothing of this one's is on its way."""
        ledger = self._ledger
        return self.node.ready and not self.leading and ledger.committed == ledger.last

    async def _take_office(self, term: int) -> None:
        """Begin to take messages."""
        try:
            await self._office.prepare()
            if self._may_take_office() and self.node.term == term and not self._stopped:
                self._ledger.take_messages()
                self.leading = True
                self._prefer_at = self._clock.boottime() + PREFER_S
                log.warning("raft: %s leads its group from term %d on", self.me, term)
                self._office.lead()
        except RaftRefused as refusal:
            log.error("raft: %s takes no messages yet: %s", self.me, refusal)
            self._give_away()
        except (CometError, OSError) as error:
            self._failure = error
        except Exception as error:
            self._give_in(error)
        finally:
            self._taking = None
            self._schedule()

    def _give_in(self, error: Exception) -> None:
        """A member that does not know what it has done must not go on."""
        log.critical("raft: %s takes no part any more until it is started again", self.me, exc_info=error)
        self._stopped = self.failed = True
        self._stop_leading("it has failed")
        self._office.follow()

    def _before_log(self, role: RoleChange) -> None:
        reason = role.reason or f"{role.leader or 'nobody'} leads"
        self._stop_leading(reason)
        log.info(
            "raft: %s is %s in term %d, leader %s", self.me, role.role.value, role.term, role.leader or "-"
        )
        if role.leader != self.me:
            self._office.follow()

    def _stop_leading(self, reason: str) -> None:
        if self.leading:
            self.leading = False
            self._led.set()
            self._ledger.follow()
            self.waits.give_up(reason)
            log.warning("raft: %s leads no more: %s", self.me, reason)

    # -- the disk

    def _failed(self, error: CometError | OSError) -> None:
        log.critical("raft: the log or the state of %s could not be written: %s", self.me, error)
        self._failed_at = self._clock.boottime()
        self._failure = None
        left = self.node.effects()
        try:
            if any(map(_cuts, left.log)):
                raise StoreError("the log was to be cut just then") from error
            self.node.disk_failed(self._ledger.last, str(error))
        except CometError as contradiction:
            self._give_in(contradiction)
            return
        if left.role is not None:
            self._before_log(left.role)
        self._carry_out(Effects(committed=left.committed, role=left.role))

    def _not_written(self, failure: OSError) -> None:
        self._failure = failure
        self._schedule()

    def _watch_disk(self) -> None:
        """A leader whose disk has failed leaves; it is looked at again now and then."""
        reasons, now = self._store.flags.reasons, self._clock.boottime()
        self.node.full = Flag.DISK_FULL in reasons
        failure, self._failure = self._failure, None
        if failure is not None:
            self._failed(failure)
        elif self._failed_at is None and Flag.NOT_WRITEABLE in reasons:
            self._failed(StoreError(reasons[Flag.NOT_WRITEABLE]))
        elif self._failed_at is not None and now - self._failed_at >= DISK_AGAIN_S:
            self._failed_at = now
            if not reasons.keys() - {Flag.DISK_FULL}:  # which says so itself
                self._failed_at = None
                self.node.disk_recovered()

    # -- members

    def transfer(self, to: str) -> None:
        """Hand the leadership over. For this and the changes below: RaftRefused says why not."""
        self._asked(self.node.transfer, to)

    def prefer(self, now: float) -> None:
        """Hand over to the preferred member that has most, or with a full disk to any, if one is alive, has
        room and nearly all. What comes of it shows at the next look."""
        self._prefer_at = now + PREFER_S
        full, peers = self.node.full, self.node.status().peers
        if self.me in self._preferred and not full:
            return
        able = [
            each
            for each in sorted(self.node.members.voters & peers.keys())
            if self.keeps_up(each) and not peers[each].full
        ]
        wanted = [each for each in able if each in self._preferred]
        if not (wanted or (full and able)):
            return
        to = max(wanted or able, key=lambda member: peers[member].match)
        why = "its disk is full" if full else f"{to} is preferred"
        log.warning("raft: %s hands over to %s: %s", self.me, to, why)
        with contextlib.suppress(RaftRefused):  # a transfer that an operator has begun, or a change under way
            self.transfer(to)

    def keeps_up(self, member: str) -> bool:
        """Whether another member, as this leader knows it, answers and lacks only the newest entries."""
        status = self.node.status()
        peer = status.peers.get(member)
        return (
            peer is not None
            and peer.silent_ms <= self._options.election_ms
            and status.last - peer.match <= self._options.caught_up
        )

    def add_learner(self, member: str) -> None:
        """Let a member receive the log. It runs already, and has said where it is."""
        if member not in self._addresses and member not in self.peers.learned:
            raise RaftRefused(f"{member} is not known: is it running, with this member in its dLegerPeers?")
        self._asked(self.node.add_learner, member)

    def promote(self, member: str) -> None:
        """Give a learner that has caught up a vote."""
        self._asked(self.node.promote, member)

    def remove(self, member: str) -> None:
        """Take a member out."""
        self._asked(self.node.remove, member)

    def _asked(self, change: Callable[[str], None], member: str) -> None:
        if self._slow is not None:
            raise RaftRefused("the group changes just now", self.me)
        change(member)
        self._schedule()

    def _met(self) -> None:
        self._use_members()
        self._office.met()

    def _begins(self) -> tuple[str, ...]:
        """The members of a group that may begin, in order; none once there is a group."""
        blank = self.node.term == 0 and self._ledger.last < 0
        return tuple(sorted(self.node.members.voters)) if blank else ()

    def settled(self, term: int) -> None:
        """Topics and groups are those of the leader of this term, and durable."""
        if self._slow is None and not self._stopped:
            self.node.tables_copied(term)
            self._schedule()

    def _use_members(self) -> None:
        """Talk to those who belong to the group, or may."""
        everybody = self.node.members.all_ids | set(self._addresses)
        known = {member: self.address_of(member) for member in sorted(everybody) if member != self.me}
        self.peers.use({member: addr for member, addr in known.items() if addr})

    def address_of(self, member: str) -> str:
        """Where a member listens for the others, "" if that is not known."""
        learned = self.peers.learned.get(member)
        return self._addresses.get(member) or (learned.addr if learned is not None else "")

    def end_of(self, index: int) -> int:
        """Where in the log an entry ends; of one that is not there, where the log begins. Raises OSError."""
        there = self._ledger.first <= index <= self._ledger.last
        return self._ledger.place_of(index).end if there else self._store.log.min_position

    def _loaded(self, message: AnyMessage) -> AnyMessage | None:
        """The message with its entries; None if these are not in memory: then it is sent later."""
        if not isinstance(message, AppendRequest) or not message.count:
            return message
        first = message.prev_index + 1
        try:
            entries = self._ledger.range(first, first + message.count, 1 << 62)
            question = partial(self._ledger.read, entries)
            return with_entries(message, question(CACHED))
        except NotInMemory as miss:
            task = self._loop.create_task(self._send_cold(message, question, miss))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)
        except (CometError, OSError) as error:  # the others are to hear of this leader all the same
            log.error("raft: entries for %s cannot be read: %s", message.to, error)
        return None

    async def _send_cold(
        self, message: AppendRequest, question: Callable[[Reads], Buffer], miss: NotInMemory
    ) -> None:
        try:
            data = await self._store.off_loop.ask(question, miss)
        except (CometError, OSError) as error:
            log.error("raft: entries for %s cannot be read: %s", message.to, error)
            return
        self.peers.send([with_entries(message, data)])

    def _forget_deleted(self) -> None:
        """Retention may have deleted the oldest entries, or the log has begun anew."""
        first = self._ledger.first
        if first > self._first and first <= self._ledger.committed:
            self._first = first
            self.node.log_trimmed(first)


def _cuts(change: LogChange) -> bool:
    return isinstance(change, Truncate | Reset)


def _is_something(effects: Effects) -> bool:
    return bool(
        effects.log or effects.state is not None or effects.committed is not None or effects.role is not None
    )
