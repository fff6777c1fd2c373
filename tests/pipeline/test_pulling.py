"""Ranges pulled with several requests in flight: each offset once, in order, whatever the broker responds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cometmq.message import MessageQueue
from cometmq.pipeline.base.plan import QueueRange
from cometmq.pipeline.live.pulling import PullWindow, Reply, Request, Segment, Verdict
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.record.one import encode_record

QUEUE = MessageQueue("T", "broker-a", 0)
HOST = b"\x7f\0\0\1\0\0\x2a\x9f"


def record(offset: int, queue: MessageQueue = QUEUE) -> bytes:
    return encode_record(
        queue.topic, b"%d" % offset, queue_id=queue.queue_id, queue_offset=offset,
        physical_offset=offset * 100, born_timestamp_ms=1, born_host=HOST, store_timestamp_ms=2,
        store_host=HOST,
    )  # fmt: skip


class FakeQueue:
    """A queue of a broker with limited responses, gaps, a minimum and a maximum offset."""

    def __init__(
        self, minimum: int, maximum: int, *, cap: int = 32, gone: frozenset[int] = frozenset()
    ) -> None:
        self.minimum, self.maximum, self.cap, self.gone = minimum, maximum, cap, gone

    def pull(self, request: Request) -> Reply:
        def reply(code: ResponseCode, next_begin: int, body: bytes = b"") -> Reply:
            return Reply(code, next_begin, self.minimum, self.maximum, body)

        asked = request.offset
        if asked < self.minimum:
            return reply(ResponseCode.PULL_OFFSET_MOVED, self.minimum)
        if asked > self.maximum:
            return reply(ResponseCode.PULL_OFFSET_MOVED, self.maximum)
        if asked == self.maximum:
            return reply(ResponseCode.PULL_NOT_FOUND, asked)
        stop = min(asked + min(request.wanted, self.cap), self.maximum)
        found = [offset for offset in range(asked, stop) if offset not in self.gone]
        if not found:
            return reply(ResponseCode.PULL_RETRY_IMMEDIATELY, stop)
        return reply(ResponseCode.SUCCESS, stop, b"".join(record(offset) for offset in found))


def offsets_of(segment: Segment) -> list[int]:
    return [
        int.from_bytes(chunk.body[start + 20 : start + 28], "big")
        for chunk in segment.chunks
        for start in chunk.starts
    ]


def drain(window: PullWindow, broker: FakeQueue, shuffle: random.Random | None = None) -> list[Segment]:
    """Pull until the window's end, with responses in random order."""
    flying: list[Request] = []
    done: list[Segment] = []
    for _ in range(100_000):
        done += window.ready()
        flying += window.requests()
        if not flying:
            return done
        request = flying.pop(shuffle.randrange(len(flying)) if shuffle else 0)
        reply = broker.pull(request)
        if window.answered(request.segment, reply) is not Verdict.PROGRESS:
            window.give_up(request.segment, reply)
    raise AssertionError("the window never came to an end")


@settings(max_examples=150, deadline=None)
@given(
    start=st.integers(0, 50),
    count=st.integers(1, 400),
    cap=st.integers(1, 40),
    depth=st.integers(1, 10),
    step=st.integers(1, 64),
    gone=st.frozensets(st.integers(0, 450), max_size=60),
    seed=st.integers(0, 2**32),
)
def test_every_offset_is_read_once_and_in_order(
    start: int, count: int, cap: int, depth: int, step: int, gone: frozenset[int], seed: int
) -> None:
    window = PullWindow([QueueRange(QUEUE, start, start + count)], step=step, depth=depth)
    segments = drain(window, FakeQueue(0, 1000, cap=cap, gone=gone), random.Random(seed))
    read = [offset for segment in segments for offset in offsets_of(segment)]
    expected = [offset for offset in range(start, start + count) if offset not in gone]
    assert read == expected
    assert sum(segment.lost for segment in segments) == count - len(expected)


