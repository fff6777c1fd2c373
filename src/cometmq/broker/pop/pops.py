"""Pops with long polling: messages are read, leased and delivered to one of a group's consumers.

A pop reads from the queues of its topic and of the group's retry topic (`plan`), with the same reads and
filters as a pull. If a pop finds nothing, it is parked until messages arrive, leases of an ordered pop end,
its time is over, or its client withdraws it. An SQL92 filter, or a tag that few messages have, is evaluated
in turns, so that a scan never blocks the event loop for longer than a pull's.

Messages are leased in the moment in which they are delivered. A pop whose connection has been closed leases
nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from cometmq import logs
from cometmq.broker.base.attributes import has_priorities
from cometmq.broker.base.retry_records import is_retry_of
from cometmq.broker.base.times import mono_ms
from cometmq.broker.filters.sql_filters import FilterScan
from cometmq.broker.groups.offset_requests import is_on_disk, store_offset
from cometmq.broker.pop.leases import LeasedQueue, Pop, QueueKey
from cometmq.broker.pop.polls import FOUND, POLLING_FULL, POLLING_TIMEOUT, CheckedPop, PollKey, PopServer
from cometmq.broker.pop.revive import PopKey, ReviveLog
from cometmq.broker.pull.backlog import Backlog
from cometmq.broker.pull.long_poll import LongPoll
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CommandError
from cometmq.protocol.bodies import SubscriptionGroupConfig, TopicConfig
from cometmq.protocol.codes import RETRY_PREFIX, ResponseCode
from cometmq.protocol.pop import TopicKind
from cometmq.protocol.record.one import queue_offset_of, record_starts
from cometmq.protocol.sql import SqlFilter
from cometmq.store import CACHED, Arrivals, Buffer, GetStatus, NotInMemory, ReadResult, Reads

log = logs.logger(__name__)

SCAN_S = 0.001
"""The maximum duration of the filter scan of one pop, in seconds, as it blocks the event loop."""
SCAN_SHARE = 0.5
MAX_SCANS_PER_TICK = 4
RETRY_FIRST = 0.2
"""The share of pops that read from the retry topic first, as in Apache's broker."""
PRIORITY_FACTOR = "priority.factor"
"""The attribute of a group with the percentage of its pops that read the highest priority first."""
_MAX_READS = 4  # Number of reads from one queue in a turn: more follow if filters or acks leave nothing


class Place(NamedTuple):
    """A queue from which a pop reads."""

    kind: TopicKind
    topic: str
    queue_id: int


class PoppedQueue(NamedTuple):
    """The messages that a pop has received from one queue.

    Attributes:
        kind: Whether the queue is one of the topic itself or of a retry topic.
        queue_id: The id of the queue.
        start: The offset at which the pop began to read. Receipt handles contain it.
        offsets: The queue offset of each message.
        buffers: The records, joined in any number of buffers.
        deliveries: For ordered pops, how often each message was delivered before.
    """

    kind: TopicKind
    queue_id: int
    start: int
    offsets: Sequence[int]
    buffers: list[Buffer]
    deliveries: list[int]


@dataclass(slots=True, eq=False, kw_only=True)
class PopRequest(CheckedPop):
    """A checked pop, with everything that is needed to serve it now or later.

    Attributes:
        queue_id: The queue, or -1 for all queues of the topic.
        from_end: Whether a new group starts at the end of the queues.
        leases: Whether the messages are leased. If they are not, the group's next pop receives them, too.
    """

    topic: str
    queue_id: int
    ordered: bool = False
    from_end: bool = True
    leases: bool = True
    # What has been read so far:
    rest: int = 0
    taken: int = 0
    unfinished: bool = False  # Whether messages are left that no filter has examined yet
    queues: deque[Place] = field(default_factory=deque)
    found: list[PoppedQueue] = field(default_factory=list)
    scan: FilterScan | None = None


