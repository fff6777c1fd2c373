"""Fake name servers and brokers with scripted responses, over real sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.kit.fakes import FakeBroker, FakeServer, offset_answer, pull_answer, serving

from cometmq.message import MessageQueue
from cometmq.pipeline.base.options import read_options
from cometmq.pipeline.live.source import CometStreamReader, ReadTask, full_schema
from cometmq.protocol.batch import iter_batch
from cometmq.protocol.bodies import (
    BrokerData,
    QueueData,
    TopicConfig,
    TopicRouteData,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    PullMessageRequestHeader,
    QueueRequestHeader,
    SendMessageRequestHeaderV2,
)
from cometmq.protocol.record.one import encode_record

TOPIC = "Fake"
QUEUE = MessageQueue(TOPIC, "broker-a", 0)
UNKNOWN = {
    RequestCode.GET_TOPIC_CONFIG: ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
    RequestCode.QUERY_CONSUMER_OFFSET: ResponseCode.QUERY_NOT_FOUND,
    RequestCode.UPDATE_CONSUMER_OFFSET: ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
}
MINUTES = [1_000_000 + 60_000 * number for number in range(40)]
"""Store times in ms of one message per minute."""

HOST = b"\x7f\0\0\1\0\0\x2a\x9f"


class TakingBroker(FakeBroker):
    """A broker that stores bodies by queue or responds with `refusal`; it refuses bodies in `illegal`."""

    def __init__(self, refusal: int = 0, illegal: frozenset[bytes] = frozenset(), name: str = "a") -> None:
        super().__init__(name)
        self.refusal, self.illegal = refusal, illegal
        self.queues: dict[int, list[bytes]] = {}

    def answer(self, frame: Frame) -> Frame:
        if self.refusal:
            return frame.response(self.refusal, "as the test says")
        bodies = [bytes(frame.body)]
        if frame.code == RequestCode.SEND_BATCH_MESSAGE:
            bodies = [bytes(item.body) for item in iter_batch(bytes(frame.body))]
        if not self.illegal.isdisjoint(bodies):
            return frame.response(ResponseCode.MESSAGE_ILLEGAL, "as the test says")
        self.queues.setdefault(frame.header(SendMessageRequestHeaderV2).queue_id, []).extend(bodies)
        return frame.response()

    @property
    def bodies(self) -> list[bytes]:
        return [body for queue in self.queues.values() for body in queue]


class FakeCluster(FakeServer):
    """A name server and broker in one, for rare situations, with one queue of one topic.

    `stored_ms` are the store times of its messages, the first of which has offset `minimum`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.minimum = 0
        self.log_at = 0  # begin of the log; each message takes 100 bytes
        self.cut_at: int | None = None  # from this offset on messages have other log positions
        self.stored_ms: list[int] = []
        self.bodies: dict[int, tuple[bytes, int]] = {}  # (stored body, sysFlag) by offset
        self.refusals: deque[int] = deque()  # response codes of the next pulls
        self.refuse_always: int | None = None
        self.suggested = 0  # the broker id in suggestWhichBrokerId
        self.closing = False  # close each connection after accepting it
        self.brokers: dict[int, str] = {}  # brokers in the route; by default only itself, as master
        self.routed = True
        self.moving: dict[str, Any] = {}  # mapping of a static topic
        self.attributes: dict[str, str] | None = None  # None as with a 4.9 broker, which has no attributes
        self.stored: int | None = None  # the offset of every group
        self.admitted = 0

    @property
    def maximum(self) -> int:
        return self.minimum + len(self.stored_ms)

    def make_anew(self, count: int) -> None:
        """Delete the topic and create it again after MINUTES; the log continues."""
        self.log_at += 10**6
        self.stored_ms = [MINUTES[-1] + 1000 + number for number in range(count)]

    def cut_and_grow(self, keep: int, count: int) -> None:
        """Lose the messages after `keep`, as in a broker's crash, and store new ones."""
        self.cut_at = keep
        self.stored_ms = [
            *self.stored_ms[:keep],
            *(MINUTES[-1] + 1000 + number for number in range(count - keep)),
        ]

    def admit(self) -> bool:
        self.admitted += 1
        return not self.closing

    def answer(self, frame: Frame) -> Frame:
        if frame.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            if not self.routed:
                return frame.response(ResponseCode.TOPIC_NOT_EXIST, "no such topic")
            brokers = BrokerData(
                cluster="c", broker_name="broker-a", broker_addrs=self.brokers or {0: self.addr}
            )
            queues = QueueData(broker_name="broker-a", read_queue_nums=1, write_queue_nums=1)
            route = TopicRouteData(queue_datas=[queues], broker_datas=[brokers])
            route.topic_queue_mapping_by_broker = self.moving
            return frame.response(body=route.encode())
        if frame.code == RequestCode.GET_TOPIC_CONFIG and self.attributes is not None:
            return frame.response(body=TopicConfig(topic_name=TOPIC, attributes=self.attributes).encode())
        if frame.code == RequestCode.QUERY_CONSUMER_OFFSET and self.stored is not None:
            return offset_answer(frame, self.stored)
        if frame.code in UNKNOWN:
            return frame.response(UNKNOWN[frame.code], "not known")
        if frame.code == RequestCode.GET_MIN_OFFSET:
            return offset_answer(frame, self.minimum)
        if frame.code == RequestCode.GET_MAX_OFFSET:
            own = frame.header(QueueRequestHeader).queue_id == QUEUE.queue_id
            return offset_answer(frame, self.maximum if own else 0)
        assert frame.code == RequestCode.PULL_MESSAGE
        return self._pulled(frame, frame.header(PullMessageRequestHeader))

    def _pulled(self, frame: Frame, header: PullMessageRequestHeader) -> Frame:
        if self.refuse_always is not None or self.refusals:
            return frame.response(self.refuse_always or self.refusals.popleft(), "refused")
        at = header.queue_offset
        code, behind, body = ResponseCode.PULL_NOT_FOUND, at, b""
        if not self.minimum <= at <= self.maximum:
            code, behind = ResponseCode.PULL_OFFSET_MOVED, min(max(at, self.minimum), self.maximum)
        elif at < self.maximum:
            code, behind = ResponseCode.SUCCESS, min(at + header.max_msg_nums, self.maximum)
            body = b"".join(self.record(offset) for offset in range(at, behind))
        return pull_answer(
            frame, code, behind, self.maximum, body, start=self.minimum, broker_id=self.suggested
        )

    def record(self, offset: int, **fields: Any) -> bytes:
        body, sys_flag = self.bodies.get(offset, (b"%d" % offset, 0))
        at = self.log_at + offset * 100
        if self.cut_at is not None and offset >= self.cut_at:
            at += 77_000_000
        told: dict[str, Any] = {
            "topic": TOPIC, "queue_id": 0, "body": body, "properties": b"", "queue_offset": offset,
            "physical_offset": at, "born_timestamp_ms": 1, "born_host": HOST,
            "store_host": HOST, "sys_flag": sys_flag,
            "store_timestamp_ms": self.stored_ms[offset - self.minimum],
        }  # fmt: skip
        return encode_record(**told | fields)


@contextmanager
def fake_cluster() -> Iterator[FakeCluster]:
    made = FakeCluster()
    with serving(made, made.admit):
        yield made


def position(offset: int) -> dict[str, Any]:
    return {TOPIC: {"broker-a": {"0": offset}}}


class Stream:
    """A stream driven as by Spark: one planned batch after the other."""

    def __init__(self, fake: FakeCluster, **options: str) -> None:
        given = {"namesrv": fake.addr, "topic": TOPIC, "timeoutMs": "1000", **options}
        self.reader = CometStreamReader(full_schema(), read_options(given, streaming=True))

    def next(self, start: dict[str, Any]) -> dict[str, Any]:
        return self.reader.latestOffset(start, self.reader.getDefaultReadLimit())

    def ranges(self, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, int]]:
        tasks = self.reader.partitions(start, end)
        return [(r.start, r.end) for task in tasks if isinstance(task, ReadTask) for r in task.ranges]