def test_the_number_of_open_segments_is_bounded() -> None:
    window = PullWindow([QueueRange(QUEUE, 0, 1000)], step=10, depth=4)
    first = list(window.requests())
    assert [(request.offset, request.wanted) for request in first] == [(0, 10), (10, 10), (20, 10), (30, 10)]
    broker = FakeQueue(0, 1000)
    window.answered(first[3].segment, broker.pull(first[3]))
    assert list(window.ready()) == []
    assert list(window.requests()) == []  # no further request while the first response is missing
    window.answered(first[0].segment, broker.pull(first[0]))
    assert [segment.start for segment in window.ready()] == [0]
    assert [request.offset for request in window.requests()] == [40]


def test_once_much_is_held_only_the_first_segment_is_asked_for() -> None:
    window = PullWindow([QueueRange(QUEUE, 0, 1000)], step=10, depth=4, held_bytes=2000)
    head, *others = window.requests()
    broker = FakeQueue(0, 1000, cap=5)
    for request in others:  # each response has 5 of 10 records, over 100 bytes each
        window.answered(request.segment, broker.pull(request))
    first_again, *rest = window.requests()
    assert [request.offset for request in (first_again, *rest)] == [15, 25, 35]
    for request in (first_again, *rest):
        window.answered(request.segment, broker.pull(request))
    assert list(window.requests()) == []  # the first request is in flight
    window.answered(head.segment, broker.pull(head))
    assert [request.offset for request in window.requests()] == [5]
    assert list(window.requests()) == []


def test_what_the_first_segment_has_may_be_taken_before_it_is_complete() -> None:
    window = PullWindow([QueueRange(QUEUE, 0, 30)], step=10, depth=3)
    broker = FakeQueue(0, 30, cap=6)
    read = []
    for _ in range(20):
        for request in list(window.requests()):
            window.answered(request.segment, broker.pull(request))
        for segment in (*window.ready(), *window.begun()):
            read += offsets_of(segment)
            segment.chunks = []
    assert window.finished
    assert read == list(range(30))


def test_a_lost_connection_asks_again_for_what_was_open() -> None:
    window = PullWindow([QueueRange(QUEUE, 0, 30)], step=10, depth=3)
    requests = list(window.requests())
    broker = FakeQueue(0, 30, cap=6)
    window.answered(requests[0].segment, broker.pull(requests[0]))
    window.lost_connection()
    assert sorted((item.offset, item.wanted) for item in window.requests()) == [(6, 4), (10, 10), (20, 10)]


@pytest.mark.parametrize(
    ("broker", "lost", "read"),
    [
        (FakeQueue(7, 100), 7, list(range(7, 20))),  # its beginning was deleted
        (FakeQueue(50, 100), 20, []),  # all of it was deleted
        (FakeQueue(0, 12), 8, list(range(12))),  # the queue is shorter than planned
        (FakeQueue(0, 0), 20, []),
    ],
)
def test_what_is_gone_is_counted(broker: FakeQueue, lost: int, read: list[int]) -> None:
    segments = drain(PullWindow([QueueRange(QUEUE, 0, 20)], step=8, depth=2), broker)
    assert sum(segment.lost for segment in segments) == lost
    assert [offset for segment in segments for offset in offsets_of(segment)] == read


def test_an_end_that_is_not_there_yet_is_no_loss_at_first() -> None:
    window = PullWindow([QueueRange(QUEUE, 0, 10)], step=10, depth=1)
    (request,) = window.requests()
    young = FakeQueue(0, 0)
    assert window.answered(request.segment, young.pull(request)) is Verdict.NOT_YET
    window.retry(request.segment)
    (again,) = window.requests()
    assert window.answered(again.segment, FakeQueue(0, 10).pull(again)) is Verdict.PROGRESS
    (segment,) = window.ready()
    assert (segment.lost, len(offsets_of(segment))) == (0, 10)


def test_an_error_code_is_a_refusal() -> None:
    window = PullWindow([QueueRange(QUEUE, 0, 10)], step=10, depth=1)
    (request,) = window.requests()
    refused = Reply(ResponseCode.TOPIC_NOT_EXIST, 0, 0, 0, b"")
    assert window.answered(request.segment, refused) is Verdict.REFUSED


