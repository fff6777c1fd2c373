"""A running member of a raft group. It connects the raft node with the log, other members and the broker.

The node (cometmq.raft) makes the decisions. `turn` carries out their effects: changes of the log, writing
term and vote to the disk, messages to members, committed entries. `turn` runs at the end of each event-loop
tick with an event, and when a timer of the node expires. Sends become log entries in the store's commit,
which calls `propose` to get the indexes of the entries. While a slow effect is in progress (term and vote are
written, or the log is truncated), messages from other members are dropped, just as an unreliable network may
drop messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Protocol

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.members import peers_of, preferred_of
from cometmq.broker.base.stats import Rate
from cometmq.broker.replication import raft_state
from cometmq.broker.replication.raft_peers import Peers
from cometmq.broker.replication.raft_state import EntryReads, NodeLog, behind, body_of
from cometmq.broker.replication.waits import CommitWaits
from cometmq.errors import CometError, RaftMessageError, RaftRefused, StoreError
from cometmq.periodic import Backoff, Tasks
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
from cometmq.store import Clock, Flag, MessageStore
from cometmq.store.raft_log import RaftLog

log = logs.logger(__name__)

HANDOFF_TIMEOUT_S = 1.0
"""The maximum time, in seconds, that a stopping leader waits for another member to become the leader."""
COPY_TIMEOUT_S = 0.5
"""Maximum time, in seconds, that a stopping leader first waits until a majority has its tables."""
TRANSFER_COPY_TIMEOUT_S = 1.5
"""The same for a leader that is not stopping. relay.py holds sends during a transfer, for at most 2 s."""
DISK_TEST_INTERVAL_S = 5.0
"""The interval, in seconds, between two tests of a disk that has failed."""
PREFER_INTERVAL_S = 10.0
"""Interval, in seconds, at which a leader that is not preferred, or whose disk is full, seeks a successor."""
MAX_PREFER_INTERVAL_S = 640.0
"""Maximum of that interval. Each refused attempt doubles it, because sends are held during an attempt."""


class LeaderRole(Protocol):
    """The work that a broker begins when it becomes the leader, and ends when it is no longer the leader."""

    async def prepare(self) -> None:
        """Read the state that a leader needs before it can accept messages. Raises OSError or StoreError."""

    def lead(self) -> None:
        """Start to deliver delayed messages, and register with the name servers as the master."""

    def follow(self) -> None:
        """Stop the work of the leader."""

    def met(self) -> None:
        """Handle a handshake: another member has sent its name and its broker's address."""

    def hand_over(self) -> None:
        """Begin to relay sends, because this leader begins to transfer its leadership, or has lost it."""

    async def copy_tables(self) -> None:
        """Wait until a majority has this leader's topics and groups. Raises RaftRefused if that fails."""


