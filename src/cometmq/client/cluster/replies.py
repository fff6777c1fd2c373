"""Requests that wait for the reply of a consumer (docs/reference/client.md, Request-reply)."""

from __future__ import annotations

import asyncio
import time

from cometmq import logs
from cometmq.client.cluster.decoding import MAX_BODY
from cometmq.message import MessageExt
from cometmq.protocol.compression import decompress
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import PushReplyMessageRequestHeader
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.values import decode_properties
from cometmq.protocol.record.layout import COMPRESSED
from cometmq.text import printable

__all__ = ["Replies", "pushed_reply"]

log = logs.logger("cometmq.client.producer")


class Replies:
    """The waiting requests by correlation id. ProducerOptions.max_requests bounds their number."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[MessageExt]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, correlation_id: str) -> asyncio.Future[MessageExt]:
        """Return the future of a reply. The caller must call `forget` in the end."""
        reply: asyncio.Future[MessageExt] = asyncio.get_running_loop().create_future()
        self._waiting[correlation_id] = reply
        return reply

    def forget(self, correlation_id: str) -> None:
        """Remove a request that does not wait any more."""
        self._waiting.pop(correlation_id, None)

    def arrived(self, message: MessageExt) -> None:
        """Deliver a reply to its request. Late and repeated replies are dropped."""
        correlation_id = message.properties.get(names.CORRELATION_ID, "")
        reply = self._waiting.get(correlation_id)
        if reply is None or reply.done():
            log.info("reply %s is late or has no request", printable(correlation_id, 100))
        else:
            reply.set_result(message)


def pushed_reply(frame: Frame) -> MessageExt:
    """Return the reply in a broker's request (code 326). Raises HeaderError or BodyError."""
    header = frame.header(PushReplyMessageRequestHeader)
    properties = decode_properties((header.properties or "").encode("utf-8", "replace"))
    properties[names.ARRIVE_TIME] = str(int(time.time() * 1000))
    return MessageExt(
        header.topic,
        decompress(header.sys_flag, bytes(frame.body), MAX_BODY),
        header.flag,
        properties,
        queue_id=header.queue_id,
        sys_flag=header.sys_flag & ~COMPRESSED,
        born_timestamp_ms=header.born_timestamp,
        born_host=header.born_host.rpartition("/")[2],  # Java writes /ip:port
        store_timestamp_ms=header.store_timestamp,
        store_host=header.store_host.rpartition("/")[2],
        reconsume_times=header.reconsume_times or 0,
    )
