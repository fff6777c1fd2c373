"""A consumer of lite topics that sends single requests to a broker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.kit.brokers import Cluster, Peer, create, records

from cometmq.message import MessageExt
from cometmq.protocol.bodies import LiteSubscription, LiteSubscriptionCtlRequestBody
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    AckMessageRequestHeader,
    ChangeInvisibleTimeRequestHeader,
    PopLiteMessageRequestHeader,
)
from cometmq.protocol.pop import ReceiptHandle, TopicKind

V5 = 513
PARENT, GROUP = "Sessions", "agents"


def lite_of(cluster: Cluster) -> Any:
    return cluster.broker.parts.lite


class LitePopped:
    """The response to a pop from lite topics."""

    def __init__(self, answer: Frame) -> None:
        self.answer = answer
        self.code = answer.code
        self.messages: list[MessageExt] = records(answer) if answer.code == 0 else []

    @property
    def bodies(self) -> list[str]:
        return [message.body.decode() for message in self.messages]

    @property
    def counts(self) -> list[int]:
        assert self.answer.ext is not None
        return [int(each) for each in self.answer.ext["orderCountInfo"].split(";")]

    def lease(self, number: int = 0) -> dict[str, Any]:
        """Return the fields that name a leased message in an ack."""
        message, ext = self.messages[number], self.answer.ext or {}
        offset = int(message.properties["INNER_MULTI_QUEUE_OFFSET"])
        handle = ReceiptHandle(
            *(offset, int(ext["popTime"]), int(ext["invisibleTime"]), int(ext["reviveQid"])),
            *(TopicKind.NORMAL, "broker-a", 0, offset),
        )
        return {
            "consumer_group": GROUP,
            "topic": PARENT,
            "queue_id": 0,
            "extra_info": handle.encode(),
            "offset": offset,
            "lite_topic": message.properties["__LITE_TOPIC"],
        }


class LiteClient:
    """A consumer of the group `agents`, which is bound to the topic `Sessions`."""

    def __init__(self, peer: Peer, client_id: str = "c1") -> None:
        self.peer = peer
        self.client_id = client_id

    async def send(self, lite_topic: str, *bodies: str, queue_id: int = 0, **more: Any) -> Frame:
        """Send messages to a lite topic. Return the last response."""
        answer = Frame(code=0)
        for body in bodies:
            properties = {"__LITE_TOPIC": lite_topic, **more}
            answer = await self.peer.send(PARENT, body.encode(), queue_id, properties, version=V5)
        return answer

    async def change(self, action: str, *lite_topics: str, **more: Any) -> Frame:
        """Change the subscriptions."""
        fields = {"client_id": self.client_id, "group": GROUP, "topic": PARENT, **more}
        entry = LiteSubscription(action=action, lite_topic_set=list(lite_topics), **fields)
        body = LiteSubscriptionCtlRequestBody(subscription_set=[entry]).encode()
        return await self.peer.call(RequestCode.LITE_SUBSCRIPTION_CTL, None, body, version=V5)

    async def subscribe(self, *lite_topics: str, **more: Any) -> None:
        answer = await self.change("PARTIAL_ADD", *lite_topics, **more)
        assert answer.code == 0, answer.remark

    async def pop(
        self, count: int = 32, *, invisible_ms: int = 60_000, hold_ms: int = 0, **header: Any
    ) -> LitePopped:
        fields: dict[str, Any] = {
            "client_id": self.client_id,
            "consumer_group": GROUP,
            "topic": PARENT,
            "max_msg_num": count,
            "invisible_time": invisible_ms,
            "poll_time": hold_ms,
            "born_time": 0,
        }
        request = PopLiteMessageRequestHeader(**{**fields, **header})
        return LitePopped(await self.peer.call(RequestCode.POP_LITE_MESSAGE, request, version=V5))

    async def ack(self, popped: LitePopped, number: int = 0, **more: Any) -> int:
        request = AckMessageRequestHeader(**{**popped.lease(number), **more})
        return (await self.peer.call(RequestCode.ACK_MESSAGE, request, version=V5)).code

    async def renew(self, popped: LitePopped, invisible_ms: int, number: int = 0, **more: Any) -> int:
        request = ChangeInvisibleTimeRequestHeader(
            **popped.lease(number), invisible_time=invisible_ms, **more
        )
        return (await self.peer.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, request, version=V5)).code

    async def take(self, count: int) -> list[str]:
        """Pop and ack messages until `count` have arrived. Return their bodies."""
        found: list[str] = []
        while len(found) < count:
            popped = await self.pop(hold_ms=20_000)
            assert popped.code == 0, popped.answer.remark
            found += popped.bodies
            for number in range(len(popped.messages)):
                assert await self.ack(popped, number) == 0
        return found


async def set_up(peer: Peer, expiration: str = "-1", **attributes: str) -> None:
    """Create the parent topic and the group."""
    changes = f"+message.type=LITE,+lite.topic.expiration={expiration}"
    assert (await create(peer, PARENT, attributes=changes, version=V5)).code == 0
    await set_group(peer, **attributes)


async def set_group(
    peer: Peer, *, orderly: bool = False, rates: Mapping[str, int] | None = None, **attributes: str
) -> None:
    given = {f"+lite.{name.replace('_', '.')}": value for name, value in attributes.items()}
    given |= {f"+rate.receive.{unit}": str(rate) for unit, rate in (rates or {}).items()}
    config = {
        "groupName": GROUP,
        "retryMaxTimes": 2,
        "consumeMessageOrderly": orderly,
        "attributes": {"+lite.bind.topic": PARENT, **given},
    }
    answer = await peer.set_group(json.dumps(config).encode())
    assert answer.code == 0, answer.remark


@pytest.fixture
async def client(peer: Peer) -> LiteClient:
    await set_up(peer)
    return LiteClient(peer)
