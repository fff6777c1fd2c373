"""A running cluster of one name server and one broker, and a minimal client that sends single frames."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

from tests.kit.waiting import until

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.server import Broker
from cometmq.broker_process import make_broker
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.bodies import ConsumerData, HeartbeatData, ProducerData, SubscriptionData
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    CreateTopicRequestHeader,
    DeleteTopicRequestHeader,
    Header,
    PullMessageRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    UpdateConsumerOffsetRequestHeader,
)
from cometmq.protocol.properties.values import encode_properties, java_hash
from cometmq.protocol.record.one import iter_records
from cometmq.remoting import RemotingClient
from cometmq.standalone import Standalone, small_files
from cometmq.store import Clock, Disk

COMMIT, SUSPEND, SUBSCRIPTION = 1, 2, 4


class Peer:
    """A client connection to a broker. `notices` holds the requests that the broker sent to the client."""

    def __init__(self, addr: str, **client: Any) -> None:
        self.addr = addr
        self.notices: asyncio.Queue[Frame] = asyncio.Queue()
        self.answers: dict[int, Callable[[Frame], Frame]] = {}
        self.remoting = RemotingClient(default=self._notice, **client)

    def _notice(self, _connection: Any, frame: Frame) -> Frame | None:
        frame.body = bytes(frame.body)
        self.notices.put_nowait(frame)
        answer = self.answers.get(frame.code)
        return answer(frame) if answer else None

    async def call(
        self,
        code: int,
        header: Header | None = None,
        body: bytes = b"",
        timeout_s: float = 60.0,
        **request: Any,
    ) -> Frame:
        return await self.remoting.call(self.addr, Frame.request(code, header, body, **request), timeout_s)

    async def oneway(
        self, code: int, header: Header | None = None, body: bytes = b"", **request: Any
    ) -> None:
        connection = await self.remoting.connect(self.addr)
        connection.oneway(Frame.request(code, header, body, oneway=True, **request))

    async def send(
        self,
        topic: str = "Orders",
        body: bytes = b"hello",
        queue_id: int = 0,
        properties: dict[str, str] | None = None,
        *,
        code: int = RequestCode.SEND_MESSAGE_V2,
        version: int = 407,
        oneway: bool = False,
        properties_text: str | None = None,
        **header: Any,
    ) -> Frame:
        whole = code in (RequestCode.SEND_MESSAGE, RequestCode.SEND_REPLY_MESSAGE)
        kind = SendMessageRequestHeader if whole else SendMessageRequestHeaderV2
        fields: dict[str, Any] = {
            "producer_group": "PG",
            "default_topic": "TBW102",
            "default_topic_queue_nums": 4,
            "sys_flag": 0,
            "born_timestamp": time.time_ns() // 1_000_000,
            "flag": 0,
            "properties": properties_text or encode_properties(properties or {}).decode(),
        }
        request = kind(topic=topic, queue_id=queue_id, **{**fields, **header})
        if oneway:
            await self.oneway(code, request, body)
            return Frame(code=0)
        return await self.call(code, request, body, version=version)

    async def pull(
        self,
        topic: str = "Orders",
        queue_id: int = 0,
        offset: int = 0,
        *,
        group: str = "G",
        expression: str | None = "*",
        hold_ms: int = 0,
        flags: int = 0,
        code: int = RequestCode.PULL_MESSAGE,
        version: int = 407,
        **header: Any,
    ) -> Frame:
        flags |= (SUSPEND if hold_ms else 0) | (SUBSCRIPTION if expression is not None else 0)
        fields: dict[str, Any] = {
            "max_msg_nums": 32,
            "commit_offset": 0,
            "suspend_timeout_millis": hold_ms,
            "subscription": expression,
            "sub_version": 0,
        }
        request = PullMessageRequestHeader(
            consumer_group=group,
            topic=topic,
            queue_id=queue_id,
            queue_offset=offset,
            sys_flag=flags,
            **{**fields, **header},
        )
        return await self.call(code, request, version=version)

    async def send_numbers(self, count: int) -> None:
        """Send messages with the bodies 0, 1, 2 and so on."""
        for number in range(count):
            await self.send(body=b"%d" % number)

    async def set_group(self, settings: bytes) -> Frame:
        return await self.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, settings)

    async def delete_topic(self, topic: str) -> Frame:
        return await self.call(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequestHeader(topic=topic))

    async def heartbeat(
        self,
        client_id: str = "c1",
        group: str | None = "G",
        topics: dict[str, str] | None = None,
        *,
        producers: tuple[str, ...] = (),
        sub_version: int = 1,
        expression_type: str = "TAG",
        version: int = 407,
        **described: Any,
    ) -> Frame:
        subscriptions = [
            SubscriptionData(
                topic=topic,
                sub_string=expression,
                code_set=[] if expression == "*" else [java_hash(tag) for tag in expression.split(" || ")],
                sub_version=sub_version,
                expression_type=expression_type,
            )
            for topic, expression in (topics or {"Orders": "*"}).items()
        ]
        consumers = (
            [ConsumerData(group_name=group, subscription_data_set=subscriptions, **described)]
            if group
            else []
        )
        data = HeartbeatData(
            client_id=client_id,
            consumer_data_set=consumers,
            producer_data_set=[ProducerData(group_name=name) for name in producers],
        )
        return await self.call(RequestCode.HEART_BEAT, None, data.encode(), version=version)

    async def notice(self, code: int, timeout_s: float = 60.0) -> Frame:
        """Return the next request with this code that the broker sends to the client."""
        async with asyncio.timeout(timeout_s):
            while True:
                frame = await self.notices.get()
                if frame.code == code:
                    return frame

    async def close(self) -> None:
        await self.remoting.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def records(answer: Frame) -> list[MessageExt]:
    """Return the messages in the response of a pull."""
    assert answer.code == 0, (answer.code, answer.remark)
    return list(iter_records(answer.body))


def offset_of(answer: Frame, name: str = "offset") -> int:
    """Return a number from the ext fields of a response."""
    assert answer.code == 0, (answer.code, answer.remark)
    assert answer.ext is not None
    return int(answer.ext[name])


def refused(answer: Frame, code: int, words: str) -> None:
    """Check that the response is a refusal with this code and text."""
    assert answer.code == code, (answer.code, answer.remark)
    assert words in answer.remark


async def held(cluster: Cluster, peer: Peer, offset: int = 1, **pull: Any) -> asyncio.Task[Frame]:
    """Start a pull that is parked, by default for the second message of a queue."""
    pulling = asyncio.create_task(peer.pull(offset=offset, hold_ms=15_000, **pull))
    await until(lambda: len(cluster.broker.parts.pulls.long_poll))
    return pulling


def subscription(topic: str, version: int = 1, expression: str = "*") -> SubscriptionData:
    return SubscriptionData(topic=topic, sub_string=expression, sub_version=version)


def queue(number: int, topic: str = "Orders") -> MessageQueue:
    return MessageQueue(topic, "broker-a", number)


async def create(peer, topic="Orders", read=2, write=2, perm=6, version=407, **more):
    header = CreateTopicRequestHeader(
        topic=topic, read_queue_nums=read, write_queue_nums=write, perm=perm, default_topic="TBW102", **more
    )
    return await peer.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header, version=version)


async def commit(peer, queue_id, offset, group="G", topic="Orders"):
    header = UpdateConsumerOffsetRequestHeader(
        consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset
    )
    assert (await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)).code == 0


async def take(peer, topic, count, group="Taker", timeout_s=60.0):
    """Pull from queue 0 until `count` messages have arrived, and return them."""
    found = []
    async with asyncio.timeout(timeout_s):
        while len(found) < count:
            answer = await peer.pull(topic, offset=len(found), group=group, hold_ms=2_000)
            if answer.code == 0:
                found += records(answer)
    return found


def store_raw(cluster, topic, properties, body=b"raw", queue_id=0, **more):
    """Store a message unchanged and make it visible to readers."""
    parts = cluster.broker.parts
    stored = parts.store.appender.append(
        topic, queue_id, body, properties, born_timestamp_ms=1, born_host=bytes(8), **more
    )
    parts.writer.appended(None)
    return stored


def copy_running(root: Path, copy: Path) -> None:
    """Copy a running broker's directory, without files that are still written under a temporary name."""
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("*.tmp"))