@pytest.mark.parametrize("junk", [b"\0" * 100, b"\xff" * 100, b"\0\0\0\x20" + record(3)[4:]])
def test_broken_bytes_are_set_aside_and_what_follows_is_read(junk: bytes) -> None:
    """An unreadable record in the middle is reported, and the rest of the range is requested again."""

    class Damaged(FakeQueue):
        def pull(self, request: Request) -> Reply:
            answer = super().pull(request)
            if request.offset <= 3 < answer.next_begin:
                good = b"".join(record(offset) for offset in range(request.offset, 3))
                return answer._replace(body=good + junk + record(4))
            return answer

    (segment,) = drain(PullWindow([QueueRange(QUEUE, 0, 10)], step=10, depth=1), Damaged(0, 10))
    assert offsets_of(segment) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert [offset for offset, _ in segment.broken] == [3]
    assert segment.lost == 0


def test_a_record_with_a_wrong_length_does_not_take_its_neighbour_along() -> None:
    """The wrong length reaches into the next record, but only the record with that length counts as bad."""
    liar = bytearray(record(3))
    liar[3] += 40

    class Lying(FakeQueue):
        def pull(self, request: Request) -> Reply:
            answer = super().pull(request)
            if request.offset <= 3 < answer.next_begin:
                parts = [
                    bytes(liar) if o == 3 else record(o) for o in range(request.offset, answer.next_begin)
                ]
                return answer._replace(body=b"".join(parts))
            return answer

    (segment,) = drain(PullWindow([QueueRange(QUEUE, 0, 10)], step=10, depth=1), Lying(0, 10))
    assert offsets_of(segment) == list(range(10))  # the decoder detects the damage of record 3
    assert (segment.lost, segment.broken) == (0, [])


def test_under_a_filter_answers_skip_and_never_overlap() -> None:
    """With a filter, responses contain every third offset and cover ranges of any length."""

    class Filtering(FakeQueue):
        def pull(self, request: Request) -> Reply:
            found = [offset for offset in range(request.offset, self.maximum) if offset % 3 == 0][:32]
            if not found:
                return Reply(ResponseCode.PULL_RETRY_IMMEDIATELY, self.maximum, 0, self.maximum, b"")
            body = b"".join(record(offset) for offset in found)
            return Reply(ResponseCode.SUCCESS, found[-1] + 1, 0, self.maximum, body)

    window = PullWindow([QueueRange(QUEUE, 10, 5000)], step=32, depth=4, filtered=True)
    segments = drain(window, Filtering(0, 6000), random.Random(7))
    read = [offset for segment in segments for offset in offsets_of(segment)]
    assert read == [offset for offset in range(10, 5000) if offset % 3 == 0]
    assert all(segment.lost == 0 for segment in segments)


@pytest.mark.parametrize(
    ("remark", "lost"),
    [("NO_MATCHED_MESSAGE", 0), ("MESSAGE_WAS_REMOVING", 10), ("OFFSET_TOO_SMALL", 10)],
)
def test_what_a_broker_is_deleting_is_not_left_out_by_the_filter(remark: str, lost: int) -> None:
    """Masters respond with code 20 in both cases, and replicas also for offsets that they lack."""
    window = PullWindow([QueueRange(QUEUE, 0, 10)], step=32, depth=1, filtered=True)
    (request,) = window.requests()
    reply = Reply(ResponseCode.PULL_RETRY_IMMEDIATELY, 30, 30, 40, b"", remark)
    assert reply.missing is bool(lost)
    assert window.answered(request.segment, reply) is Verdict.PROGRESS
    (segment,) = window.ready()
    assert (segment.lost, segment.chunks) == (lost, [])


def test_ranges_of_several_queues_keep_their_order() -> None:
    other = MessageQueue("T", "broker-a", 1)
    window = PullWindow([QueueRange(QUEUE, 0, 25), QueueRange(other, 5, 9)], step=10, depth=8)
    segments = drain(window, FakeQueue(0, 100), random.Random(1))
    assert [(item.source.queue.queue_id, item.start, item.end) for item in segments] == [
        (0, 0, 10), (0, 10, 20), (0, 20, 25), (1, 5, 9)
    ]  # fmt: skip
