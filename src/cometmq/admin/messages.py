"""Search and reading of stored messages: ranges of a topic, and its newest ones, page by page."""

from __future__ import annotations

import heapq
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from cometmq import logs
from cometmq.admin.errors import UnknownNameError
from cometmq.admin.servers import ServerAdmin
from cometmq.admin.values import TraceView
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import MAX_UNIQUE_HITS, broker_addrs, by_id, by_key
from cometmq.client.cluster.requests import NameServersUnreachable, pull_request
from cometmq.client.cluster.workers import for_each
from cometmq.errors import CometError, MessageNotFound, NoRouteError
from cometmq.message import MessageExt, MessageQueue, PullStatus
from cometmq.protocol import codes
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.headers import ResumeCheckHalfMessageRequestHeader
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.traces import traces_about
from cometmq.text import counted

log = logs.logger(__name__)

PULL_BATCH = 32
MAX_TRACES = 10_000  # Maximum number of trace records read for one message


class ReadRange(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a topic's stored messages.

    Attributes:
        topic: The topic.
        broker_name: Only queues of this broker.
        queue_id: Only queues with this id.
        offset: First offset of each queue.
        begin_ms: Only messages stored at or after this time (ms since 1970).
        end_ms: Only messages stored before this time (ms since 1970).
        count: Maximum number of messages. None: no limit.
        expression: Tags as a consumer subscribes them: "*", or "TagA || TagB".
    """

    topic: str
    broker_name: str | None = None
    queue_id: int | None = None
    offset: int | None = None
    begin_ms: int | None = None
    end_ms: int | None = None
    count: int | None = 128
    expression: str = "*"

    @property
    def tags(self) -> set[str]:
        """The selected tags; empty for all tags."""
        words = {word.strip() for word in self.expression.split("||")}
        return set() if words & {"", "*"} else words


class StoredMessages(ServerAdmin):
    """Operations that search and read stored messages."""

    async def resume_check(self, msg_id: str) -> MessageExt:
        """Resume the transaction checks of a half message whose checks have reached their maximum.

        Args:
            msg_id: Offset id of the message, or the unique key that its producer assigned.

        Returns:
            The resumed message, as it was stored in TRANS_CHECK_MAX_TIME_TOPIC.

        Raises:
            MessageNotFound: There is no such half message.
            BrokerError: The broker refuses, for example because the checks were resumed before.
            IdError: `msg_id` is not a message id.
        """
        topic = codes.TRANS_CHECK_MAX_TIME_TOPIC
        try:
            found = await by_key(self.client, topic, msg_id, MAX_UNIQUE_HITS, unique=True)
            message = found[-1] if found else await by_id(self.client, msg_id, topic)
        except NameServersUnreachable:
            raise
        except NoRouteError:
            raise MessageNotFound(msg_id, f"in topic {topic}, which no broker has") from None
        place = decode_offset_id(message.offset_msg_id)
        header = ResumeCheckHalfMessageRequestHeader(msg_id=message.offset_msg_id, topic=topic)
        await self.client.brokers.call(place.host, codes.RequestCode.RESUME_CHECK_HALF_MESSAGE, header)
        return message

    async def traces(
        self,
        msg_id: str,
        topic: str = codes.TRACE_TOPIC,
        limit: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
        missing: dict[str, CometError] | None = None,
    ) -> list[TraceView]:
        """Return the trace records of a message, the oldest first.

        Args:
            msg_id: Unique key of the message. The ids of a batch are joined by commas.
            topic: The trace topic.
            limit: Maximum number of trace messages read from each broker.
            begin_ms: Only trace messages stored at or after this time.
            end_ms: Only trace messages stored at or before this time.

        Returns:
            The records, at most 10,000.

        Raises:
            NoRouteError: No name server has the trace topic.
        """
        found: list[TraceView] = []
        span = begin_ms, end_ms
        for message in await by_key(
            self.client, topic, msg_id, limit, unique=False, span=span, missing=missing
        ):
            unreadable: list[str] = []
            for trace in traces_about(bytes(message.body), msg_id, unreadable):
                if len(found) == MAX_TRACES:
                    log.warning(
                        "message %s has more than %d trace messages; only the first are shown",
                        msg_id,
                        MAX_TRACES,
                    )
                    return found
                host = message.born_host.rpartition(":")[0]
                found.append(
                    TraceView(trace=trace, client_host=host, store_timestamp=message.store_timestamp_ms)
                )
            if unreadable:
                log.warning(
                    "%s of %s could not be read; the first error: %s",
                    counted(len(unreadable), "record"), message.offset_msg_id, unreadable[0],
                )  # fmt: skip
        if not found and "," in msg_id:
            # `msg_id` contains the ids of a whole batch, joined by commas. Java's clients write one trace
            # record for these joined ids, but other clients write one for each message. As the first search
            # found nothing, search each id.
            for each in msg_id.split(","):
                found += await self.traces(
                    each.strip(), topic, limit, begin_ms=begin_ms, end_ms=end_ms, missing=missing
                )
        return found

    async def read(self, wanted: ReadRange, group: str | None = None) -> AsyncIterator[MessageExt]:
        """Yield the messages of a range, queue by queue. No offset is committed.

        Args:
            wanted: Topic, queues, times and maximum number of messages.
            group: Consumer group of the pull requests. None: TOOLS_CONSUMER.

        Raises:
            UnknownNameError: The topic has no such broker or queue.
        """
        route = await self.client.namesrv.route(wanted.topic)
        addrs = broker_addrs(route)
        left = sys.maxsize if wanted.count is None else wanted.count
        tags = wanted.tags
        for queue in queues_of(route, wanted):
            addr = addrs[queue.broker_name]
            start, end = await bounds(self.client, addr, queue, wanted)
            while start < end and left > 0:
                request = pull_request(
                    group or codes.TOOLS_CONSUMER_GROUP,
                    queue,
                    start,
                    min(PULL_BATCH, left, end - start),
                    wanted.expression,
                )
                result = await self.client.brokers.pull(addr, queue, request)
                if result.status is PullStatus.NO_NEW_MSG or result.next_begin_offset <= start:
                    break
                start = result.next_begin_offset
                for message in result.messages:
                    if wanted.end_ms is not None and message.store_timestamp_ms >= wanted.end_ms:
                        start = end  # End the read, because all later messages are newer than the range
                        break
                    if tags and message.tags not in tags:
                        continue  # The broker compares only hashes of tags, so other tags can match
                    if message.queue_offset < end and message.store_timestamp_ms >= (wanted.begin_ms or 0):
                        left -= 1
                        yield message

    async def queue_bounds(self, wanted: ReadRange) -> AsyncIterator[tuple[MessageQueue, int, int]]:
        """Yield, for each queue of a range, the offsets between which the method `read` would read messages.

        Yields:
            The queue, the first offset that is read, and the offset after the queue's last message.

        Raises:
            UnknownNameError: The topic has no such broker or queue.
        """
        route = await self.client.namesrv.route(wanted.topic)
        addrs = broker_addrs(route)
        for queue in queues_of(route, wanted):
            yield queue, *await bounds(self.client, addrs[queue.broker_name], queue, wanted)

    async def newest(self, wanted: ReadRange) -> Newest:
        """Return the newest messages of a range over all its queues, the newest first.

        Args:
            wanted: Topic, queues, times and maximum number of messages (`count`).

        Returns:
            The messages, with bodies cut to 256 bytes. To read the page of older messages, call this method
                again with `before_ms` of the result as the end of the time range.

        Raises:
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

    async def message_at(self, topic: str, broker_name: str, queue_id: int, offset: int) -> MessageExt:
        """Return the message at an offset of a queue.

        Raises:
            MessageNotFound: The queue has no message at this offset.
            UnknownNameError: The topic has no such broker.
        """
        addrs = broker_addrs(await self.client.namesrv.route(topic))
        if broker_name not in addrs:
            raise UnknownNameError("broker", broker_name, sorted(addrs))
        queue = MessageQueue(topic, broker_name, queue_id)
        request = pull_request(codes.TOOLS_CONSUMER_GROUP, queue, offset, 1)
        found = (await self.client.brokers.pull(addrs[broker_name], queue, request)).messages
        if not found or found[0].queue_offset != offset:
            raise MessageNotFound(str(offset), f"in queue {queue_id} of topic {topic} at {broker_name}")
        return found[0]


def queues_of(route: TopicRouteData, wanted: ReadRange) -> list[MessageQueue]:
    """Return those readable queues of a topic that `wanted` selects, sorted by broker name and queue id.

    Raises UnknownNameError if the selected broker or queue does not exist.
    """
    counts = {
        data.broker_name: data.read_queue_nums for data in route.queue_datas if data.perm & codes.Perm.READ
    }
    if wanted.broker_name is not None:
        if wanted.broker_name not in counts:
            raise UnknownNameError("broker", wanted.broker_name, sorted(counts))
        counts = {wanted.broker_name: counts[wanted.broker_name]}
    queues = [
        MessageQueue(wanted.topic, name, i) for name, count in sorted(counts.items()) for i in range(count)
    ]
    if wanted.queue_id is None:
        return queues
    chosen = [queue for queue in queues if queue.queue_id == wanted.queue_id]
    if not chosen:
        raise UnknownNameError("queue", str(wanted.queue_id), [str(queue.queue_id) for queue in queues])
    return chosen


async def bounds(
    client: ClientInstance, addr: str, queue: MessageQueue, wanted: ReadRange
) -> tuple[int, int]:
    """Return the offset at which reading a queue begins, and the queue's end offset.

    The caller must drop messages stored before `begin_ms`, because a 4.9 broker finds offsets by time only
    approximately: it returns the message nearest to the time, which may be an older one, or any of several
    messages of the same millisecond.
    """
    first = await client.brokers.min_offset(addr, queue)
    end = await client.brokers.max_offset(addr, queue)
    if wanted.begin_ms:
        first = max(first, await client.brokers.offset_by_time(addr, queue, wanted.begin_ms - 1))
    if wanted.offset is not None:
        first = max(first, wanted.offset)
    return first, end


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
        request = pull_request(codes.TOOLS_CONSUMER_GROUP, self.queue, at, count)
        result = await self.client.brokers.pull(self.addr, self.queue, request)
        if result.status is PullStatus.NO_NEW_MSG:
            return [], at
        for each in result.messages:
            self.budget.left -= each.store_size
            each.body = each.body[:MAX_PREVIEW_BYTES]
        return result.messages, result.next_begin_offset