class RaftMember:
    """One member of a raft group, active from `start` to `stop`. Its store must have a raft log."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        store: MessageStore,
        tick: Tick,
        *,
        end_tick: Callable[[], None],
        leader_role: LeaderRole,
        options: RaftOptions,
    ) -> None:
        """Create the member. Raises StoreError or OSError if its state cannot be read.

        The caller calls `RaftMember.end_tick` at the end of each event-loop tick. `end_tick` commits what the
        broker has appended in the current tick.
        """
        assert store.raft_log is not None
        settings = config.store
        self.me, group = settings.d_leger_self_id, settings.d_leger_group
        self._addresses = dict(peers_of(settings.d_leger_peers))
        self._preferred = preferred_of(settings.preferred_leader_id)
        self._prefer_at = 0.0
        # The delays between a refused automatic transfer of the leadership and the next attempt.
        self._refusals = Backoff(2 * PREFER_INTERVAL_S, MAX_PREFER_INTERVAL_S)
        self._options = options
        # What this follower has received from the leader: bytes, the index of its last entry, times (ms).
        self.received_bytes, self.leader_last, self.read_ms, self.written_ms = Rate(), -1, 0, 0
        self._store = store
        self._raft_log: RaftLog = store.raft_log
        self._clock = clock
        self._tick = tick
        self._commit_tick = end_tick
        self._leader_role = leader_role
        self._loop = asyncio.get_running_loop()
        voters = frozenset[str]() if config.d_leger_join else frozenset(self._addresses)
        self._state = raft_state.load(store.disk, self._raft_log, voters)
        self.node = RaftNode(
            self.me, group, NodeLog(self._raft_log), self._state, random.SystemRandom().randint, options,
            self._raft_log.committed,
        )  # fmt: skip
        self.peers = Peers(
            group, self.me, self._addresses[self.me],
            receive=self._receive, heard=self._schedule, met=self._met, begins=self._begins,
        )  # fmt: skip
        self.leading = False
        self._succeeded = asyncio.Event()  # Cleared from the end of a leadership to the next leader
        self._succeeded.set()
        self._handoff = asyncio.Lock()
        self._slow: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[None] | None = None
        self._entries = EntryReads(self._raft_log, store, lambda message: self.peers.send([message]))
        self._transfers = Tasks()
        self._first = self._raft_log.first
        self.waits = CommitWaits(clock, config.slave_timeout / 1000)
        self._timer: asyncio.TimerHandle | None = None
        self.stopped = True
        """Whether this member does not run. It is then not notified of new leaders."""
        self.failed = False
        """Whether this member has stopped because of an error. It remains so until the broker restarts."""
        self._due = False
        self._failed_at: float | None = None
        self._raft_log.on_synced = self._synced
        self._raft_log.propose = self.propose
        self._raft_log.on_failure = self._not_written
        self._failure: CometError | OSError | None = None

    @property
    def suspect(self) -> bool:
        """Whether the log was lost or damaged and is still incomplete. Until then, it has no vote."""
        return self._state.suspect

    async def start(self, host: str, broker_addr: str) -> None:
        """Listen for members, and connect to them. Raises ConfigError if the port is in use.

        `broker_addr` is the address of this member's broker, for clients.
        """
        _, _, port = self._addresses[self.me].rpartition(":")
        try:
            await self.peers.listen(host, int(port), broker_addr)
        except OSError as error:
            raise port_error("dLegerPeers", int(port), error) from error
        self.stopped = False
        self._use_members()
        self.turn()

    async def retire(self) -> None:
        """Prepare for the broker's stop: transfer the leadership, and do not become the leader again.

        Wait for the new leader, which may need this member's vote, and to which this broker relays sends.
        """
        self.node.may_stand = False
        if self.leading:
            await self._hand_over()
        try:
            await asyncio.wait_for(self._succeeded.wait(), HANDOFF_TIMEOUT_S)
        except TimeoutError:
            log.warning("raft: %s stops before another member has taken over the leadership", self.me)

    async def stop(self) -> None:
        """Stop this member of the raft group, and close all its connections."""
        self.stopped = True
        if self._timer is not None:
            self._timer.cancel()
        await self._transfers.finish(cancel=True)
        tasks = (self._slow, self._taking, *self._entries.tasks)
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        await self.peers.stop()
        self.waits.give_up("the broker stops")

    async def _hand_over(self) -> None:
        """Begin to transfer the leadership to the best voter, even if a copy of the tables fails."""
        peers = self.node.status().peers

        def fitness(member: str) -> tuple[bool, bool, int, int]:
            peer = peers[member]
            return self.keeps_up(member), not peer.full, peer.match, -peer.silent_ms

        to = max(sorted(self.node.members.voters & set(peers)), key=fitness, default="")
        try:
            async with asyncio.timeout(COPY_TIMEOUT_S):
                if self._slow is not None:  # Leadership transfers are refused while this task runs
                    await asyncio.wait({self._slow})
                await self.transfer(to)
        except (RaftRefused, TimeoutError):
            with contextlib.suppress(RaftRefused):
                self._transfer_now(to)

    def propose(self, count: int) -> int:
        """Reserve the log indexes of `count` new entries, and return the first one. Raises RaftRefused."""
        if self._slow is not None:
            raise RaftRefused("the group changes", self.me)
        first = self.node.propose(count)
        self._schedule()
        return first

    # -- events

    def _receive(self, message: AnyMessage) -> None:
        if isinstance(message, AppendRequest) and message.count and not isinstance(message.payload, bytes):
            raise RaftMessageError("payload", 0, f"expected {message.count} entries")
        if self._slow is None and not self.stopped:
            self.node.receive(message)
            if isinstance(message, AppendRequest) and message.sender == self.node.leader:
                self.leader_last, self.read_ms = message.last, self._clock.time_ms()
                self.received_bytes.add(self._clock.monotonic(), len(message.payload or b""))

    def _synced(self, index: int) -> None:
        if self._store.config.sync_flush:
            self.node.persisted(index, self._raft_log.term_of(index))
            self._schedule()

    def _schedule(self) -> None:
        if not self.stopped:
            self._due = True
            self._tick.schedule()

    def end_tick(self) -> None:
        if self._due:
            self._due = False
            self.turn()

    def turn(self) -> None:
        """Carry out the effects of the node's decisions, and send its messages."""
        if self.stopped or self._slow is not None:
            return
        try:
            if not self._carried_out():
                return
        except Exception as error:
            self._fail(error)
            return
        if self.stopped:
            return
        messages = self.node.messages()
        if messages:
            self.peers.send([loaded for each in messages if (loaded := self._entries.load(each)) is not None])
        if self._timer is not None:
            self._timer.cancel()
        due_s = max(0.001, self.node.due_ms() / 1000 - self._clock.boottime())  # The node's times are in ms
        self._timer = self._loop.call_later(due_s, self.turn)

    def _carried_out(self) -> bool:
        """Carry out the node's effects. Return False if a task carries them out and then calls `turn`."""
        self._commit_tick()
        self._watch_disk()
        self.node.tick(int(self._clock.boottime() * 1000))
        while not self.stopped and (effects := self.node.effects()) != Effects():
            if effects.role is not None:
                # A change of role comes first: a former leader must not append while its log is truncated.
                self._before_log(effects.role)
            if effects.state is not None or _cuts(effects):
                self._slow = self._loop.create_task(self._carry_out_slowly(effects))
                return False
            self._carry_out(effects)
        self._forget_deleted()
        if self._may_lead() and self._taking is None:
            self._taking = self._loop.create_task(self._begin_leading(self.node.term))
        now = self._clock.boottime()
        if self.accepts and (self._preferred or self.node.full) and now >= self._prefer_at:
            self.prefer(now)
        return True

    async def _carry_out_slowly(self, effects: Effects) -> None:
        """Carry out effects, such as a truncation, that must be on the disk before the node can continue."""
        cuts, state = _cuts(effects), effects.state
        try:
            if state is not None:
                truncates = any(isinstance(change, Truncate) for change in effects.log)
                await self._save(raft_state.before_cut(state, self._state) if truncates else state)
                self.node.state_saved(state)
            while _cuts(effects):
                change = effects.log.pop(0)
                if isinstance(change, Truncate):
                    await self._raft_log.truncate(change.first)
                elif isinstance(change, Reset):
                    await self._raft_log.reset(change.first)
                else:
                    self._write([change])
            cuts = False
            if state is not None and state is not self._state:
                await self._save(state)
            self._carry_out(effects)
        except (CometError, OSError) as error:
            # After a failed truncation, the node must not continue: the log may still contain entries that
            # the node regards as removed.
            if cuts:
                self._fail(error)
            else:
                self._failed(error)
        except Exception as error:
            self._fail(error)
        self._slow = None
        self.turn()

    async def _save(self, state: HardState) -> None:
        disk, directory = self._store.disk, self._raft_log.directory
        await asyncio.to_thread(raft_state.save, disk, directory, state, self._state)
        if self._state.suspect and not state.suspect:
            log.warning("raft: %s has restored its log and votes again", self.me)
        self._state = state

    def _carry_out(self, effects: Effects) -> None:
        """Commit entries, and only then write new ones: a failed write must not prevent the commit."""
        raft_log = self._raft_log
        try:
            # After a reset of the log, the log's commit index may be higher than `effects.committed`.
            if effects.committed is not None and effects.committed > raft_log.committed:
                raft_log.commit_to(effects.committed)
                self.waits.committed(raft_log.location_of(effects.committed).end)
            self._write(effects.log)
            if effects.log and not self._store.config.sync_flush:
                self.node.persisted(raft_log.last, raft_log.term_of(raft_log.last))
            elif effects.log:
                self._store.flusher.request()
        except (CometError, OSError) as error:
            self._failed(error)
        if effects.role is not None or effects.state is not None:
            self._use_members()

    def _write(self, changes: list[LogChange]) -> None:
        """Write new entries to the log. After a CometError or OSError, the entries before it are written."""
        if not changes:
            return
        self._commit_tick()  # Before changing the log, commit what the broker has appended in this tick
        problem: CometError | OSError | None = None
        written = False
        try:
            for change in changes:
                if isinstance(change, AppendOwn):
                    self._raft_log.lead(change.term)
                    self._raft_log.append_own(body_of(change))
                    written = True
                elif isinstance(change, Append):
                    last = self._raft_log.append(behind(change.payload, change.skip))
                    self.written_ms = self._clock.time_ms()
                    written = True
                    if last != change.first + change.count - 1:
                        raise StoreError(f"the received entries end at {last}, not at the announced end")
                else:  # Nothing to do: the store's commit has already written these entries
                    assert isinstance(change, Proposed)
        except (CometError, OSError) as error:
            problem = error
        if written:
            problem = self._store.commit().error or problem
        if problem is not None:
            raise problem

    def _may_lead(self) -> bool:
        raft_log = self._raft_log
        return self.node.ready and not self.leading and raft_log.committed == raft_log.last

    async def _begin_leading(self, term: int) -> None:
        """Prepare the leader services. Then accept messages as the leader of `term`."""
        try:
            await self._leader_role.prepare()
            if self._may_lead() and self.node.term == term and not self.stopped:
                self._raft_log.take_messages()
                self.leading = True
                self._prefer_at = self._clock.boottime() + PREFER_INTERVAL_S
                log.warning("raft: %s is the leader since term %d", self.me, term)
                self._leader_role.lead()
        except RaftRefused as refusal:
            log.error("raft: leader %s does not accept messages yet: %s", self.me, refusal)
            await self._hand_over()
        except (CometError, OSError) as error:
            self._failure = error
        except Exception as error:
            self._fail(error)
        finally:
            self._taking = None
            self._schedule()

    def _fail(self, error: Exception) -> None:
        """Stop this member because of an error that leaves the state of the disk unknown."""
        log.critical("raft: %s takes no part until it is started again", self.me, exc_info=error)
        self.stopped = self.failed = True
        self._stop_leading("it has failed")
        self._succeeded.set()
        self._leader_role.follow()

    def _before_log(self, role: RoleChange) -> None:
        self._stop_leading(role.reason or f"{role.leader or 'nobody'} leads")
        if role.leader not in ("", self.me):
            self._succeeded.set()
        text = "raft: %s is now %s in term %d; leader: %s"
        log.info(text, self.me, role.role.value, role.term, role.leader or "-")
        if role.leader != self.me:
            self._leader_role.follow()

    def _stop_leading(self, reason: str) -> None:
        if self.leading:
            self.leading = False
            self._leader_role.hand_over()
            self._succeeded.clear()
            self._raft_log.follow()
            self.waits.give_up(reason)
            log.warning("raft: %s is no longer the leader: %s", self.me, reason)

    # -- the disk

    def _failed(self, error: CometError | OSError) -> None:
        log.critical("raft: the log or the state of %s could not be written: %s", self.me, error)
        self._failed_at = self._clock.boottime()
        self._failure = None
        left = self.node.effects()
        try:
            if _cuts(left):
                raise StoreError("the log is about to be truncated") from error
            self.node.disk_failed(self._raft_log.last, str(error))
        except CometError as error:
            self._fail(error)
            return
        if left.role is not None:
            self._before_log(left.role)
        self._carry_out(Effects(committed=left.committed, role=left.role))

    def _not_written(self, failure: OSError) -> None:
        self._failure = failure
        self._schedule()

    def _watch_disk(self) -> None:
        """Report the state of the disk to the node: full, failed, or recovered.

        After a failure, the node gives up the leadership, and the disk is tested at intervals.
        """
        reasons, now = self._store.flags.reasons, self._clock.boottime()
        self.node.full = Flag.DISK_FULL in reasons
        failure, self._failure = self._failure, None
        if failure is not None:
            self._failed(failure)
        elif self._failed_at is None and Flag.NOT_WRITEABLE in reasons:
            self._failed(StoreError(reasons[Flag.NOT_WRITEABLE]))
        elif self._failed_at is not None and now - self._failed_at >= DISK_TEST_INTERVAL_S:
            self._failed_at = now
            self._raft_log.flushed(self._store.flusher.flushed)  # Write missing index entries
            if self._failure is None and not reasons.keys() - {Flag.DISK_FULL}:  # A full disk still works
                self._failed_at = None
                self.node.disk_recovered()

    # -- members

    async def transfer(self, to: str) -> None:
        """Transfer the leadership to another member, once a majority has this leader's tables.

        Meanwhile, sends are held, because they could create topics that the next leader would not have.
        Raises RaftRefused.
        """
        async with self._handoff:
            if self.leading:
                self._leader_role.hand_over()
                try:
                    async with asyncio.timeout(TRANSFER_COPY_TIMEOUT_S):
                        await self._leader_role.copy_tables()
                except TimeoutError:
                    raise RaftRefused("no majority has copied the leader's tables in time", self.me) from None
            self._transfer_now(to)

    def _transfer_now(self, to: str) -> None:
        self._asked(self.node.transfer, to)
        self._succeeded.clear()

    @property
    def accepts(self) -> bool:
        """Whether this member leads and is not transferring its leadership."""
        return self.leading and not self._handoff.locked() and not self.node.transferring

    def prefer(self, now: float) -> None:
        """Transfer the leadership to a preferred member or, if the leader's disk is full, to any member.

        The successor must answer, have space on its disk, and lack only the newest entries. If several
        members qualify, the one with the most entries is chosen.
        """
        self._prefer_at = now + PREFER_INTERVAL_S
        full, peers = self.node.full, self.node.status().peers
        if self.me in self._preferred and not full:
            return
        others = sorted(self.node.members.voters & peers.keys())
        able = [each for each in others if self.keeps_up(each) and not peers[each].full]
        wanted = [each for each in able if each in self._preferred]
        if not (wanted or (full and able)):
            return
        to = max(wanted or able, key=lambda member: peers[member].match)
        why = "its disk is full" if full else f"{to} is preferred"
        log.warning("raft: %s transfers the leadership to %s: %s", self.me, to, why)
        self._transfers.start(self._try_transfer(to))

    async def _try_transfer(self, to: str) -> None:
        try:
            await self.transfer(to)
            self._refusals.reset()
        except RaftRefused as refusal:
            # The leader refuses, for instance, while an operator transfers the leadership or changes members.
            log.warning("raft: %s does not transfer the leadership: %s", self.me, refusal)
            self._prefer_at = self._clock.boottime() + self._refusals.next_s()

    def keeps_up(self, member: str) -> bool:
        """Return whether, as far as this leader knows, a member answers and lacks only the newest entries."""
        status = self.node.status()
        peer = status.peers.get(member)
        return (
            peer is not None
            and peer.silent_ms <= self._options.election_ms
            and status.last - peer.match <= self._options.caught_up
        )

    def add_learner(self, member: str) -> None:
        """Add a member that receives the log but does not vote (a learner). Raises RaftRefused.

        The new member must be running and must have sent its address to this member.
        """
        if member not in self._addresses and member not in self.peers.learned:
            raise RaftRefused(f"{member} sent no address: does it run, with this member in dLegerPeers?")
        self._asked(self.node.add_learner, member)

    def promote(self, member: str) -> None:
        self._asked(self.node.promote, member)

    async def remove(self, member: str) -> None:
        if member == self.me and self.leading:  # The next leader needs this leader's tables
            await self._leader_role.copy_tables()
        self._asked(self.node.remove, member)

    def _asked(self, change: Callable[[str], None], member: str) -> None:
        if self._slow is not None:
            raise RaftRefused("the members of the group are changing", self.me)
        change(member)
        self._schedule()

    def _met(self) -> None:
        self._use_members()
        self._leader_role.met()

    def _begins(self) -> tuple[str, ...]:
        """Return the sorted members of the group that this member may create: none if it has a state."""
        blank = self.node.term == 0 and self._raft_log.last < 0
        return tuple(sorted(self.node.members.voters)) if blank else ()

    def settled(self, term: int) -> None:
        if self._slow is None and not self.stopped:
            self.node.tables_copied(term)
            self._schedule()

    def _use_members(self) -> None:
        """Connect to all members of the group and all in `dLegerPeers`, as the group may not exist yet."""
        others = self.node.members.all_ids.union(self._addresses) - {self.me}
        self.peers.use({member: addr for member in sorted(others) if (addr := self.address_of(member))})

    def address_of(self, member: str) -> str:
        """Return the address at which a member listens for other members, or "" if it is unknown."""
        learned = self.peers.learned.get(member)
        return self._addresses.get(member) or (learned.addr if learned is not None else "")

    def end_of(self, index: int) -> int:
        """Return the log position at which an entry ends, or the begin of the log if the entry is missing."""
        there = self._raft_log.first <= index <= self._raft_log.last
        return self._raft_log.location_of(index).end if there else self._store.log.min_position

    def _forget_deleted(self) -> None:
        first = self._raft_log.first
        if first > self._first and first <= self._raft_log.committed:
            self._first = first
            self.node.log_trimmed(first)


def _cuts(effects: Effects) -> bool:
    return any(isinstance(change, Truncate | Reset) for change in effects.log)
