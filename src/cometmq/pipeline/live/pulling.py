"""Concurrent pulls of ranges: which requests to send next, and what a response means. No I/O.

The ranges of one broker are divided into segments, each the size of one pull. Up to `depth` segments are
pulled concurrently; their records are returned in order. Brokers limit a pull by bytes, and to 8 records if
the records are on disk. If a response therefore lacks a part of the segment, the remainder is requested, so
nothing is read twice and nothing is discarded.

A range is complete when its last offset is reached, never by the number of records, because gaps are normal
under a tag filter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from cometmq.client.cluster.requests import PULL_STATUS
from cometmq.pipeline.base.plan import QueueRange
from cometmq.protocol.codes import MASTER_ID, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import PullMessageResponseHeader
from cometmq.protocol.record.one import queue_offset_of, record_starts

BUSY = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.FLOW_CONTROL})
"""Codes of temporary refusals: the broker is starting, stopping or overloaded."""
_GONE = frozenset({"MESSAGE_WAS_REMOVING", "OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY"})
"""Remarks of PULL_RETRY_IMMEDIATELY which mean that messages are missing, not that a filter excluded them.

A broker sends them while it is deleting the messages, or if it is a replica that does not have the offsets
(docs/reference/storage.md, Pull answers).
"""
FILTERED_SEGMENT = 2048  # Offsets per segment if the broker filters; a response covers at most 800 offsets


class Request(NamedTuple):
    """A pull request to send: for at most `wanted` messages of a segment, from `offset` on."""

    segment: Segment
    offset: int
    wanted: int


class Reply(NamedTuple):
    """The fields of a pull's response that a reader needs."""

    code: int
    next_begin: int
    minimum: int
    maximum: int
    body: bytes
    remark: str = ""
    suggested: int = MASTER_ID
    """Id of the broker (master or replica) from which the responding broker suggests to read."""

    @property
    def left_out(self) -> bool:
        """Whether the broker's filter has excluded all messages from the requested offset to `next_begin`."""
        return self.code == ResponseCode.PULL_RETRY_IMMEDIATELY and self.remark not in _GONE

    @property
    def missing(self) -> bool:
        """Whether the broker has no message at the requested offset, although no filter has excluded one."""
        return not self.body and self.code in PULL_STATUS and not self.left_out


def pull_reply(frame: Frame) -> Reply:
    """Convert the response to a pull. The body is copied because the next received frame overwrites it."""
    remark = frame.remark or ""
    if frame.code not in PULL_STATUS:
        return Reply(frame.code, 0, 0, 0, b"", remark)
    header = frame.header(PullMessageResponseHeader)
    held = (header.min_offset, header.max_offset)
    suggested = header.suggest_which_broker_id
    return Reply(frame.code, header.next_begin_offset, *held, bytes(frame.body), remark, suggested)


class Verdict(Enum):
    """The result of processing the response to a segment's request."""

    PROGRESS = "progress"  # The segment's next offset has advanced; the segment may be complete
    NOT_YET = "not yet"  # The broker lacks the requested offsets, perhaps only for now: retry after a pause
    REFUSED = "refused"


@dataclass(slots=True)
class Chunk:
    """The complete records of one response, with the position of each record in the bytes."""

    body: bytes
    starts: list[int]


@dataclass(slots=True, eq=False)
class Segment:
    """A part of a range of one queue's offsets. At most one pull request for it is in flight at a time."""

    source: QueueRange
    start: int
    end: int
    at: int
    chunks: list[Chunk] = field(default_factory=list)
    lost: int = 0  # Number of the segment's offsets that no longer exist on the broker
    minimum: int = 0  # The broker's minimum offset when the loss was detected
    maximum: int = 0
    broken: list[tuple[int, bytes]] = field(default_factory=list)  # Offset and bytes of each damaged record

    @property
    def done(self) -> bool:
        return self.at >= self.end


