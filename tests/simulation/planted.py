"""The twenty planted bugs of reliability.md, those of raft groups and of pops, and the runs that detect them.

Each bug changes the real code while a `with` block lasts, and its runs have faults under which it matters.
The twentieth, faults without effect, is in test_simulation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import msgspec
from tests.raft.chaos import live
from tests.simulation.disks import SimulatedDisk
from tests.simulation.run import Plan, Run
from tests.simulation.scheduler import OWNER, Stuck

import cometmq.broker.pop.expiry as expiry
import cometmq.broker.pop.polls as polls
import cometmq.broker.pop.pops as pops
import cometmq.broker.pop.service as pop_service
import cometmq.broker.send.send as send
import cometmq.broker.send.send_back as send_back
import cometmq.client.cluster.decoding as decoding
import cometmq.testing.checker as checker
from cometmq.broker.groups.locks import QueueLocks
from cometmq.broker.pop.leases import Leases
from cometmq.broker.pop.retries import Retries
from cometmq.broker.pop.revive import ReviveLog
from cometmq.broker.replication import raft_state
from cometmq.broker.replication.raft_member import RaftMember
from cometmq.broker.replication.raft_tables import RaftTables
from cometmq.broker.replication.waits import SUCCESS, CommitWaits
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.client.cluster.routes import RouteTable
from cometmq.client.consumer.handoff import Handoff
from cometmq.client.group.allocate import AllocateAveragely
from cometmq.client.group.process_queue import ProcessQueue
from cometmq.protocol.record.framing import Framing
from cometmq.protocol.record.layout import TRANSACTION_MASK
from cometmq.raft import RaftNode
from cometmq.store import MessageStore
from cometmq.store.base.clock import SteadyTime
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.flush import LogFlusher
from cometmq.store.log.scan import SegmentScan
from cometmq.store.raft_log import RaftLog
from cometmq.store.writing.appender import Appender, TickMessage
from cometmq.store.writing.dispatch import Dispatcher
from cometmq.store.writing.replica import ReplicaLog

Find = Callable[[int], bool]
"""A function that returns whether the run of a seed detects the bug."""


class Bug(NamedTuple):
    """A planted bug. `plant` creates the context that contains it; `find` runs a seed (see Find)."""

    plant: Callable[[], AbstractContextManager[Any]]
    find: Find


def runs(shape: str, kind: str, *faults: str, sync_flush: bool = True) -> Find:
    """Return runs of whole clusters with these faults."""
    plan = Plan(shape, kind, frozenset(faults), sync_flush)

    def find(seed: int) -> bool:
        try:
            return bool(Run(seed, plan)().problems)
        except Stuck:
            return True

    return find


def instead(target: Any, name: str, new: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Replace an attribute of a class or module."""
    return lambda: mock.patch.object(target, name, new)


