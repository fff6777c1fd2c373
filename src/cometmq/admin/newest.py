"""The newest messages of a topic over all its queues, page by page."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import msgspec

from cometmq.admin.messages import PULL_BATCH, ReadRange, bounds, queues_of
from cometmq.admin.servers import ServerAdmin
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.client.cluster.requests import pull_request
from cometmq.client.cluster.workers import for_each
from cometmq.errors import CometError
from cometmq.message import MessageExt, MessageQueue, PullStatus
from cometmq.protocol.codes import TOOLS_CONSUMER_GROUP

MAX_CONCURRENT_QUEUES = 16
MAX_PREVIEW_BYTES = 256
"""Maximum number of bytes of a message body in a page of messages. Longer bodies are cut."""
MAX_READ_BYTES = 64 << 20
"""The number of message bytes after which a page ends early. Reads in progress may exceed it."""
MAX_TIED_MESSAGES = 1000
"""The maximum number of messages by which a page may exceed its size.

A page exceeds its size because it contains all messages with the same store time as its last message.
"""


class Newest(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the newest messages. If more than 1,000 messages have the same store time, some are left out.

    Attributes:
        messages: The messages, the newest first, with bodies cut to 256 bytes.
        stored: Approximate number of messages in the range, because brokers find offsets by time only
            approximately.
        before_ms: End of the time range of the next page. None: this is the last page.
        missing: Errors of brokers whose messages are missing, by broker name.
    """

    messages: list[MessageExt]
    stored: int
    before_ms: int | None
    missing: dict[str, str] = {}


class NewestMessages(ServerAdmin):
    """The operation that reads the newest messages."""

    async def newest(self, wanted: ReadRange) -> Newest:
        """Return the newest messages of a range over all its queues, the newest first.

        Args:
            wanted: Topic, queues, times and maximum number of messages (`count`).

        Returns:
            The messages, with bodies cut to 256 bytes. To read the page of older messages, call this method
                again with `before_ms` of the result as the end of the time range.

        Raises:
            NoRouteError: No name server has the topic.
            UnknownNameError: The topic has no such broker or queue.
            CometError: No broker answers.
        """
        route = await self.client.namesrv.route(wanted.topic)
        addrs = broker_addrs(route)
        queues = queues_of(route, wanted)
        count = wanted.count if wanted.count is not None else PULL_BATCH
        budget = _Budget(MAX_READ_BYTES)
        step = max(1, min(PULL_BATCH, 2 * count // max(1, len(queues))))

        failures: dict[str, CometError] = {}

        async def opened(queue: MessageQueue) -> _Tail | None:
            tail = _Tail(self.client, addrs[queue.broker_name], queue, wanted, step, budget)
            try:
                if queue.broker_name not in failures:
                    await tail.open()
                    await tail.fill()
                    return tail
            except CometError as error:
                failures[queue.broker_name] = error
            return None

        opened_all = await for_each(queues, opened, MAX_CONCURRENT_QUEUES)
        tails = [tail for tail in opened_all if tail is not None and tail.queue.broker_name not in failures]
        if failures and not tails:
            raise next(iter(failures.values()))
        heap = [(*tail.newest, number) for number, tail in enumerate(tails) if tail.read]
        heapq.heapify(heap)
        found: list[MessageExt] = []
        while heap:
            tail = tails[heap[0][-1]]
            if found and (len(found) >= count or budget.left <= 0):
                # The next page contains only messages older than the last message of this page. Therefore
                # this page must contain all messages with the store time of its last message; otherwise some
                # of them would be on neither page.
                tied = -heap[0][0] == found[-1].store_timestamp_ms
                if not tied or len(found) >= count + MAX_TIED_MESSAGES:
                    break
            found.append(tail.read.pop())
            if not tail.read:
                await tail.fill()
            number = heap[0][-1]
            heapq.heapreplace(heap, (*tail.newest, number)) if tail.read else heapq.heappop(heap)
        more = bool(heap) or any(tail.left for tail in tails)
        return Newest(
            messages=found,
            stored=sum(tail.stored for tail in tails),
            before_ms=found[-1].store_timestamp_ms if more and found else None,
            missing={name: str(error) for name, error in sorted(failures.items())},
        )


@dataclass
class _Budget:
    left: int


@dataclass
class _Tail:
    """A queue that is read backwards.

    `read` contains the messages that were pulled but are not yet on the page, from the oldest to the newest.
    """

    client: ClientInstance
    addr: str
    queue: MessageQueue
    wanted: ReadRange
    step: int
    budget: _Budget
    read: list[MessageExt] = field(default_factory=list)
    stored: int = 0
    _first: int = 0
    _end: int = 0

    @property
    def newest(self) -> tuple[int, int]:
        """The sort key of the queue, by which the queue with the newest unread message comes first."""
        return -self.read[-1].store_timestamp_ms, -self.read[-1].queue_offset

    @property
    def left(self) -> bool:
        return self._end > self._first

    async def open(self) -> None:
        """Determine the first offset and the end offset of the requested range in the queue."""
        self._first, end = await bounds(self.client, self.addr, self.queue, self.wanted)
        if self.wanted.end_ms is not None:
            end = await self._end_by_time(end, self.wanted.end_ms)
        self._end = max(self._first, end)
        self.stored = self._end - self._first

    async def _end_by_time(self, end: int, end_ms: int) -> int:
        """Return the offset of the queue's first message that was stored at or after a time.

        A 4.9 broker returns only an approximate offset for a time. Therefore this method reads the messages
        from that offset on until it finds one that is not too old.
        """
        at = await self.client.brokers.offset_by_time(self.addr, self.queue, end_ms)
        at = max(self._first, min(at, end))
        while at < end:
            some, following = await self._pull(at, min(PULL_BATCH, end - at))
            newer = next((each for each in some if each.store_timestamp_ms >= end_ms), None)
            if newer is not None:
                return newer.queue_offset
            if following <= at:
                break
            at = following
        return min(at, end)

    async def fill(self) -> None:
        """Read backwards until a message of the range is found or the queue is exhausted.

        Each read covers twice as many messages as the one before, at most PULL_BATCH. If the byte budget
        is used up, the first read covers one message. At least one read is necessary, because the messages
        of all queues are merged by store time.
        """
        begin_ms = self.wanted.begin_ms or 0
        end_ms = self.wanted.end_ms
        step = self.step if self.budget.left > 0 else 1
        while self.left and not self.read:
            begin = at = max(self._first, self._end - step)
            step = min(2 * step, PULL_BATCH)
            while at < self._end:
                some, following = await self._pull(at, self._end - at)
                self.read += [
                    each
                    for each in some
                    if each.queue_offset < self._end
                    and each.store_timestamp_ms >= begin_ms
                    and (end_ms is None or each.store_timestamp_ms < end_ms)
                ]
                if following <= at:
                    break
                at = following
            self._end = begin

    async def _pull(self, at: int, count: int) -> tuple[list[MessageExt], int]:
        """Return messages from offset `at` on, and the next offset to pull.

        If there are no messages from `at` on, the next offset is `at`.
        """
        request = pull_request(TOOLS_CONSUMER_GROUP, self.queue, at, count)
        result = await self.client.brokers.pull(self.addr, self.queue, request)
        if result.status is PullStatus.NO_NEW_MSG:
            return [], at
        for each in result.messages:
            self.budget.left -= each.store_size
            each.body = each.body[:MAX_PREVIEW_BYTES]
        return result.messages, result.next_begin_offset