class PullWindow:
    """The segments into which ranges are divided, in order, and the choice of those to request next.

    At most `depth` segments are requested at a time: only the first one while more than `held_bytes` of
    responses wait for it.
    """

    def __init__(
        self,
        ranges: Iterable[QueueRange],
        *,
        step: int,
        depth: int,
        filtered: bool = False,
        held_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        self._step = step
        self._depth = depth
        self._held_bytes = held_bytes
        self._filtered = filtered
        self._fresh = _segments(ranges, FILTERED_SEGMENT if filtered else step)
        self._open: deque[Segment] = deque()
        self._again: deque[Segment] = deque()

    def requests(self) -> Iterator[Request]:
        """Yield the pull requests to send now."""
        if self._held() > self._held_bytes:
            if self._open[0] in self._again:
                self._again.remove(self._open[0])
                yield self._request(self._open[0])
            return
        while self._again:
            yield self._request(self._again.popleft())
        while len(self._open) < self._depth:
            segment = next(self._fresh, None)
            if segment is None:
                return
            self._open.append(segment)
            yield self._request(segment)

    def _request(self, segment: Segment) -> Request:
        count = self._step if self._filtered else min(self._step, segment.end - segment.at)
        return Request(segment, segment.at, count)

    @property
    def finished(self) -> bool:
        """Whether all segments were returned. Valid only after `requests`, which begins the next ones."""
        return not self._open

    def answered(self, segment: Segment, reply: Reply) -> Verdict:
        """Process a response. Unless the result is PROGRESS, the caller must `retry` or `give_up`."""
        verdict = self._judge(segment, reply)
        if verdict is Verdict.PROGRESS and not segment.done:
            self._again.append(segment)
        return verdict

    def retry(self, segment: Segment) -> None:
        """Let the next call of `requests` request the remainder of this segment again."""
        self._again.append(segment)

    def lost_connection(self) -> None:
        """Request every unfinished segment again, because a broken connection delivers no responses."""
        self._again = deque(segment for segment in self._open if not segment.done)

    def give_up(self, segment: Segment, reply: Reply) -> None:
        """Count the remainder of the segment as lost."""
        self._lose(segment, segment.end, reply)

    def ready(self) -> Iterator[Segment]:
        """Remove and yield, in order, the complete segments before the first incomplete one."""
        while self._open and self._open[0].done:
            yield self._open.popleft()

    def begun(self) -> Iterator[Segment]:
        """Yield, after `ready`, the first incomplete segment if it has records, which may be taken out."""
        if self._open and self._open[0].chunks:
            yield self._open[0]

    def _held(self) -> int:
        return sum(len(chunk.body) for segment in self._open for chunk in segment.chunks)

    def _judge(self, segment: Segment, reply: Reply) -> Verdict:
        if reply.code == ResponseCode.SUCCESS and reply.body:
            return self._accept(segment, reply)
        moved_on = reply.next_begin > segment.at
        if reply.left_out and self._filtered and moved_on:
            segment.at = min(reply.next_begin, segment.end)
            return Verdict.PROGRESS
        if reply.code not in PULL_STATUS:
            return Verdict.REFUSED
        if moved_on:
            self._lose(segment, reply.next_begin, reply)
            return Verdict.PROGRESS
        return Verdict.NOT_YET

    def _accept(self, segment: Segment, reply: Reply) -> Verdict:
        body = reply.body
        if reply.next_begin <= segment.at:
            return Verdict.NOT_YET
        starts, stop = record_starts(body)
        broken = stop < len(body)
        # Records beyond the segment are dropped, because the next segment requests them itself.
        while starts and queue_offset_of(body, starts[-1]) >= segment.end:
            starts.pop()
            broken = False
        if broken and not starts:
            segment.broken.append((segment.at, body))
            segment.at += 1
            return Verdict.PROGRESS
        if broken and len(starts) > 1:
            # The last valid record before the damage may only look valid: a wrong value in its length field
            # may be what makes the following bytes unreadable. So this record is requested again, as the
            # first record of a response.
            starts.pop()
        if starts:
            segment.chunks.append(Chunk(body, starts))
            last = queue_offset_of(body, starts[-1])
            behind = segment.at + len(starts)
            if behind <= last + 1 <= reply.next_begin:
                behind = last + 1
            if not self._filtered:
                segment.lost += behind - segment.at - len(starts)
            segment.at = behind
        if not broken and self._filtered:
            segment.at = max(segment.at, reply.next_begin)
        elif not broken:
            self._lose(segment, reply.next_begin, reply)
        return Verdict.PROGRESS

    @staticmethod
    def _lose(segment: Segment, upto: int, reply: Reply) -> None:
        upto = min(upto, segment.end)
        if upto > segment.at:
            segment.lost += upto - segment.at
            segment.at = upto
            segment.minimum, segment.maximum = reply.minimum, reply.maximum


def _segments(ranges: Iterable[QueueRange], size: int) -> Iterator[Segment]:
    for item in ranges:
        for start in range(item.start, item.end, size):
            yield Segment(item, start, min(start + size, item.end), start)