def around(target: Any, name: str, new: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Replace a function with `new`, which gets the original function before its other arguments."""
    was = getattr(target, name)

    def both(*given: Any, **more: Any) -> Any:
        return new(was, *given, **more)

    return instead(target, name, both)


def commit_without_write(was: Any, store: MessageStore) -> Any:
    outcome = was(store)
    outcome.error = None
    return outcome


def lose_last_record(was: Any, scan: SegmentScan, start: int) -> Generator[Any, None, None]:
    found = list(was(scan, start))
    yield from found[:-1] if scan.closed else found


def cut_one_more(was: Any, log: CommitLog, segments: list[int], end: int) -> None:
    was(log, segments, end)
    if segments and end > segments[-1]:
        at, last = segments[-1], segments[-1]
        while at < end:
            size = log.read(at, 4)
            assert size is not None
            at, last = at + int.from_bytes(size, "big"), at
        was(log, segments, last)


def done_when_pulled(was: Any, queue: ProcessQueue) -> int | None:
    return None if was(queue) is None else queue.next_offset


def leave_without_waiting(was: Any, handoff: Handoff, queues: Any) -> None:
    left = list(queues)
    for queue in left:
        queue.calls = 0
        handoff._group.offsets.update(queue.message_queue, queue.next_offset)  # noqa: SLF001
    was(handoff, left)


def everybody_gets_it(was: Any, locks: QueueLocks, group: str, client: str, queues: Any, now_ms: int) -> Any:
    return was(locks, group + client, client, queues, now_ms)


def keep_first_route(was: Any, table: RouteTable, route: Any) -> bool:
    known = table.get(route.topic)
    return False if known is not None and not known.from_template else was(table, route)


def visible_at_once(dispatcher: Dispatcher, _end: int, written: Any) -> None:
    dispatcher.on_visible(*dispatcher.dispatch(written))


@contextmanager
def half_visible() -> Iterator[None]:
    def enqueue(was: Any, appender: Appender, message: TickMessage) -> None:
        plain = msgspec.structs.replace(message.traits, sys_flag=message.traits.sys_flag & ~TRANSACTION_MASK)
        message.traits = plain
        was(appender, message)

    with (
        mock.patch.object(send, "is_transactional", return_value=False),
        around(Appender, "enqueue", enqueue)(),
    ):
        yield


_suppressed: dict[tuple[int, str, int], bytes] = {}


def suppress_duplicates(was: Any, appender: Appender, message: TickMessage) -> None:
    """Treat a send with the opaque id of an earlier send from the same host as a retry of that send."""
    host = message.sender.connection.addr.rpartition(":")[0]
    key = (id(appender), host, int(message.sender.opaque))
    message.body = _suppressed.setdefault(key, bytes(message.body))
    was(appender, message)


def forget_unknown(was: Any, lines: Any) -> Any:
    found = was(lines)
    for each in found:
        if each.op == "send" and each.result == "unknown":
            each.result = "fail"
    return found


def save_late(was: Any, *given: Any) -> None:
    owner = OWNER.get()
    assert owner is not None
    owner.scheduler.call_later(0.3, was, *given)


async def cut_committed(was: Any, raft_log: RaftLog, index: int) -> None:
    raft_log.committed = min(raft_log.committed, index - 2)
    await was(raft_log, index - 1)


async def cut_one_less(was: Any, raft_log: RaftLog, index: int) -> None:
    await was(raft_log, index + 1)


def commit_backwards(
    was: Any, offsets: ConsumerOffsets, group: str, topic: str, queue_id: int, offset: int
) -> bool:
    return bool(was(offsets, group, topic, queue_id, offset - (offset % 4 == 3) * 3))


async def answered_at_once(_tables: RaftTables, _since: int) -> None:
    """Wait for no member."""


class StaleEpoch(RaftNode):
    """A raft node that accepts responses of former terms."""

    def _is_of_this_term(self, message: Any) -> bool:
        super()._is_of_this_term(message)
        return True


def raft_breaks(seed: int) -> bool:
    try:
        live(seed, StaleEpoch)
    except Exception:
        return True
    return False


@contextmanager
def deadlines_by_the_wall_clock() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (expiry, polls, pops, pop_service):
            stack.enter_context(mock.patch.object(module, "mono_ms", lambda clock: clock.time_ms()))
        yield


def nothing() -> AbstractContextManager[Any]:
    return mock.patch.dict({})


BUGS: dict[str, Bug] = {
    "ack before append": Bug(
        around(MessageStore, "commit", commit_without_write),
        runs("one", "plain", "io error", sync_flush=False),
    ),
    "ack before flush in sync mode": Bug(
        instead(LogFlusher, "wait_for", lambda _self, _position, waiter: waiter(True)),
        runs("one", "plain", "power", "slow disk"),
    ),
    "skip CRC on read": Bug(
        around(
            decoding, "iter_records", lambda was, *given, **more: was(*given, **{**more, "check_crc": False})
        ),
        runs("one", "plain", "rot", "kill"),
    ),
    "off-by-one at segment roll": Bug(
        around(Framing, "blank", lambda was, framing, size: was(framing, size - 1)),
        runs("pair", "plain", "kill"),
    ),
    "lose the last record of a segment": Bug(
        around(SegmentScan, "groups", lose_last_record), runs("one", "plain", "kill", "power")
    ),
    "truncate one record too many": Bug(
        around(CommitLog, "resume", cut_one_more), runs("one", "plain", "kill", "power")
    ),
    "forget to fsync the directory after rename": Bug(
        instead(SimulatedDisk, "fsync_dir", lambda _self, _path: None), runs("one", "plain", "power")
    ),
    "offset commit before processing": Bug(
        around(ProcessQueue, "commit_offset", done_when_pulled), runs("one", "plain", "members", "reset")
    ),
    "commit on rebalance without drain": Bug(
        around(Handoff, "leave", leave_without_waiting), runs("one", "retries", "members")
    ),
    "two owners after a lost heartbeat": Bug(
        around(QueueLocks, "lock", everybody_gets_it), runs("one", "orderly", "members", "cut")
    ),
    "retry counter reset": Bug(
        around(
            send_back, "move", lambda was, appender, message, place, _times: was(appender, message, place, 0)
        ),
        runs("one", "retries"),
    ),
    "half message visible": Bug(half_visible, runs("one", "transactions")),
    "timer fires early after clock step": Bug(
        instead(SteadyTime, "now_ms", lambda self: self._clock.time_ms()), runs("one", "timers", "clock")
    ),
    "stale route kept for ever": Bug(
        around(RouteTable, "put", keep_first_route), runs("one", "plain", "move")
    ),
    "duplicate suppression by opaque id reuse": Bug(
        around(Appender, "enqueue", suppress_duplicates), runs("one", "plain", "reset")
    ),
    "follower acks before write": Bug(
        instead(ReplicaLog, "safe", property(lambda self: self.next)), runs("pair", "plain", "slow disk")
    ),
    "leader acks with stale epoch": Bug(nothing, raft_breaks),
    "raft: answers before it is committed": Bug(
        instead(CommitWaits, "wait_for", lambda _self, _position, waiter: waiter(SUCCESS)),
        runs("raft", "plain", "cut", "slow disk"),
    ),
    "raft: term and vote saved after the messages": Bug(
        around(raft_state, "save", save_late), runs("raft", "plain", "kill", "cut")
    ),
    "raft: truncation below what is committed": Bug(
        around(RaftLog, "truncate", cut_committed), runs("raft", "plain", "cut", "kill")
    ),
    "raft: what is not committed is shown": Bug(
        instead(Dispatcher, "dispatch_flushed", visible_at_once), runs("raft", "plain", "cut")
    ),
    "raft: serves on when it leads no more": Bug(
        instead(RaftMember, "_stop_leading", lambda _self, _reason: None),
        runs("raft", "plain", "cut", "change"),
    ),
    "raft: settings answered before a majority has them": Bug(
        instead(RaftTables, "keep", answered_at_once), runs("raft", "plain", "kill", "cut")
    ),
    "index entry before log record": Bug(
        instead(Dispatcher, "dispatch_flushed", visible_at_once), runs("one", "plain", "power", "slow disk")
    ),
    "each member has all queues": Bug(
        instead(AllocateAveragely, "allocate", lambda _self, _client_id, queues, _client_ids: list(queues)),
        runs("one", "retries", "members"),
    ),
    "offsets outlive the end of their queue": Bug(
        instead(ConsumerOffsets, "lower", lambda _self, _end_of: ()),
        runs("one", "plain", "power", sync_flush=False),
    ),
    "an older offset takes the place of a newer one": Bug(
        around(ConsumerOffsets, "commit", commit_backwards), runs("one", "plain")
    ),
    "raft: truncation of one entry too few": Bug(
        around(RaftLog, "truncate", cut_one_less), runs("raft", "plain", "cut", "kill")
    ),
    "pop: an ordered queue is not blocked by leases": Bug(
        instead(Leases, "may_pop", lambda _self, queue, _ordered, _attempt_id="": not queue.busy),
        runs("one", "ordered pops", "members"),
    ),
    "pop: expired messages are not copied": Bug(
        instead(Retries, "copy", lambda _self, _overdue, done: done(True)), runs("one", "pops")
    ),
    "pop: deadlines by the wall clock": Bug(deadlines_by_the_wall_clock, runs("one", "pops", "clock")),
    "pop: a clean stop writes no checkpoints": Bug(
        instead(ReviveLog, "_write_checkpoint", lambda *_given: None), runs("one", "pops", "stop")
    ),
    "checker that ignores unknowns": Bug(
        around(checker, "operations", forget_unknown), runs("one", "plain", "pause", "loss")
    ),
}
