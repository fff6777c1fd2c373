"""A pop consumer that sends single requests to a broker."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kit.brokers import Cluster, Peer, records

from cometmq.message import MessageExt
from cometmq.protocol.bodies import SetMessageRequestModeRequestBody
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    AckMessageRequestHeader,
    ChangeInvisibleTimeRequestHeader,
    NotificationRequestHeader,
    PopMessageRequestHeader,
)
from cometmq.protocol.pop import (
    CountKey,
    ReceiptHandle,
    TopicKind,
    decode_order_counts,
    decode_start_offsets,
)

V5 = 473  # The version of a 5.x client


class Popped:
    """The response to a pop, with a receipt handle for each message."""

    def __init__(self, answer: Frame, broker_name: str) -> None:
        self.answer = answer
        self.code = answer.code
        self.messages: list[MessageExt] = records(answer) if answer.code == 0 else []
        self.handles: list[ReceiptHandle] = []
        ext = answer.ext or {}
        starts = decode_start_offsets(ext.get("startOffsetInfo"))
        for entry in filter(None, (ext.get("msgOffsetInfo") or "").split(";")):
            number, queue_id, offsets = entry.split(" ")
            kind = TopicKind(int(number))
            self.handles += [
                ReceiptHandle(
                    starts[kind, int(queue_id)],
                    int(ext["popTime"]),
                    int(ext["invisibleTime"]),
                    int(ext["reviveQid"]),
                    kind,
                    broker_name,
                    int(queue_id),
                    int(offset),
                )
                for offset in offsets.split(",")
            ]
        assert [each.queue_offset for each in self.messages] == [each.offset for each in self.handles]

    @property
    def bodies(self) -> list[str]:
        return [message.body.decode() for message in self.messages]

    @property
    def counts(self) -> dict[CountKey, int]:
        assert self.answer.ext is not None
        return decode_order_counts(self.answer.ext["orderCountInfo"])


class PopClient:
    """A pop consumer of the group G and the topic Orders."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    async def pop(
        self, count: int = 32, *, invisible_ms: int = 60_000, hold_ms: int = 0, **header: Any
    ) -> Popped:
        fields: dict[str, Any] = {"consumer_group": "G", "topic": "Orders", "queue_id": -1, "init_mode": 0}
        request = PopMessageRequestHeader(
            max_msg_nums=count, invisible_time=invisible_ms, poll_time=hold_ms, **{**fields, **header}
        )
        answer = await self.peer.call(RequestCode.POP_MESSAGE, request, version=V5)
        return Popped(answer, "broker-a")

    async def pop_until(self, wanted: int, **pop: Any) -> Popped:
        """Pop until a response has at least one message, for instance of an expired lease."""
        for _ in range(wanted):
            found = await self.pop(hold_ms=20_000, **pop)
            if found.code == 0:
                return found
        raise AssertionError("no message came")

    @staticmethod
    def _place(handle: ReceiptHandle, group: str, topic: str) -> dict[str, Any]:
        return {
            "consumer_group": group,
            "topic": handle.kind.topic(topic, group),
            "queue_id": handle.queue_id,
            "extra_info": handle.encode(),
            "offset": handle.offset,
        }

    async def ack(
        self, handle: ReceiptHandle, *, group: str = "G", topic: str = "Orders", **more: Any
    ) -> int:
        request = AckMessageRequestHeader(**{**self._place(handle, group, topic), **more})
        return (await self.peer.call(RequestCode.ACK_MESSAGE, request, version=V5)).code

    async def renew(self, handle: ReceiptHandle, invisible_ms: int, **more: Any) -> Frame:
        request = ChangeInvisibleTimeRequestHeader(
            **self._place(handle, "G", "Orders"), invisible_time=invisible_ms, **more
        )
        return await self.peer.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, request, version=V5)

    async def notification(self, *, hold_ms: int = 20_000, queue_id: int = -1, **more: Any) -> Frame:
        request = NotificationRequestHeader(
            consumer_group="G", topic="Orders", queue_id=queue_id, poll_time=hold_ms, born_time=0, **more
        )
        return await self.peer.call(RequestCode.NOTIFICATION, request, version=V5)


@pytest.fixture
async def consumer(peer: Peer) -> PopClient:
    return PopClient(peer)


async def set_mode(peer: Peer, **fields: Any) -> Frame:
    """Let the group G pop the topic Orders."""
    body = SetMessageRequestModeRequestBody(
        **{"topic": "Orders", "consumer_group": "G", "mode": "POP", **fields}
    )
    return await peer.call(RequestCode.SET_MESSAGE_REQUEST_MODE, None, body.encode(), version=V5)


def offset_in(cluster: Cluster, queue_id: int = 0, topic: str = "Orders", group: str = "G") -> int:
    """Return the stored offset of a group."""
    return cluster.broker.parts.tables.offsets.query(group, topic, queue_id)


RETRY_TOPIC = TopicKind.RETRY_V1.topic("Orders", "G")