def table_on_disk(root: Path, name: str) -> Any:
    return json.loads((root / "config" / name).read_text())


PATIENT = {"waitTimeMillsInSendQueue": "10000"}
"""On a busy machine, the default would let brokers refuse sends because their event loop lags 200 ms."""


@contextlib.asynccontextmanager
async def running(
    root: object, disk: Disk | None = None, clock: Clock | None = None, **settings: str
) -> AsyncIterator[tuple[Broker, Peer]]:
    """Run a broker without a name server, and connect a client."""
    base = {"brokerName": "broker-a", "brokerIP1": "127.0.0.1", "bindAddress": "127.0.0.1", "namesrvAddr": ""}
    base |= {"listenPort": "0", "storePathRootDir": str(root)}
    config = BrokerConfig.from_properties({**small_files(), **PATIENT, **base, **settings})
    broker = make_broker(config, disk=disk, clock=clock)
    await broker.start()
    try:
        async with Peer(broker.addr) as peer:
            yield broker, peer
    finally:
        await broker.stop()


StartCluster = Callable[..., Any]


class Cluster:
    """A standalone cluster and its clients."""

    def __init__(self, standalone: Standalone) -> None:
        self.standalone = standalone
        self._peers: list[Peer] = []

    @property
    def broker(self) -> Broker:
        assert self.standalone.broker is not None
        return self.standalone.broker

    @property
    def addr(self) -> str:
        return self.broker.addr

    @property
    def namesrv_addr(self) -> str:
        return self.standalone.namesrv_addr

    def peer(self, addr: str | None = None) -> Peer:
        """Connect another client."""
        peer = Peer(addr or self.addr)
        self._peers.append(peer)
        return peer

    async def close_peers(self) -> None:
        for peer in self._peers:
            await peer.close()
        self._peers.clear()

    async def restart(self) -> None:
        await self.close_peers()
        await self.standalone.stop()
        await self.standalone.start()
