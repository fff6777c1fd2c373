"""Name servers and brokers that do what a test tells them, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from cometmq import ConsumeFromWhere, ConsumeStatus, MessageExt, MessageQueue, PushConsumer, PushOptions
from cometmq.errors import CommandError
from cometmq.protocol.bodies import (
    BrokerData,
    ConsumerList,
    HeartbeatData,
    LockBatchBody,
    LockBatchResult,
    QueueData,
    TopicRouteData,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    ConsumerSendMsgBackRequestHeader,
    GetMaxOffsetRequestHeader,
    GetRouteInfoRequestHeader,
    Header,
    PullMessageRequestHeader,
    QueryConsumerOffsetRequestHeader,
    SendMessageRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from cometmq.protocol.record.one import encode_record
from cometmq.remoting import Connection, RemotingServer

Script = Callable[[Frame], "Frame | None"]


class FakeNamesrv:
    """Knows the topics it is given."""

    def __init__(self) -> None:
        self.routes: dict[str, TopicRouteData] = {}
        self.asked: list[str] = []
        self.hangs = False
        self.addr = ""
        self._server = RemotingServer({RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route})

    async def __aenter__(self) -> Self:
        self.addr = f"127.0.0.1:{await self._server.start('127.0.0.1', 0)}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)

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

    def _route(self, connection: Connection, frame: Frame) -> Frame | None:
        topic = frame.header(GetRouteInfoRequestHeader).topic
        self.asked.append(topic)
        if self.hangs:
            return None
        route = self.routes.get(topic)
        if route is None:
            raise CommandError(
                ResponseCode.TOPIC_NOT_EXIST, f"No topic route info in name server for the topic: {topic}"
            )
        return frame.response(0, body=route.encode())


class FakeBroker:
    """Takes every message, keeps nothing on disk; `script` may answer a request in its place."""

    def __init__(self, name: str = "broker-a") -> None:
        self.name = name
        self.addr = ""
        self.sent: list[tuple[SendMessageRequestHeader, bytes]] = []
        self.requests: list[int] = []
        self.heartbeats: list[HeartbeatData] = []
        self.records: dict[tuple[str, int], list[bytes]] = {}
        self.offsets: dict[tuple[str, int], int] = {}
        self.sent_back: list[ConsumerSendMsgBackRequestHeader] = []
        self.pulls: list[PullMessageRequestHeader] = []
        self.scripts: dict[int, Script] = {}
        self.connections: list[Connection] = []
        self.members: list[str] = []
        self.locked: set[MessageQueue] = set()
        self.not_ours: set[MessageQueue] = set()
        """Queues that somebody else has locked."""
        self.news = asyncio.Event()
        self._server = RemotingServer({}, default=self._any, on_open=self.connections.append)

    async def __aenter__(self) -> Self:
        await self.start(0)
        return self

    async def start(self, port: int) -> None:
        self.addr = f"127.0.0.1:{await self._server.start('127.0.0.1', port)}"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)

    def on(self, code: RequestCode, script: Script) -> None:
        self.scripts[code] = script

    def refuse(self, code: RequestCode, with_code: ResponseCode, remark: str = "refused") -> None:
        self.scripts[code] = lambda frame: frame.response(with_code, remark, ext={})

    def store(self, topic: str, queue_id: int, body: bytes, properties: bytes = b"") -> None:
        queue = self.records.setdefault((topic, queue_id), [])
        offset = len(queue)
        places = {"queue_id": queue_id, "queue_offset": offset, "physical_offset": 1000 * offset}
        queue.append(encode_record(topic, body, properties, **places))

    def store_numbers(self, count: int) -> None:
        """Messages of queue 0 whose bodies are 0, 1, 2 and so on."""
        for number in range(count):
            self.store("T", 0, b"%d" % number)

    async def ask(self, code: RequestCode, header: Header, body: bytes = b"") -> Frame:
        """The answer of the client that came last."""
        return await self.connections[-1].call(Frame.request(code, header, body), 10)

    async def wait_for(self, check: Callable[[], bool]) -> None:
        """Until a request made `check` true."""
        async with asyncio.timeout(60):
            while not check():
                self.news.clear()
                await self.news.wait()

    def _any(self, connection: Connection, frame: Frame) -> Frame | None:
        code = frame.code
        self.requests.append(code)
        script = self.scripts.get(code)
        answer = script(frame) if script is not None else self.answer(frame)
        self.news.set()
        return answer

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
                end = frame.header(GetMaxOffsetRequestHeader)
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
            return None  # held for ever
        return pull_answer(frame, 0, header.queue_offset + len(found), len(stored), b"".join(found))


async def ignore(messages: list[MessageExt]) -> None: ...


def push_consumer(namesrv: FakeNamesrv, listener: object, **options: object) -> PushConsumer:
    """A member of group g that reads topic T from its beginning and does not wait long after a failure."""
    first = {"consume_from_where": ConsumeFromWhere.FIRST_OFFSET, "pull_error_delay_s": 0.01}
    settings = PushOptions(**{**first, **options})  # type: ignore[arg-type]
    return PushConsumer("g", listener, "T", namesrv=namesrv.addr, options=settings)  # type: ignore[arg-type]


class Box:
    """A listener that keeps what it gets, and the maker of its consumers."""

    def __init__(self, namesrv: FakeNamesrv) -> None:
        self.namesrv = namesrv
        self.messages: list[MessageExt] = []
        self.status = ConsumeStatus.SUCCESS
        self.open = asyncio.Event()
        self.open.set()
        self._news = asyncio.Event()

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    async def __call__(self, messages: list[MessageExt]) -> ConsumeStatus:
        self.messages += messages
        self._news.set()
        await self.open.wait()
        return self.status

    def consumer(self, **options: object) -> PushConsumer:
        return push_consumer(self.namesrv, self, **options)

    async def has(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.messages) < count:
                self._news.clear()
                await self._news.wait()


def offset_answer(frame: Frame, offset: int) -> Frame:
    return frame.response(0, ext={"offset": str(offset)})


def pull_answer(frame: Frame, code: int, next_offset: int, end: int, body: bytes = b"") -> Frame:
    ext = {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(next_offset),
        "minOffset": "0",
        "maxOffset": str(end),
    }
    return frame.response(code, ext=ext, body=body)
