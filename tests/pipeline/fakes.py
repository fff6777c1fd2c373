"""A server that answers as a test says, name server and broker in one: for what real ones do too rarely."""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cometmq.message import MessageQueue
from cometmq.protocol.bodies import BrokerData, QueueData, TopicRouteData
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame, FrameDecoder, encode_frame
from cometmq.protocol.headers import OffsetResponseHeader, PullMessageRequestHeader, PullMessageResponseHeader
from cometmq.protocol.record import encode_record

TOPIC = "Fake"
QUEUE = MessageQueue(TOPIC, "broker-a", 0)
MINUTES = [1_000_000 + 60_000 * number for number in range(40)]
"""Store times of one message a minute."""

HOST = b"\x7f\0\0\1\0\0\x2a\x9f"


class FakeCluster:
    """One queue of one topic. `stored_ms` are the store times of its messages, from offset `minimum`."""

    def __init__(self) -> None:
        self.minimum = 0
        self.log_at = 0  # where the log begins, of which each message takes 100 bytes
        self.cut_at: int | None = None  # from this offset on messages lie elsewhere in the log
        self.stored_ms: list[int] = []
        self.bodies: dict[int, tuple[bytes, int]] = {}  # offset -> (stored body, sysFlag), else its number
        self.refusals: deque[int] = deque()  # codes that answer the next pulls
        self.refuse_always: int | None = None
        self.closing = False  # accept and close
        self.brokers: dict[int, str] = {}  # what the route says; itself as master by default
        self.routed = True
        self.asked: Counter[int] = Counter()  # request codes
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def maximum(self) -> int:
        return self.minimum + len(self.stored_ms)

    def make_anew(self, count: int) -> None:
        """The topic is deleted and made again behind MINUTES; the log goes on."""
        self.log_at += 10**6
        self.stored_ms = [MINUTES[-1] + 1000 + number for number in range(count)]

    def cut_and_grow(self, keep: int, count: int) -> None:
        """The broker lost what is behind `keep` in a crash, and went on from there."""
        self.cut_at = keep
        self.stored_ms = [
            *self.stored_ms[:keep],
            *(MINUTES[-1] + 1000 + number for number in range(count - keep)),
        ]

    def close(self) -> None:
        """As a process that ends."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                if self.closing:
                    connection.close()
                    continue
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        decoder = FrameDecoder()
        with suppress(OSError):
            while data := connection.recv(65536):
                for frame in decoder.feed(data):
                    self.asked[frame.code] += 1
                    connection.sendall(encode_frame(self._answer(frame)))

    def _answer(self, frame: Frame) -> Frame:
        if frame.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            if not self.routed:
                return frame.response(ResponseCode.TOPIC_NOT_EXIST, "no such topic")
            brokers = BrokerData(
                cluster="c", broker_name="broker-a", broker_addrs=self.brokers or {0: self.address}
            )
            queues = QueueData(broker_name="broker-a", read_queue_nums=1, write_queue_nums=1)
            return frame.response(body=TopicRouteData(queue_datas=[queues], broker_datas=[brokers]).encode())
        if frame.code == RequestCode.GET_MIN_OFFSET:
            return frame.response(header=OffsetResponseHeader(offset=self.minimum))
        if frame.code == RequestCode.GET_MAX_OFFSET:
            return frame.response(header=OffsetResponseHeader(offset=self.maximum))
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
        answer = PullMessageResponseHeader(
            suggest_which_broker_id=0, next_begin_offset=behind, min_offset=self.minimum,
            max_offset=self.maximum,
        )  # fmt: skip
        return frame.response(code, header=answer, body=body)

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
    try:
        yield made
    finally:
        made.close()
