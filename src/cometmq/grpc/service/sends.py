"""The RPCs of producers: SendMessage, EndTransaction and RecallMessage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.tables.topics import TopicTable
from cometmq.errors import RemotingError
from cometmq.grpc.rpc.calls import Call
from cometmq.grpc.rpc.enums import Code, MessageType, TransactionResolution, TransactionSource
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import ServiceError
from cometmq.grpc.service.clients import Client, Clients
from cometmq.grpc.service.outcomes import CODES, Responder, Result, lost, set_status, status
from cometmq.grpc.service.sent import (
    MAX_KEYS,
    NEW_QUEUES,
    SendRequest,
    accepted_types,
    check_count,
    send_request,
)
from cometmq.grpc.service.traces import Traces
from cometmq.protocol import headers
from cometmq.protocol.bodies import HeartbeatData, ProducerData, TopicConfig
from cometmq.protocol.codes import (
    MAX_TOPIC_LENGTH,
    TBW102,
    Perm,
    RequestCode,
    ResponseCode,
    SysFlag,
    is_legal_name,
)
from cometmq.protocol.frame import Frame
from cometmq.protocol.ids import decode_offset_id

MAX_MESSAGES = 1024
"""The maximum number of messages of one request. Clients send one."""
MAX_KEYS_PER_REQUEST = 16 * MAX_KEYS
"""The maximum number of keys of the messages of one request: each is checked, and becomes an index entry."""
MAX_TRANSACTION_TOPICS = 100
"""The maximum number of topics for whose transactions a client without settings is asked."""
STORED = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    }
)
"""The responses to a send that contain the position of the stored message."""


def find_topic(topics: TopicTable, name: str) -> TopicConfig | None:
    """Return a topic, or the topic that a send would create, or None if there is neither."""
    config = topics.get(name)
    if config is not None:
        return config
    template = topics.get(TBW102)
    if template is None or not template.perm & Perm.INHERIT or not is_legal_name(name, MAX_TOPIC_LENGTH):
        return None
    queues = min(NEW_QUEUES, template.write_queue_nums)
    perm = template.perm & ~int(Perm.INHERIT)
    return TopicConfig(topic_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)


@dataclass(eq=False)
class Sends:
    """Handles the calls of producers. `traces` records what they do."""

    clients: Clients
    topics: TopicTable
    config: BrokerConfig
    traces: Traces

    def send_message(self, call: Call, request: Any) -> Awaitable[Any] | None:
        """Store the messages of a request. Each has an outcome of its own."""
        client = self.clients.find(call)
        given = list(request.messages)
        if not given:
            raise ServiceError(Code.MESSAGE_CORRUPTED, "messages: the request has none")
        if len(given) > MAX_MESSAGES:
            raise ServiceError(Code.BAD_REQUEST, f"messages: {len(given)}, at most {MAX_MESSAGES}")
        if len(given) > 1 and len({each.topic.name for each in given}) > 1:
            raise ServiceError(Code.MESSAGE_CORRUPTED, "messages: they have different topics")
        check_count("keys", sum(len(each.system_properties.keys) for each in given), MAX_KEYS_PER_REQUEST)
        sent = [self._prepared(message) for message in given]
        if sent[0].type is MessageType.TRANSACTION:
            _register(client, sent[0].header.topic)
        begun_ms = self.traces.now_ms()
        frames = [client.frame(RequestCode.SEND_MESSAGE_V2, each.header, each.body) for each in sent]
        if len(sent) > 1:
            return self._respond_all(call, client, begun_ms, sent, [client.asked(frame) for frame in frames])
        client.ask(frames[0], Responder(call, partial(self._response, call, client, begun_ms, sent[0])))
        return None

    def _response(
        self, call: Call, client: Client, begun_ms: int, sent: SendRequest, outcome: Frame | RemotingError
    ) -> Any:
        """Return the response to a request with one message."""
        response = messages().SendMessageResponse()
        code, text = self._fill(response.entries.add(), call, client, begun_ms, sent, outcome)
        set_status(response.status, code, text)
        return response

    async def _respond_all(
        self,
        call: Call,
        client: Client,
        begun_ms: int,
        sent: list[SendRequest],
        outcomes: list[asyncio.Future[Frame]],
    ) -> Any:
        responses = await asyncio.gather(*outcomes, return_exceptions=True)
        response = messages().SendMessageResponse()
        results = [
            self._fill(response.entries.add(), call, client, begun_ms, each, outcome)
            for each, outcome in zip(sent, responses, strict=True)
        ]
        same = len({code for code, _ in results}) == 1
        set_status(response.status, *(results[0] if same else (Code.MULTIPLE_RESULTS,)))
        return response

    def _fill(
        self,
        entry: Any,
        call: Call,
        client: Client,
        begun_ms: int,
        sent: SendRequest,
        outcome: Frame | BaseException,
    ) -> Result:
        """Fill the entry that tells a client whether its message was stored. Return its status."""
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, RemotingError):
                raise outcome
            code, text = lost(outcome)
        else:
            code, text = CODES.get(outcome.code, Code.INTERNAL_SERVER_ERROR), outcome.remark or ""
            if outcome.code in STORED:
                self._fill_stored(entry, call, client, begun_ms, sent, outcome)
        set_status(entry.status, code, text)
        return code, text

    def _fill_stored(
        self, entry: Any, call: Call, client: Client, begun_ms: int, sent: SendRequest, response: Frame
    ) -> None:
        stored = response.header(headers.SendMessageResponseHeader)
        if call.on_stored is not None:
            call.on_stored(stored)
        success = response.code == ResponseCode.SUCCESS
        self.traces.sent(client, sent, stored.msg_id, begun_ms, success=success)
        entry.message_id = stored.first_msg_id or sent.message_id
        entry.offset = stored.queue_offset
        if sent.type is MessageType.TRANSACTION:
            position = decode_offset_id(stored.msg_id).physical_offset
            entry.transaction_id = transaction_id(stored.queue_offset, position)
        if stored.recall_handle:
            entry.recall_handle = stored.recall_handle

    def _prepared(self, message: Any) -> SendRequest:
        topic = find_topic(self.topics, message.topic.name)
        sent = send_request(message, self.config.store.max_message_size, topic)
        if sent.type is MessageType.DELAY:
            wait_s = message.system_properties.delivery_timestamp.ToMilliseconds() / 1000 - time.time()
            if wait_s > self.config.timer_max_delay_sec:
                most = self.config.timer_max_delay_sec
                problem = f"delivery_timestamp: {wait_s:.0f} s from now, at most {most} s are allowed"
                raise ServiceError(Code.ILLEGAL_DELIVERY_TIME, problem)
        if topic is not None:
            accepted = accepted_types(topic.attributes.get("message.type", "") if topic.attributes else "")
            if sent.type not in accepted:
                names = ", ".join(each.name for each in accepted)
                problem = f"message_type: {sent.type.name}, but topic {topic.topic_name} accepts {names}"
                raise ServiceError(Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, problem)
        return sent

    async def end_transaction(self, call: Call, request: Any) -> Any:
        """Commit or roll back a transaction.

        Its id says where the half message is stored, so it stays valid for any time and after a restart.
        """
        client = self.clients.find(call)
        offset, position = _half_message(request.transaction_id)
        flags = {
            TransactionResolution.COMMIT: SysFlag.TRANSACTION_COMMIT,
            TransactionResolution.ROLLBACK: SysFlag.TRANSACTION_ROLLBACK,
        }
        header = headers.EndTransactionRequestHeader(
            topic=request.topic.name,
            producer_group=request.topic.name,
            tran_state_table_offset=offset,
            commit_log_offset=position,
            commit_or_rollback=flags.get(request.resolution, 0),
            from_transaction_check=request.source == TransactionSource.SOURCE_SERVER_CHECK,
            msg_id=request.message_id,
            transaction_id=request.message_id,
        )
        await client.send(client.frame(RequestCode.END_TRANSACTION, header))
        self.traces.transaction_ended(client, request)
        return messages().EndTransactionResponse(status=status(Code.OK))

    async def recall_message(self, call: Call, request: Any) -> Any:
        """Withdraw a message before its delivery time."""
        client = self.clients.find(call)
        header = headers.RecallMessageRequestHeader(
            topic=request.topic.name, recall_handle=request.recall_handle, producer_group=request.topic.name
        )
        response = await client.send(client.frame(RequestCode.RECALL_MESSAGE, header))
        recalled = response.header(headers.RecallMessageResponseHeader)
        self.traces.recalled(client, request.topic.name, recalled.msg_id)
        return messages().RecallMessageResponse(status=status(Code.OK), message_id=recalled.msg_id)


def _register(client: Client, topic: str) -> None:
    """Register a client for the checks of its transactions, in case it has sent no settings."""
    topics = client.transactions
    if topic in topics or len(topics) >= MAX_TRANSACTION_TOPICS:
        return
    topics.add(topic)
    data = HeartbeatData(client_id=client.client_id, producer_data_set=[ProducerData(group_name=topic)])
    client.oneway(client.frame(RequestCode.HEART_BEAT, body=data.encode()))


def transaction_id(offset: int, position: int) -> str:
    """Return the id of a transaction: the queue offset and the log position of its half message."""
    return f"{offset:016X}{position:016X}"


def _half_message(text: str) -> tuple[int, int]:
    """Return the queue offset and the log position in a transaction id. Raises ServiceError."""
    try:
        if len(text) != 32 or not text.isalnum():
            raise ValueError
        return int(text[:16], 16), int(text[16:], 16)
    except ValueError:
        problem = f"transaction_id: {text[:80]!r} is not one of this server"
        raise ServiceError(Code.INVALID_TRANSACTION_ID, problem) from None
