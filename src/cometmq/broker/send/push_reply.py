"""The broker's part of request-reply (docs/reference/remoting.md, Request-reply).

A replier sends a reply with request 324 or 325. The broker pushes the reply with request 326 to the client
that waits for the reply.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from cometmq import logs
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.groups.clients import ProducerTable
from cometmq.broker.send.send import TRANSACTION_BITS, SendProcessor
from cometmq.broker.send.stored_form import sent_properties
from cometmq.errors import CommandError, RemotingError
from cometmq.protocol.codes import (
    DLQ_PREFIX,
    RETRY_PREFIX,
    RequestCode,
    ResponseCode,
    handles,
    is_system_topic,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    PushReplyMessageRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    SendMessageResponseHeader,
)
from cometmq.protocol.properties.values import (
    MAX_PROPERTIES_BYTES,
    has_stray_separator,
    put,
    stored_tags_code,
    value_of,
)
from cometmq.remoting import Connection
from cometmq.store import StoreRefused

log = logs.logger(__name__)

PUSH_TIMEOUT_S = 10.0
Body = bytes | memoryview


@dataclass(eq=False)
class ReplyProcessor:
    """Pushes replies to the clients that wait for them, and stores a copy of each reply.

    Until the client has received the reply, the replier's request counts toward the limit of concurrent
    requests per connection (remoting/limits.py, handlers).
    """

    sends: SendProcessor
    producers: ProducerTable
    address: BrokerAddress

    def __post_init__(self) -> None:
        self._log_limit = logs.LogLimiter()

    @handles(RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2)
    async def send_reply_message(self, connection: Connection, frame: Frame) -> Frame:
        """Push a reply to its client, store a copy, and return the result of the push."""
        header = frame.typed
        if type(header) is not SendMessageRequestHeaderV2:
            header = frame.header(SendMessageRequestHeader)
        self._check(header.topic, frame.body)
        header.sys_flag &= ~TRANSACTION_BITS
        rules = self.sends.admit(frame, header)
        queue_id = header.queue_id
        if queue_id >= rules.queue_limit:
            raise self.sends.bad_queue(connection, frame, header)
        if queue_id < 0:
            queue_id = random.randrange(max(rules.write_queues, 1))
        properties = sent_properties(header.properties)
        if has_stray_separator(properties):
            raise CommandError(ResponseCode.MESSAGE_ILLEGAL, "the properties contain an unexpected separator")
        # Bytes, whereas `admit` has checked only the number of characters.
        if len(properties) > MAX_PROPERTIES_BYTES:
            why = f"the properties have {len(properties)} bytes, at most {MAX_PROPERTIES_BYTES} are allowed"
            raise CommandError(ResponseCode.MESSAGE_ILLEGAL, why)
        problem = await self._push(connection, header, properties, frame.body)
        if problem and self._log_limit.allows():
            log.warning("%s", problem)
        answer = SendMessageResponseHeader(msg_id="0", queue_id=queue_id, queue_offset=0)
        if self.sends.config.store_reply_message_enable:
            answer = await self._store(connection, header, properties, frame.body, queue_id) or answer
        answer.region, answer.trace_on = self.sends.config.region_id, str(self.sends.config.trace_on).lower()
        code = ResponseCode.SYSTEM_ERROR if problem else ResponseCode.SUCCESS
        return frame.response(code, problem or None, header=answer)

    def _check(self, topic: str, body: Body) -> None:
        """Raise CommandError for a reply that cannot be stored, before it is pushed."""
        if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) or is_system_topic(topic):
            raise CommandError(ResponseCode.NO_PERMISSION, f"a reply to topic {topic} is forbidden")
        largest = self.sends.store.appender.limits.body
        if len(body) > largest:
            why = f"the reply has {len(body)} bytes, at most {largest} are allowed (maxMessageSize)"
            raise CommandError(ResponseCode.MESSAGE_ILLEGAL, why)

    async def _push(
        self, connection: Connection, header: SendMessageRequestHeader, properties: bytes, body: Body
    ) -> str:
        """Push a reply to its client. Return "" or, worded as by Apache's broker, why that failed."""
        client_id = value_of(properties, b"REPLY_TO_CLIENT").decode("utf-8", "replace")
        if not client_id:
            return "reply message properties[REPLY_TO_CLIENT] is null"
        channel: Connection | None = self.producers.channel(client_id)
        if channel is None:
            return f"push reply message fail, channel of <{client_id}> not found."
        now_ms = self.sends.clock.time_ms()
        pushed = PushReplyMessageRequestHeader(
            producer_group=header.producer_group or "", topic=header.topic,
            default_topic=header.default_topic or "",
            default_topic_queue_nums=header.default_topic_queue_nums or 0, queue_id=header.queue_id,
            sys_flag=header.sys_flag, born_timestamp=header.born_timestamp, flag=header.flag,
            born_host=connection.peer, store_host=self.address.text, store_timestamp=now_ms,
            properties=put(properties, b"PUSH_REPLY_TIME", b"%d" % now_ms).decode("utf-8", "replace"),
            reconsume_times=header.reconsume_times or 0, unit_mode=bool(header.unit_mode),
        )  # fmt: skip
        request = Frame.request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, pushed, body)
        try:
            taken = await channel.call(request, PUSH_TIMEOUT_S)
        except RemotingError as error:
            log.debug("reply to %s not taken: %s", client_id, error)
        else:
            if taken.code == ResponseCode.SUCCESS:
                return ""
        return f"push reply message to {client_id}fail."

    async def _store(
        self,
        connection: Connection,
        header: SendMessageRequestHeader,
        properties: bytes,
        body: Body,
        queue_id: int,
    ) -> SendMessageResponseHeader | None:
        """Store a copy of a reply. Return the response, or None after a failure, which is only logged."""
        done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        try:
            message = self.sends.store.appender.append(
                header.topic, queue_id, body, properties, flag=header.flag, sys_flag=header.sys_flag,
                born_timestamp_ms=header.born_timestamp, born_host=connection.peer_host,
                reconsume_times=header.reconsume_times or 0, tags_code=stored_tags_code(properties),
            )  # fmt: skip
        except StoreRefused as refusal:
            problem: str | None = refusal.remark
        else:
            self.sends.writer.appended(
                lambda _code, remark: None if done.done() else done.set_result(remark), True
            )
            problem = await done
        if problem is not None:
            if self._log_limit.allows():
                log.warning("a reply for topic %s could not be stored: %s", header.topic, problem)
            return None
        ids = self.sends.writer.replies.message_id(message.physical_offset).decode()
        return SendMessageResponseHeader(msg_id=ids, queue_id=queue_id, queue_offset=message.queue_offset)
