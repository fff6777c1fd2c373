"""Scripted name servers and brokers on real sockets."""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Self

from tests.kit.waiting import PATIENCE_S

from cometmq.message import MessageQueue
from cometmq.protocol.bodies import (
    BrokerData,
    ClusterInfo,
    ConsumerList,
    HeartbeatData,
    LockBatchBody,
    LockBatchResult,
    QueueData,
    TopicList,
    TopicRouteData,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame, decode_frame, encode_frame
from cometmq.protocol.headers import (
    ConsumerSendMsgBackRequestHeader,
    GetRouteInfoRequestHeader,
    Header,
    PullMessageRequestHeader,
    PullMessageResponseHeader,
    QueryConsumerOffsetRequestHeader,
    QueueRequestHeader,
    SendMessageRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from cometmq.protocol.record.one import encode_record
from cometmq.remoting import Connection, RemotingServer

Script = Callable[[Frame], "Frame | None"]


class FakeServer:
    """A server that responds with scripts, or else with the method `answer` of a subclass.

    `async with` serves on a free port of the running loop, and :func:`serving` serves in threads.
    """

    def __init__(self, scripts: Mapping[int, Script] | None = None) -> None:
        self.addr = "127.0.0.1:1"  # unreachable until the server runs
        self.scripts = dict(scripts or {})
        self.requests: list[int] = []
        self.connections: list[Connection] = []
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start(0)
        return self

    async def start(self, port: int) -> None:
        self._server = RemotingServer(
            {}, default=lambda _, frame: self.respond(frame), on_open=self.connections.append
        )
        self.addr = f"127.0.0.1:{await self._server.start('127.0.0.1', port)}"

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    def on(self, code: RequestCode, script: Script) -> None:
        self.scripts[code] = script

    def refuse(self, code: RequestCode, with_code: ResponseCode, remark: str = "refused") -> None:
        self.scripts[code] = lambda frame: frame.response(with_code, remark, ext={})

    async def ask(self, code: RequestCode, header: Header, body: bytes = b"") -> Frame:
        """Send a request to the client that connected last and return its response."""
        return await self.connections[-1].call(Frame.request(code, header, body), 10)

    async def wait_for(self, check: Callable[[], object]) -> None:
        """Wait until `check` is true; it is evaluated after each request."""
        async with asyncio.timeout(PATIENCE_S):
            while not check():
                self._news.clear()
                await self._news.wait()

    def respond(self, frame: Frame) -> Frame | None:
        """Record a request and return its response; None never responds."""
        self.requests.append(frame.code)
        answer = self.scripts.get(frame.code, self.answer)(frame)
        self._news.set()
        return answer

    def answer(self, frame: Frame) -> Frame | None:
        return frame.response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"request code {frame.code}")


class FakeNamesrv(FakeServer):
    """A name server with the topics that a test registers."""

    def __init__(self) -> None:
        super().__init__()
        self.routes: dict[str, TopicRouteData] = {}
        self.asked: list[str] = []
        self.hangs = False

    def serve(self, topic: str, *brokers: FakeBroker, queues: int = 2, perm: int = 6) -> None:
        self.routes[topic] = TopicRouteData(
            queue_datas=[
                QueueData(broker_name=b.name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)
                for b in brokers
            ],
            broker_datas=[
                BrokerData(cluster="C", broker_name=b.name, broker_addrs={0: b.addr}) for b in brokers
            ],
        )

    def answer(self, frame: Frame) -> Frame | None:
        match frame.code:
            case RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
                return frame.response(body=TopicList(topic_list=list(self.routes)).encode())
            case RequestCode.GET_BROKER_CLUSTER_INFO:
                datas = [data for route in self.routes.values() for data in route.broker_datas]
                table = {data.broker_name: data for data in datas}
                return frame.response(body=ClusterInfo(broker_addr_table=table).encode())
            case RequestCode.GET_ROUTEINFO_BY_TOPIC:
                topic = frame.header(GetRouteInfoRequestHeader).topic
                self.asked.append(topic)
                if self.hangs:
                    return None
                if topic in self.routes:
                    return frame.response(body=self.routes[topic].encode())
                remark = f"No topic route info in name server for the topic: {topic}"
                return frame.response(ResponseCode.TOPIC_NOT_EXIST, remark)
        return super().answer(frame)


class FakeBroker(FakeServer):
    """A broker that accepts every message and keeps messages in memory only."""

    def __init__(self, name: str = "broker-a") -> None:
        super().__init__()
        self.name = name
        self.sent: list[tuple[SendMessageRequestHeader, bytes]] = []
        self.heartbeats: list[HeartbeatData] = []
        self.records: dict[tuple[str, int], list[bytes]] = {}
        self.offsets: dict[tuple[str, int], int] = {}
        self.sent_back: list[ConsumerSendMsgBackRequestHeader] = []
        self.pulls: list[PullMessageRequestHeader] = []
        self.members: list[str] = []
        self.locked: set[MessageQueue] = set()
        self.not_ours: set[MessageQueue] = set()
        """Queues that another client has locked."""

    def store(self, topic: str, queue_id: int, body: bytes, properties: bytes = b"") -> None:
        queue = self.records.setdefault((topic, queue_id), [])
        offset = len(queue)
        places = {"queue_id": queue_id, "queue_offset": offset, "physical_offset": 1000 * offset}
        queue.append(encode_record(topic, body, properties, **places))

    def store_numbers(self, count: int) -> None:
        """Store messages with the bodies 0, 1, 2 and so on in queue 0."""
        for number in range(count):
            self.store("T", 0, b"%d" % number)

    def answer(self, frame: Frame) -> Frame | None:
        code = RequestCode(frame.code)
        body = b""
        match code:
            case RequestCode.SEND_MESSAGE_V2 | RequestCode.SEND_BATCH_MESSAGE:
                header = frame.header(SendMessageRequestHeader)
                self.sent.append((header, bytes(frame.body)))
                ext = {"msgId": "7F0000010000277700000000000000AB", "queueId": str(header.queue_id)}
                return frame.response(0, ext={**ext, "queueOffset": str(len(self.sent) - 1)})
            case RequestCode.HEART_BEAT:
                self.heartbeats.append(HeartbeatData.decode(frame.body))
                self.members = [self.heartbeats[-1].client_id]
                return frame.response(0)
            case RequestCode.GET_CONSUMER_LIST_BY_GROUP:
                body = ConsumerList(consumer_id_list=self.members).encode()
            case RequestCode.PULL_MESSAGE:
                return self.pull(frame)
            case RequestCode.QUERY_CONSUMER_OFFSET:
                query = frame.header(QueryConsumerOffsetRequestHeader)
                return offset_answer(frame, self.offsets.get((query.topic, query.queue_id), 0))
            case RequestCode.GET_MAX_OFFSET:
                end = frame.header(QueueRequestHeader)
                return offset_answer(frame, len(self.records.get((end.topic, end.queue_id), [])))
            case RequestCode.GET_MIN_OFFSET:
                return offset_answer(frame, 0)
            case RequestCode.UPDATE_CONSUMER_OFFSET:
                update = frame.header(UpdateConsumerOffsetRequestHeader)
                self.offsets[update.topic, update.queue_id] = update.commit_offset
            case RequestCode.LOCK_BATCH_MQ:
                ours = set(LockBatchBody.decode(frame.body).mq_set) - self.not_ours
                self.locked |= ours
                body = LockBatchResult(lock_ok_mq_set=list(ours)).encode()
            case RequestCode.UNLOCK_BATCH_MQ:
                self.locked -= set(LockBatchBody.decode(frame.body).mq_set)
            case RequestCode.CONSUMER_SEND_MSG_BACK:
                self.sent_back.append(frame.header(ConsumerSendMsgBackRequestHeader))
            case _:
                pass
        return frame.response(0, ext={}, body=body)

    def pull(self, frame: Frame) -> Frame | None:
        header = frame.header(PullMessageRequestHeader)
        self.pulls.append(header)
        stored = self.records.get((header.topic, header.queue_id), [])
        found = stored[header.queue_offset : header.queue_offset + header.max_msg_nums]
        if not found:
            return None
        return pull_answer(frame, 0, header.queue_offset + len(found), len(stored), b"".join(found))


def offset_answer(frame: Frame, offset: int) -> Frame:
    return frame.response(0, ext={"offset": str(offset)})


def pull_answer(
    frame: Frame, code: int, next_offset: int, end: int, body: bytes = b"", start: int = 0, broker_id: int = 0
) -> Frame:
    header = PullMessageResponseHeader(
        suggest_which_broker_id=broker_id, next_begin_offset=next_offset, min_offset=start, max_offset=end
    )
    return frame.response(code, header=header, body=body)


@contextmanager
def serving(server: FakeServer, admit: Callable[[], bool] = lambda: True) -> Iterator[str]:
    """Serve in threads, for clients that block this thread; yield the address.

    Args:
        server: Must respond to each request.
        admit: Returns whether a connection is served; otherwise it is closed immediately.
    """
    connections: list[socket.socket] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            connections.append(self.connection)
            with suppress(OSError):
                while size := self.rfile.read(4):
                    answer = server.respond(decode_frame(self.rfile.read(int.from_bytes(size, "big"))))
                    assert answer is not None
                    self.wfile.write(encode_frame(answer))

    class Listener(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

        def verify_request(self, request: object, client_address: object) -> bool:
            return admit()

    with Listener(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        server.addr = f"127.0.0.1:{listener.server_address[1]}"
        yield server.addr
        listener.shutdown()
        thread.join()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
