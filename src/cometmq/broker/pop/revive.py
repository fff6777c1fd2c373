"""The revive log: leases of another run of the broker, or of Apache's broker.

Apache's broker stores a checkpoint for each pop in the topic `rmq_sys_REVIVE_LOG_<cluster>`, and a record for
each ack. Its stored offsets are ahead of the popped messages; a checkpoint that was not acked in time leads
to copies in the retry topic. CometMQ keeps leases in memory. When it stops, it writes a checkpoint for each
pop with leases and stores the head as the group's offset, exactly as Apache's broker would have it.

This module reads what is in the revive log and not yet done: at the start, and while the timers deliver the
records that Apache's broker has left there. Acks and renewals of the messages of a checkpoint are kept in
memory, and written at the stop. The offset of the internal group that reads the log moves behind a checkpoint
only when all its messages are acked or copied. So after a crash, messages may be delivered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.times import mono_ms
from cometmq.broker.base.writer import Writer
from cometmq.broker.pop.checks import MAX_INVISIBLE_MS
from cometmq.broker.pop.leases import Lease, LeasedQueue, Leases
from cometmq.broker.pop.retries import Overdue, Retries
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import BodyError, CommandError, RecordError, StoreError
from cometmq.message import MessageExt
from cometmq.periodic import Periodic, Tasks
from cometmq.protocol.bodies import ACK_TAG, BATCH_ACK_TAG, CHECKPOINT_TAG, AckMsg, BatchAckMsg, PopCheckPoint
from cometmq.protocol.codes import REVIVE_GROUP, REVIVE_TOPIC_PREFIX
from cometmq.protocol.properties.values import encode_properties, stored_tags_code
from cometmq.protocol.record.one import decode_record, record_starts
from cometmq.store import Clock, MessageStore, ReadResult, Reads

log = logs.logger(__name__)

REVIVE_QUEUE = 0
"""The queue of the revive log to which a clean stop writes. Receipt handles contain it."""
REVIVE_QUEUES = 8
ACK_GRACE_MS = 3_000
"""The time, in ms, after the end of a checkpoint's leases in which acks from the log are still awaited."""
CHECK_S = 0.5
PER_TURN = 64
RECORDS_AT_ONCE = 32
MAX_PENDING = 200_000
"""The maximum number of checkpoints in memory. Further ones are read when earlier ones are done."""
MAX_EARLY_ACKS = 100_000
"""The maximum number of acks in memory whose checkpoints are not known yet.

A group may have at most as many of them as are still free.
"""
EARLIER_MS = 1_000
RETRY_MS = 2_000