@dataclass(eq=False)
class Pops(PopServer[PopRequest]):
    """Serves the pops of a broker, except those from lite topics."""

    tables: DurableTables
    arrivals: LongPoll
    revive: ReviveLog

    def __post_init__(self) -> None:
        super().__post_init__()
        self._watched: dict[str, int] = {}  # The number of queues of each topic whose arrivals are reported
        self._scans = Backlog[PopRequest](
            self.serve, lambda: self.store.log.end, self._loop.time,
            part=SCAN_SHARE, at_once=MAX_SCANS_PER_TICK,
        )  # fmt: skip
        self._scans_due = False

    # -- serving

    def serve(self, request: PopRequest) -> None:
        """Read messages for a pop, and answer or park it."""
        if request.owner.closed:
            self._wake_next(request)
            return
        if self._stopping or self.store.slave:  # In a raft group, a leader may become a follower
            request.answer(request, POLLING_TIMEOUT)
            return
        if request.leases and not self.leases.has_room(request.group):
            request.answer(request, POLLING_FULL)
            return
        if request.leases and self._throttled(request):
            return
        request.rest = request.taken = 0
        request.unfinished = False
        request.found = []
        request.pop_ms = self.clock.time_ms()
        request.queues = plan(
            self.tables.topics.table, self.tables.groups.table.get(request.group),
            request.group, request.topic, request.queue_id, request.ordered,
        )  # fmt: skip
        wanted = request.wanted
        request.scan = FilterScan(wanted, SCAN_S) if isinstance(wanted, SqlFilter) else None
        self._go_on(request)

    def _go_on(self, request: PopRequest) -> None:
        queues = request.queues
        try:
            while queues:
                place = queues.popleft()
                if request.taken >= request.count:
                    request.rest += self._behind(request.group, place)
                    if request.rest:
                        break
                    continue
                try:
                    self._read_queue(request, place)
                except NotInMemory as miss:
                    if not request.found:
                        self._read_uncached(request, place, miss)
                        return
                    request.rest += self._behind(request.group, place)
        except Exception as error:
            self._failed(request, error)
        else:
            self._finish(request)

    def _behind(self, group: str, place: Place) -> int:
        """Return the number of messages of a queue that a group has not popped yet."""
        _, topic, queue_id = place
        queue = self.leases.find((group, topic, queue_id))
        head = self.tables.offsets.query(group, topic, queue_id) if queue is None else queue.head
        return max(0, self.store.max_offset(topic, queue_id) - max(head, 0))

    def _read_queue(self, request: PopRequest, place: Place) -> None:
        """Read from one queue, and lease what is found. Raises NotInMemory."""
        _, topic, queue_id = place
        key: QueueKey = (request.group, topic, queue_id)
        leases = self.leases
        queue = leases.find(key)
        end = self.store.max_offset(topic, queue_id)
        head = self._stored(request, topic, queue_id) if queue is None else queue.head
        if queue is None:
            if head == end:
                return
            if head > end:
                # A crash has removed messages. Without this, the group would skip the next ones.
                self.tables.offsets.commit(*key, end)
                return
            queue = leases.enter(key, head)
        if not leases.may_pop(queue, request.ordered, request.attempt_id):
            leases.settle(queue)
            if not request.ordered:
                request.rest += max(0, end - queue.head)
            return
        try:
            for _ in range(_MAX_READS):
                if not self._take(request, place, queue, self._read(request, place, queue)):
                    break
        finally:
            leases.settle(queue)

    def _stored(self, request: PopRequest, topic: str, queue_id: int) -> int:
        """Return the stored offset of a group in a queue. If there is none, store the first one."""
        stored = self.tables.offsets.query(request.group, topic, queue_id)
        if stored >= 0:
            return stored
        offset = self._first_offset(topic, queue_id, request.from_end)
        if request.leases:
            store_offset(self.tables.offsets, request.group, topic, queue_id, offset)
        return offset

    def _first_offset(self, topic: str, queue_id: int, from_end: bool) -> int:
        """Return where a new group begins in a queue.

        A group that begins at the end receives the messages of a young queue, and otherwise the last one.
        """
        store = self.store
        low = store.min_offset(topic, queue_id)
        if not from_end or topic.startswith(RETRY_PREFIX):
            return low
        if low <= 0:
            try:
                if not is_on_disk(store, topic, queue_id, 0, CACHED):
                    return 0
            except NotInMemory:
                pass
        return max(store.max_offset(topic, queue_id) - 1, 0)

    def _read(
        self, request: PopRequest, place: Place, queue: LeasedQueue, reads: Reads = CACHED
    ) -> ReadResult:
        _, topic, queue_id = place
        wanted = request.wanted
        return self.store.get_messages(
            topic,
            queue_id,
            queue.head,
            request.count - request.taken,
            filter=wanted if isinstance(wanted, frozenset) else None,
            record_filter=None if request.scan is None else request.scan.find_match,
            reads=reads,
        )

    def _take(self, request: PopRequest, place: Place, queue: LeasedQueue, got: ReadResult) -> bool:
        """Lease the messages of a read. Return whether to read once more."""
        kind, _, queue_id = place
        start, following = queue.head, got.next_begin_offset
        if got.status is GetStatus.FOUND:
            buffers = got.buffers
            offsets: Sequence[int] = range(start, following)
            if got.count != following - start or queue.acked or kind is not TopicKind.NORMAL:
                records = [each for each in split(buffers) if queue_offset_of(each, 0) not in queue.acked]
                if kind is not TopicKind.NORMAL:
                    records = [each for each in records if is_retry_of(each, request.group, request.topic)]
                buffers, offsets = records, [queue_offset_of(each, 0) for each in records]
            if offsets and not request.leases:
                request.found.append(PoppedQueue(kind, queue_id, start, offsets, buffers, []))
                request.taken += len(offsets)
                return False
            if self._lease(request, queue, offsets, following, start) and offsets:
                counts = [queue.deliveries.get(each, 1) - 1 for each in offsets] if request.ordered else []
                request.found.append(PoppedQueue(kind, queue_id, start, offsets, buffers, counts))
                request.taken += len(offsets)
        elif following > start or got.status is GetStatus.OFFSET_TOO_SMALL:
            self._lease(request, queue, (), following, start)
        left = got.max_offset - following
        if left <= 0 or following <= start:
            return False
        if request.taken:
            request.rest += left
            return False
        request.unfinished = True
        return request.scan is None

    def _lease(
        self, request: PopRequest, queue: LeasedQueue, offsets: Sequence[int], following: int, start: int
    ) -> bool:
        if request.ordered and offsets and not request.found:
            request.pop_ms = max(request.pop_ms, queue.pop_ms + 1)
        pop = Pop(request.pop_ms, start, request.invisible_ms, request.ordered, request.attempt_id)
        return self.leases.lease(queue, offsets, following, pop, mono_ms(self.clock))

    def _read_uncached(self, request: PopRequest, place: Place, miss: NotInMemory) -> None:
        """Read from a queue in a thread, and then go on with the pop. Other pops skip the queue meanwhile."""
        _, topic, queue_id = place
        queue = self.leases.enter((request.group, topic, queue_id), self._stored(request, topic, queue_id))
        queue.busy = True
        request.owner.hold()
        give_back = self._hold_tokens(request)

        async def read() -> None:
            try:
                try:
                    got = await self.store.executor.query(partial(self._read, request, place, queue), miss)
                finally:
                    give_back()
                queue.busy = False
                if request.owner.closed:
                    self._wake_next(request)
                else:
                    self._take(request, place, queue, got)
                    self._go_on(request)
            except Exception as error:
                self._failed(request, error)
            finally:
                queue.busy = False
                queue.skip_acked()
                self.leases.settle(queue)
                request.owner.release()

        self._tasks.start(read())

    def _failed(self, request: PopRequest, error: Exception) -> None:
        """Answer a pop after an error, with the messages that are already leased for it."""
        if not isinstance(error, CommandError) and self._log_limit.allows():
            where = request.topic, request.group
            log.error("pop from topic %s for group %s failed", *where, exc_info=error)
        if request.leases and request.taken:
            self._count(request)
        request.answer(request, FOUND if request.found else int(ResponseCode.SYSTEM_ERROR))

    def _finish(self, request: PopRequest) -> None:
        if request.taken:
            if request.leases:
                self._count(request)
            request.answer(request, FOUND)
            if request.rest or request.unfinished or not request.leases:
                self._wake_next(request)
        elif request.unfinished and not self._stopping and self._scans.wait(request):
            self._schedule_scans()
        else:
            key = PollKey(request.group, request.topic, request.queue_id)
            retries = () if request.ordered else (TopicKind.RETRY_V1, TopicKind.RETRY_V2)
            topics = (request.topic, *(kind.topic(request.topic, request.group) for kind in retries))
            self._park(request, key, topics)

    def _count(self, request: PopRequest) -> None:
        records = (buffer for each in request.found for buffer in each.buffers)
        self._count_leased(request, request.topic, request.taken, records)

    def _wake_next(self, request: PopRequest) -> None:
        """Wake another pop of the group, for the messages that a pop has not taken."""
        self.wake(self.polls.wake_group(request.group, request.topic, request.queue_id))

    # -- waiting

    def _watch(self, topic: str, origin: str) -> None:
        """Let the arrivals in all queues of a topic be reported.

        The retry topic of a topic with priorities (`origin`) may get as many queues as that topic.
        """
        topics = self.tables.topics.table
        known, first = topics.get(topic), topics.get(origin)
        count = 1 if known is None else known.read_queue_nums
        if first is not None and has_priorities(first):
            count = max(count, first.read_queue_nums)
        for queue_id in range(self._watched.get(topic, 0), count):
            self.arrivals.watch(topic, queue_id)
            self._watched[topic] = queue_id + 1

    def sweep(self) -> None:
        """End the reports of arrivals in topics for which no pop is parked any more."""
        for topic in [each for each in self._watched if not self.polls.waits_for(each)]:
            for queue_id in range(self._watched.pop(topic)):
                self.arrivals.unwatch(topic, queue_id)

    def arrived(self, arrivals: Arrivals) -> None:
        """Wake the pops that wait for messages that have become visible."""
        if len(self.polls):
            self.wake(self.polls.arrived(arrivals))

    def ack(self, key: QueueKey, offset: int, pop_ms: int) -> bool:
        return super().ack(key, offset, pop_ms) or self.revive.ack(PopKey(*key, pop_ms), offset)

    def renew(self, key: QueueKey, offset: int, pop_ms: int, invisible_ms: int, counts: bool = True) -> bool:
        renewed = super().renew(key, offset, pop_ms, invisible_ms, counts)
        return renewed or self.revive.renew(PopKey(*key, pop_ms), offset, invisible_ms, counts)

    def freed(self, key: QueueKey) -> None:
        self.wake(self.polls.wake_group(*key))

    async def stop(self) -> None:
        await super().stop()
        self._scans.serve_all()

    def _schedule_scans(self) -> None:
        if not self._scans_due:
            self._scans_due = True
            self._loop.call_soon(self._serve_scans)

    def _serve_scans(self) -> None:
        self._scans_due = False
        if self._scans.serve_some():
            self._schedule_scans()


