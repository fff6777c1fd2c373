"""Pulling ranges with several requests in flight: what to ask next and what an answer means. No I/O.

The ranges of one broker are cut into segments of one pull's size each. Up to `depth` segments are worked on
at once; their records come out in order. A segment whose answer came short (brokers cap a pull by bytes, and
at 8 records on disk) asks again for its rest, so nothing is read twice and nothing is thrown away.

End by offset, never by count: gaps are normal under a tag filter.
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
"""Refusals that pass by themselves: a broker that starts, stops or has too much to do."""
_GONE = frozenset({"MESSAGE_WAS_REMOVING", "OFFSET_TOO_SMALL", "OFFSET_OVERFLOW_BADLY"})
"""Remarks of PULL_RETRY_IMMEDIATELY that do not mean "left out by the filter": the broker was deleting the
messages, or a replica does not have these offsets (docs/reference/storage.md, Pull answers)."""
FILTERED_SEGMENT = 2048  # offsets of a segment when the broker filters: it scans 800 entries for one answer


class Request(NamedTuple):
    """One pull that is to be made."""

    segment: Segment
    offset: int
    wanted: int


class Reply(NamedTuple):
    """A pull's answer, as far as it matters here."""

    code: int
    next_begin: int
    minimum: int
    maximum: int
    body: bytes
    remark: str = ""
    suggested: int = MASTER_ID
    """The broker id from which the broker wants to be read."""

    @property
    def left_out(self) -> bool:
        """Whether the messages in front of `next_begin` do not pass the filter."""
        return self.code == ResponseCode.PULL_RETRY_IMMEDIATELY and self.remark not in _GONE

    @property
    def missing(self) -> bool:
        """Whether the broker does not have what was asked for."""
        return not self.body and self.code in PULL_STATUS and not self.left_out


def pull_reply(frame: Frame) -> Reply:
    """The body is copied: the frame's own is gone with the next one received."""
    remark = frame.remark or ""
    if frame.code not in PULL_STATUS:
        return Reply(frame.code, 0, 0, 0, b"", remark)
    header = frame.header(PullMessageResponseHeader)
    held = (header.min_offset, header.max_offset)
    suggested = header.suggest_which_broker_id
    return Reply(frame.code, header.next_begin_offset, *held, bytes(frame.body), remark, suggested)


class Verdict(Enum):
    """What a reply means for its segment."""

    PROGRESS = "progress"  # the segment moved on or is complete
    NOT_YET = "not yet"  # the broker does not have these offsets (any more, or yet): ask again in a moment
    REFUSED = "refused"  # an error of the broker


@dataclass(slots=True)
class Chunk:
    """Whole records of one answer, and where each begins in it."""

    body: bytes
    starts: list[int]


@dataclass(slots=True, eq=False)
class Segment:
    """A part of a range, which is pulled in order."""

    source: QueueRange
    start: int
    end: int
    at: int
    chunks: list[Chunk] = field(default_factory=list)
    lost: int = 0  # offsets of the segment that the broker does not have any more
    minimum: int = 0  # what the broker said it holds, when something was lost
    maximum: int = 0
    broken: list[tuple[int, bytes]] = field(default_factory=list)  # (offset, bytes) that are no record

    @property
    def done(self) -> bool:
        return self.at >= self.end


class PullWindow:
    """The segments of some ranges, at most `depth` of them open at a time.

    Once `held_bytes` of answers wait for the first segment to be complete, only that one is asked for.
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
        """The pulls to send now."""
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
        """Whether all segments are done and taken (ask after `requests`)."""
        return not self._open

    def answered(self, segment: Segment, reply: Reply) -> Verdict:
        """Take the answer to the segment's request. Unless it is PROGRESS nothing changed: the caller decides
        between `retry` and `give_up`."""
        verdict = self._judge(segment, reply)
        if verdict is Verdict.PROGRESS and not segment.done:
            self._again.append(segment)
        return verdict

    def retry(self, segment: Segment) -> None:
        """Ask again for the rest of this segment."""
        self._again.append(segment)

    def lost_connection(self) -> None:
        """No answer will come to what was asked: ask for every unfinished segment again."""
        self._again = deque(segment for segment in self._open if not segment.done)

    def give_up(self, segment: Segment, reply: Reply) -> None:
        """Count the rest of the segment as lost."""
        self._lose(segment, segment.end, reply)

    def ready(self) -> Iterator[Segment]:
        """Segments that are complete, in order."""
        while self._open and self._open[0].done:
            yield self._open.popleft()

    def begun(self) -> Iterator[Segment]:
        """The first segment that is not complete (ask after `ready`): its chunks may be taken out already."""
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
        # The answer may reach into the next segment, which asks for those records itself.
        while starts and queue_offset_of(body, starts[-1]) >= segment.end:
            starts.pop()
            broken = False
        if broken and not starts:
            segment.broken.append((segment.at, body))
            segment.at += 1
            return Verdict.PROGRESS
        if broken and len(starts) > 1:
            # The length of the last record may be the wrong one: ask for it again, as the first.
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