class PopKey(NamedTuple):
    """What identifies a pop from one queue."""

    group: str
    topic: str
    queue_id: int
    pop_ms: int


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A checkpoint of the revive log whose messages are not all done.

    Attributes:
        pop: The pop, which may have several checkpoints.
        start: The first offset. With the pop, it identifies the checkpoint in records of acks. In a receipt
            handle, it is the message's own offset once a client has changed the lease.
        place: Its queue and offset in the revive log.
        all: The offsets of all its messages.
        open: The offsets of messages that are neither acked nor copied, and whether each is being copied.
        due_ms: When the messages are copied, by the monotonic clock.
        counts: Whether the delivery counts as one of the group's retries.
        changed: Whether the revive log does not contain the present state.
    """

    pop: PopKey
    start: int
    place: tuple[int, int]
    all: list[int]
    open: dict[int, bool]
    due_ms: int
    counts: bool = True
    changed: bool = False
    heap_ms: int = 0


@dataclass(eq=False)
class ReviveLog:
    """Reads and writes the revive log of a broker."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    writer: Writer
    leases: Leases
    retries: Retries

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.topic = REVIVE_TOPIC_PREFIX + self.config.broker_cluster_name
        self._checks = Periodic(self._loop, CHECK_S, self._check, name="check of the revive log")
        self._numbers = count()
        self._log_limit = logs.LogLimiter()
        self.restart()

    def restart(self) -> None:
        """Forget everything, before `start` reads the log once more."""
        self._pending: dict[PopKey, dict[int, Checkpoint]] = {}  # By pop and start
        self._pending_count = 0
        # The checkpoints of each queue of the log, by offset; those that are done remain until all earlier
        # ones are done.
        self._by_queue: dict[int, dict[int, Checkpoint]] = {}
        self._next: dict[int, int] = {}  # The next offset to read from each queue of the log
        self._heap: list[tuple[int, int, Checkpoint]] = []
        # Acks of messages whose checkpoints are not in the log yet
        self._early: dict[PopKey, set[int]] = {}
        self._early_count = 0
        self._early_by_group: dict[str, int] = {}
        self._tasks = Tasks()
        self._reading = False
        self._stopped = False

    def __len__(self) -> int:
        return self._pending_count

    # -- reading

    def start(self) -> None:
        """Read what the log contains, and then what is added to it."""
        self._stopped = False
        known = self.tables.topics.get(self.topic)
        for queue_id in range(REVIVE_QUEUES if known is None else known.read_queue_nums):
            self._next[queue_id] = self.tables.offsets.query(REVIVE_GROUP, self.topic, queue_id) + 1
        self._read_soon()
        self._checks.start()

    def _read_soon(self) -> None:
        if not self._reading and not self._stopped and self._has_more():
            self._reading = True
            self._tasks.start(self._read())

    def _has_more(self) -> bool:
        return self._pending_count < MAX_PENDING and any(
            offset < self.store.max_offset(self.topic, queue_id) for queue_id, offset in self._next.items()
        )

    async def _read(self) -> None:
        try:
            while not self._stopped and self._has_more():
                for queue_id in self._next:
                    await self._read_queue(queue_id)
        except Exception as error:
            if self._log_limit.allows():
                log.error("the revive log could not be read, trying again: %s", error)
        finally:
            self._reading = False

    async def _read_queue(self, queue_id: int) -> None:
        begin = max(self._next[queue_id], self.store.min_offset(self.topic, queue_id))
        got = await self.store.executor.query(partial(self._records, queue_id, begin))
        data = b"".join(got.buffers)
        for start in record_starts(data)[0]:
            try:
                self._take(queue_id, decode_record(data, start))
            except (RecordError, BodyError) as error:
                log.error("a record of the revive log, queue %d, is ignored: %s", queue_id, error)
        if got.next_begin_offset > begin:
            self._next[queue_id] = got.next_begin_offset
        elif begin > self._next[queue_id]:
            self._next[queue_id] = begin
        self._commit(queue_id)

    def _records(self, queue_id: int, begin: int, reads: Reads) -> ReadResult:
        return self.store.get_messages(self.topic, queue_id, begin, RECORDS_AT_ONCE, reads=reads)

    def _take(self, queue_id: int, message: MessageExt) -> None:
        if message.tags == CHECKPOINT_TAG:
            self._add(PopCheckPoint.decode(message.body), message, (queue_id, message.queue_offset))
            return
        if message.tags == ACK_TAG:
            ack = AckMsg.decode(message.body)
            offsets: Iterable[int] = (ack.ack_offset,)
        elif message.tags == BATCH_ACK_TAG:
            ack = batch = BatchAckMsg.decode(message.body)
            offsets = batch.ack_offset_list
        else:
            return
        pop = PopKey(ack.group, ack.topic, ack.queue_id, ack.pop_time)
        checkpoint = self._pending.get(pop, {}).get(ack.start_offset)
        if checkpoint is not None:
            for offset in offsets:
                self._done(checkpoint, offset)

    def _add(self, read: PopCheckPoint, message: MessageExt, place: tuple[int, int]) -> None:
        own = self.config.broker_name
        if not read.topic or not read.group or (read.broker_name or own) != own:
            return
        pop, start = PopKey(read.group, read.topic, read.queue_id, read.pop_time), read.start_offset
        acked = read.bit_map
        offsets = read.offsets()
        early = self._take_early(pop, offsets)
        left = {each: False for bit, each in enumerate(offsets) if not acked >> bit & 1 and each not in early}
        # If the clock was set back since the checkpoint was written, the leases do not last longer.
        now_ms = max(self.clock.time_ms(), message.born_timestamp_ms)
        remaining_ms = read.pop_time + read.invisible_time - now_ms
        due_ms = mono_ms(self.clock) + max(remaining_ms, 0) + ACK_GRACE_MS
        former = self._pending.get(pop, {}).get(start)
        if former is not None:  # A later checkpoint with the same key replaces the former one
            former.open.clear()
            self._forget(former)
        checkpoint = Checkpoint(pop, start, place, offsets, left, due_ms, not read.suspend, bool(early))
        self._by_queue.setdefault(place[0], {})[place[1]] = checkpoint
        if left:
            self._pending.setdefault(pop, {})[start] = checkpoint
            self._pending_count += 1
            self._schedule(checkpoint)

    def _forget(self, checkpoint: Checkpoint) -> None:
        of_pop = self._pending[checkpoint.pop]
        del of_pop[checkpoint.start]
        if not of_pop:
            del self._pending[checkpoint.pop]
        self._pending_count -= 1

    # -- acks and renewals by consumers

    def _find(self, pop: PopKey, offset: int) -> Checkpoint | None:
        """Return the checkpoint of a message that is neither acked nor being copied, or None."""
        for checkpoint in self._pending.get(pop, {}).values():
            if not checkpoint.open.get(offset, True):
                return checkpoint
        return None

    def ack(self, pop: PopKey, offset: int) -> bool:
        """Mark a message of a checkpoint as consumed.

        Return False if the message is not open. A message that an earlier run has popped counts as open if
        its checkpoint is not known: Apache's broker delivers checkpoints by a timer, shortly before the
        leases end.
        """
        if not any(offset in each.all for each in self._pending.get(pop, {}).values()):
            return self._ack_early(pop, offset)
        checkpoint = self._find(pop, offset)
        if checkpoint is None:
            return False
        checkpoint.changed = True
        self._done(checkpoint, offset)
        return True

    def _ack_early(self, pop: PopKey, offset: int) -> bool:
        """Keep an ack until its checkpoint is read. Return False if no earlier run has popped the message."""
        if not self.clock.time_ms() - MAX_INVISIBLE_MS < pop.pop_ms < self.leases.born_ms:
            return False
        count = self._early_by_group.get(pop.group, 0)
        if count >= MAX_EARLY_ACKS - self._early_count:
            return False
        if offset >= self.tables.offsets.query(pop.group, pop.topic, pop.queue_id):
            return False
        early = self._early.setdefault(pop, set())
        if offset not in early:
            early.add(offset)
            self._early_count += 1
            self._early_by_group[pop.group] = count + 1
        return True

    def _take_early(self, pop: PopKey, offsets: Iterable[int] | None = None) -> set[int]:
        """Remove and return acks that came before their checkpoint, of these offsets or of the whole pop."""
        early = self._early.pop(pop, set[int]())
        taken = early if offsets is None else early.intersection(offsets)
        if len(taken) < len(early):
            self._early[pop] = early - taken
        self._early_count -= len(taken)
        left = self._early_by_group.pop(pop.group, 0) - len(taken)
        if left:
            self._early_by_group[pop.group] = left
        return taken

    def expire_early(self) -> None:
        """Forget acks of messages whose leases have ended: their checkpoints would have been delivered."""
        oldest_ms = self.clock.time_ms() - MAX_INVISIBLE_MS
        for key in [each for each in self._early if each.pop_ms <= oldest_ms]:
            self._take_early(key)

    def renew(self, pop: PopKey, offset: int, invisible_ms: int, counts: bool) -> bool:
        """Let the lease of a message, and of the other messages of its pop, last at least `invisible_ms`.

        If the message is the only open one, its lease then ends; otherwise it may last longer. Return False
        if the message is not open.
        """
        checkpoint = self._find(pop, offset)
        if checkpoint is None:
            return False
        due_ms = mono_ms(self.clock) + invisible_ms
        checkpoint.due_ms = due_ms if len(checkpoint.open) == 1 else max(due_ms, checkpoint.due_ms)
        checkpoint.counts = counts
        checkpoint.changed = True
        self._schedule(checkpoint)
        return True

    def _done(self, checkpoint: Checkpoint, offset: int) -> None:
        """Record that a message is acked or copied."""
        checkpoint.open.pop(offset, None)
        if not checkpoint.open and self._pending.get(checkpoint.pop, {}).get(checkpoint.start) is checkpoint:
            self._forget(checkpoint)
            self._commit(checkpoint.place[0])

    def _commit(self, queue_id: int) -> None:
        """Move the offset in the log behind the records that are done."""
        waiting = self._by_queue.get(queue_id, {})
        behind = self._next[queue_id]
        for offset, checkpoint in list(waiting.items()):
            if checkpoint.open:
                behind = offset
                break
            del waiting[offset]
        if behind and self.tables.offsets.query(REVIVE_GROUP, self.topic, queue_id) < behind - 1:
            self.tables.offsets.commit(REVIVE_GROUP, self.topic, queue_id, behind - 1)

    # -- copies

    def _schedule(self, checkpoint: Checkpoint) -> None:
        if checkpoint.heap_ms and checkpoint.heap_ms <= checkpoint.due_ms + EARLIER_MS:
            return
        checkpoint.heap_ms = checkpoint.due_ms
        heappush(self._heap, (checkpoint.due_ms, next(self._numbers), checkpoint))

    def _check(self) -> None:
        """Read new records of the log, and copy messages whose time is over."""
        self._read_soon()
        now_ms, left = mono_ms(self.clock), PER_TURN
        while self._heap and self._heap[0][0] <= now_ms and left > 0:
            at_ms, _, checkpoint = heappop(self._heap)
            if at_ms != checkpoint.heap_ms or not checkpoint.open:
                continue
            checkpoint.heap_ms = 0
            if checkpoint.due_ms > now_ms:
                self._schedule(checkpoint)
                continue
            for offset in [each for each, copying in checkpoint.open.items() if not copying]:
                left -= 1
                self._copy(checkpoint, offset)

    def _copy(self, checkpoint: Checkpoint, offset: int) -> None:
        checkpoint.open[offset] = True
        checkpoint.changed = True
        pop = checkpoint.pop

        def done(ok: bool) -> None:
            if ok:
                self._done(checkpoint, offset)
            elif offset in checkpoint.open:
                checkpoint.open[offset] = False
                checkpoint.due_ms = mono_ms(self.clock) + RETRY_MS
                self._schedule(checkpoint)

        overdue = Overdue(*pop[:3], offset, pop.pop_ms, checkpoint.counts)
        self.retries.copy(overdue, done)

    # -- the stop

    async def stop(self, *, write: bool) -> None:
        """Read and copy nothing more. With `write`, write the state of all leases to the log."""
        self._stopped = True
        self._checks.cancel()
        await self._tasks.finish()
        if write:
            try:
                self._write_changes()
                self._write_leases()
            except (StoreError, CommandError) as error:
                log.error("leases could not be written, their messages will be delivered again: %s", error)

    def _write_changes(self) -> None:
        """Write a record for each checkpoint of the log whose messages were acked, renewed or copied."""
        for waiting in self._by_queue.values():
            for checkpoint in waiting.values():
                if not checkpoint.changed:
                    continue
                if checkpoint.open:
                    state = list(checkpoint.open), checkpoint.due_ms, checkpoint.counts, checkpoint.place[0]
                    self._write_checkpoint(checkpoint.pop, checkpoint.start, *state)
                else:
                    self._write_acks(checkpoint)

    def _write_leases(self) -> None:
        """Write a checkpoint for each pop with leases, and store the heads as the offsets of the groups."""
        for queue in self.leases:
            if queue.leases and not queue.ordered:
                for leases in _by_pop(queue):
                    first = leases[0]
                    pop = PopKey(*queue.key, first.pop.pop_ms)
                    due_ms = max(lease.deadline_ms for lease in leases)
                    counts = all(lease.counts for lease in leases)
                    offsets = [lease.offset for lease in leases]
                    self._write_checkpoint(pop, first.pop.start, offsets, due_ms, counts)
                self.writer.appended(partial(self._move_to_head, queue, queue.head))

    def _move_to_head(self, queue: LeasedQueue, head: int, _code: int, remark: str | None) -> None:
        if remark is None and self.leases.find(queue.key) is queue:
            self.tables.offsets.commit(*queue.key, head)

    def _write_checkpoint(
        self,
        pop: PopKey,
        start: int,
        offsets: list[int],
        due_ms: int,
        counts: bool,
        queue_id: int = REVIVE_QUEUE,
    ) -> None:
        until_ms = self.clock.time_ms() + max(due_ms - mono_ms(self.clock), 0)
        checkpoint = PopCheckPoint(
            start_offset=start, pop_time=pop.pop_ms, invisible_time=max(until_ms - pop.pop_ms, 0),
            num=len(offsets), queue_id=pop.queue_id, topic=pop.topic, group=pop.group,
            revive_time=max(until_ms, pop.pop_ms), queue_offset_diff=[offset - start for offset in offsets],
            broker_name=self.config.broker_name, suspend=not counts,
        )  # fmt: skip
        self._append(queue_id, CHECKPOINT_TAG, checkpoint.unique_key, checkpoint.encode())

    def _write_acks(self, checkpoint: Checkpoint) -> None:
        pop = checkpoint.pop
        ack = BatchAckMsg(
            ack_offset=-1, start_offset=checkpoint.start, group=pop.group, topic=pop.topic,
            queue_id=pop.queue_id, pop_time=pop.pop_ms, broker_name=self.config.broker_name,
            ack_offset_list=checkpoint.all,
        )  # fmt: skip
        self._append(checkpoint.place[0], BATCH_ACK_TAG, ack.unique_key, ack.encode())

    def _append(self, queue_id: int, tag: str, unique_key: str, body: bytes) -> None:
        self.tables.topics.ensure(self.topic, REVIVE_QUEUES)
        now_ms = self.clock.time_ms()
        # Apache's broker reads the delivery time: the log's clock has reached the largest one.
        properties = encode_properties(
            {"UNIQ_KEY": unique_key, "TAGS": tag, "TIMER_DELIVER_MS": str(now_ms), "WAIT": "false"}
        )
        self.store.appender.append(
            self.topic, queue_id, body, properties,
            born_timestamp_ms=now_ms, born_host=self.store.appender.store_host,
            tags_code=stored_tags_code(properties), stored_before=True,
        )  # fmt: skip
        self.writer.appended()


def _by_pop(queue: LeasedQueue) -> list[list[Lease]]:
    """Return the leases of a queue, those of one pop together, as acks refer to the checkpoint of a pop."""
    groups: dict[tuple[int, int], list[Lease]] = {}
    for lease in queue.leases.values():
        groups.setdefault((lease.pop.pop_ms, lease.pop.start), []).append(lease)
    return list(groups.values())