def split(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return each record by itself."""
    found: list[Buffer] = []
    for buffer in buffers:
        starts, end = record_starts(buffer)
        found += [buffer[begin:stop] for begin, stop in zip(starts, [*starts[1:], end], strict=True)]
    return found


def plan(
    topics: Mapping[str, TopicConfig],
    settings: SubscriptionGroupConfig | None,
    group: str,
    topic: str,
    queue_id: int,
    ordered: bool,
) -> deque[Place]:
    """Return the queues of a pop, in the order in which it reads them.

    A pop begins with a random queue of its topic. The group's retry topic comes first in a share of the pops
    and last in the others; ordered pops do not read it. In a topic of type PRIORITY, the queue id is the
    priority of its messages: pops read the highest queue first. The retry topic of such a topic has as many
    queues, so that a retry keeps its priority. Each of its queues is read directly before or after the queue
    with the same id.
    """
    places: list[Place] = []
    known = topics.get(topic)
    if queue_id >= 0:
        places.append(Place(TopicKind.NORMAL, topic, queue_id))
    elif known is not None and (count := known.read_queue_nums) > 0:
        first = random.randrange(count)
        places += [Place(TopicKind.NORMAL, topic, (first + each) % count) for each in range(count)]
    if ordered:
        return deque(places)
    retries = [
        (kind, name, retry.read_queue_nums)
        for kind in (TopicKind.RETRY_V1, TopicKind.RETRY_V2)
        if (retry := topics.get(name := kind.topic(topic, group))) is not None
    ]
    if retries:
        kind, name, count = retries[0] if len(retries) == 1 else random.choice(retries)
        several = [Place(kind, name, each) for each in range(count)]
        places = several + places if random.random() < RETRY_FIRST else places + several
    if known is not None and has_priorities(known) and random.randrange(100) < _factor(settings):
        places.sort(key=lambda place: place.queue_id, reverse=True)  # Keeps the order of equal queue ids
    return deque(places)


def _factor(settings: SubscriptionGroupConfig | None) -> int:
    """Return the percentage of a group's pops that read the highest priority first."""
    text = ((settings and settings.attributes) or {}).get(PRIORITY_FACTOR, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 100
