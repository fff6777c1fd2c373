"""The conversion of a user's message to a send request, and of the broker's answer to a SendResult."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from cometmq.client.cluster.identity import KeyMaker
from cometmq.client.cluster.requests import SEND_STATUS, broker_error, send_request
from cometmq.client.cluster.telemetry import context_room
from cometmq.client.cluster.traces import TIMERS
from cometmq.client.producer.options import ProducerOptions
from cometmq.errors import MessageIllegal
from cometmq.message import Message, MessageExt, MessageQueue, SendResult
from cometmq.protocol.batch import MIN_ITEM, encode_batch
from cometmq.protocol.codes import REPLY_TOPIC_POSTFIX, RETRY_PREFIX, UNSENDABLE_TOPICS, SysFlag
from cometmq.protocol.compression import Compression, compress
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import SendMessageResponseHeader
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.values import encode_properties, is_reserved

_PREPARED = int(SysFlag.TRANSACTION_PREPARED)
USER_MAY_SET = TIMERS | frozenset(
    {
        names.UNIQ_KEY, names.BUYER_ID, names.INSTANCE_ID, names.CORRELATION_ID, names.REPLY_TO_CLIENT,
        names.TTL, names.MSG_TYPE, names.CHECK_IMMUNITY_TIME_IN_SECONDS, names.INNER_MULTI_DISPATCH,
    }
)  # fmt: skip
"""Reserved properties that the sender may set although Message has no field for them."""


class Outgoing(msgspec.Struct):
    """A message or batch, encoded once for all tries."""

    topic: str
    body: bytes
    properties: str
    msg_id: str
    flag: int = 0
    sys_flag: int = 0
    batch: bool = False
    reply: bool = False
    reconsume: tuple[int, int] | None = None
    """The number of retries of the message so far, and their maximum. None: the message is not a retry."""
    messages: Sequence[Message] = ()
    """The user's messages, for the trace records. Empty for a message that the client itself created."""

    def frame(self, group: str, queue: MessageQueue, options: ProducerOptions) -> Frame:
        return send_request(
            group, self.topic, queue, self.body, self.properties,
            flag=self.flag, sys_flag=self.sys_flag, batch=self.batch, reply=self.reply,
            reconsume=self.reconsume,
            template=options.create_topic_key, template_queue_nums=options.default_topic_queue_nums,
        )  # fmt: skip

    def result(self, answer: Frame, queue: MessageQueue, addr: str) -> SendResult:
        """Return the SendResult for a broker's answer. Raises BrokerError unless the code means "stored"."""
        status = SEND_STATUS.get(answer.code)
        if status is None:
            raise broker_error(answer, addr, self.topic, self.msg_id)
        header = answer.header(SendMessageResponseHeader)
        if header.queue_id != queue.queue_id:
            queue = MessageQueue(self.topic, queue.broker_name, header.queue_id)
        return SendResult(
            status,
            self.msg_id,
            header.msg_id,
            queue,
            header.queue_offset,
            header.transaction_id,
            header.region or "DefaultRegion",
            header.trace_on != "false",
            header.recall_handle,
        )


def prepare(message: Message, options: ProducerOptions, keys: KeyMaker) -> Outgoing:
    """Check and encode a user's message, which stays unchanged. Raises MessageIllegal."""
    _check(message, options)
    body = message.body
    msg_id, properties = _properties(message, keys)
    sys_flag = 0
    if len(body) >= options.compress_over:
        how = Compression.of(options.compress_type)
        packed = compress(body, how, options.compress_level)
        if len(packed) < len(body):
            body, sys_flag = packed, how.sys_flag
    return Outgoing(
        message.topic,
        body,
        properties.decode(),
        msg_id,
        flag=message.flag,
        sys_flag=sys_flag,
        reply=message.properties.get(names.MSG_TYPE) == _REPLY,
        messages=(message,),
    )


def prepare_half(message: Message, options: ProducerOptions, keys: KeyMaker, group: str) -> Outgoing:
    """Check and encode a half message for a transaction. A delay level is omitted, as in Apache's client.

    A message with any other kind of delay, a priority or a lite topic is refused.
    """
    names_of_times = [name for name in ("delay_ms", "deliver_at_ms") if getattr(message, name)]
    for name in (*names_of_times, *(TIMERS & message.properties.keys())):
        problem = f"a transaction message cannot be delayed: {name}"
        raise MessageIllegal(problem, message.topic, name)
    _refuse_kind(message, "a transaction message")
    outgoing = prepare(replace(message, delay_level=0) if message.delay_level else message, options, keys)
    ending = encode_properties({names.TRAN_MSG: "true", names.PGROUP: group}).decode()
    outgoing.properties = f"{outgoing.properties}\x02{ending}"
    if len(outgoing.properties.encode()) > names.MAX_PROPERTIES_BYTES:
        raise _too_long(message.topic)
    outgoing.sys_flag |= _PREPARED
    return outgoing


def prepare_batch(messages: Sequence[Message], options: ProducerOptions, keys: KeyMaker) -> Outgoing:
    """Encode a batch. Raises MessageIllegal for an invalid message or messages that cannot share a batch."""
    if not messages:
        raise MessageIllegal("a batch needs at least one message")
    first = messages[0]
    elements: list[tuple[int, bytes, bytes]] = []
    ids: list[str] = []
    for message in messages:
        _check(message, options)
        _check_fits_batch(message, first)
        msg_id, properties = _properties(message, keys)
        ids.append(msg_id)
        elements.append((message.flag, message.body, properties))
    body = encode_batch(elements)
    if len(body) > options.max_message_size:
        raise MessageIllegal(
            f"the batch has {len(body)} bytes, at most {options.max_message_size} are allowed",
            first.topic,
            "body",
        )
    wait = encode_properties({names.WAIT: "true" if first.wait_store else "false"})
    return Outgoing(first.topic, body, wait.decode(), ",".join(ids), batch=True, messages=messages)


def prepare_system(message: Message, keys: KeyMaker, sys_flag: int = 0) -> Outgoing:
    """Encode a message that the client itself creates. Reserved properties and topics are allowed.

    For a retry topic, the properties with the number of retries and its maximum move into the request header.
    `sys_flag` is the compression type of a body that is already compressed.
    """
    properties = message.wire_properties()
    msg_id = properties.setdefault(names.UNIQ_KEY, keys.make())
    reconsume: tuple[int, int] | None = None
    if message.topic.startswith(RETRY_PREFIX) and names.RECONSUME_TIME in properties:
        times = int(properties.pop(names.RECONSUME_TIME))
        reconsume = (times, int(properties.pop(names.MAX_RECONSUME_TIMES, "16")))
    return Outgoing(
        message.topic,
        message.body,
        encode_properties(properties).decode(),
        msg_id,
        flag=message.flag,
        sys_flag=sys_flag,
        reconsume=reconsume,
    )


def _check(message: Message, options: ProducerOptions) -> None:
    message.check()
    topic = message.topic
    if topic in UNSENDABLE_TOPICS:
        raise MessageIllegal(f"clients may not send to the system topic {topic}", topic, "topic")
    if message.delay_level > options.max_delay_level:
        raise MessageIllegal(
            f"delay_level {message.delay_level} is above {options.max_delay_level}, and brokers would "
            "use their highest level instead; set ProducerOptions.max_delay_level for brokers with "
            "more levels",
            topic,
            "delay_level",
        )
    size = len(message.body)
    if size == 0:
        raise MessageIllegal("the body is empty", topic, "body")
    if size > options.max_message_size:
        raise MessageIllegal(
            f"the body has {size} bytes, at most {options.max_message_size} are allowed", topic, "body"
        )
    if message.properties:
        _check_properties(message)


def _check_properties(message: Message) -> None:
    for name, value in message.properties.items():
        if not name or not value:
            raise MessageIllegal(
                f"property {name!r} is {value!r}: names and values must not be empty", message.topic, name
            )
        if is_reserved(name) and name not in USER_MAY_SET:
            raise MessageIllegal(
                f"property name {name} is reserved by RocketMQ; to pass on the properties of a "
                "received message, use its user_properties",
                message.topic,
                name,
            )


def _properties(message: Message, keys: KeyMaker) -> tuple[str, bytes]:
    """Return the unique key and the encoded properties. A second send gets a new key, unless it has one."""
    properties = message.wire_properties()
    msg_id = properties.get(names.UNIQ_KEY)
    if msg_id is None:
        properties[names.UNIQ_KEY] = msg_id = keys.make()
    encoded = encode_properties(properties)
    if len(encoded) > names.MAX_PROPERTIES_BYTES:
        raise _too_long(message.topic)
    return msg_id, encoded


def _too_long(topic: str) -> MessageIllegal:
    return MessageIllegal(f"the properties have over {names.MAX_PROPERTIES_BYTES} bytes", topic, "properties")


def _refuse_kind(message: Message, what: str) -> None:
    """Raise MessageIllegal for a message with a priority or a lite topic. `what` describes the message."""
    for field, name in (("priority", names.PRIORITY), ("lite_topic", names.LITE_TOPIC)):
        if getattr(message, field) is not None or name in message.properties:
            raise MessageIllegal(f"{what} cannot have a {field}", message.topic, field)


def _check_fits_batch(message: Message, first: Message) -> None:
    if message.topic != first.topic:
        raise MessageIllegal(
            f"all messages of a batch must have one topic, not {first.topic} and {message.topic}",
            message.topic,
            "topic",
        )
    if message.topic.startswith(RETRY_PREFIX):
        raise MessageIllegal("batches cannot be sent to retry topics", message.topic, "topic")
    timed = not TIMERS.isdisjoint(message.properties) if message.properties else False
    if message.is_delayed or timed:
        raise MessageIllegal("messages of a batch cannot be delayed", message.topic, "delay_level")
    _refuse_kind(message, "a message of a batch")
    if message.wait_store != first.wait_store:
        raise MessageIllegal(
            "all messages of a batch must have the same wait_store", message.topic, "wait_store"
        )


_UNIQUE_KEY = len("\x02UNIQ_KEY\x01") + 56
"""Maximum number of bytes that a unique key, with an IPv6 address, adds to a message's properties."""


def split_batches(messages: Iterable[Message], max_bytes: int = 4 * 1024 * 1024) -> Iterator[list[Message]]:
    """Yield the messages, in their order, in batches for `Producer.send_batch`.

    A message whose topic or `wait_store` differs from its predecessor's begins a new batch. Messages are
    taken from the iterable only as needed. With OpenTelemetry, each batch leaves room for the trace context
    that a send within the current span adds.

    Args:
        messages: The messages.
        max_bytes: The maximum size in bytes of a batch, including properties, as
            ProducerOptions.max_message_size. A larger message gets a batch of its own, which `send_batch`
            refuses.
    """
    added = MIN_ITEM + _UNIQUE_KEY + context_room()
    batch: list[Message] = []
    size = 0
    for message in messages:
        more = added + len(message.body) + len(encode_properties(message.wire_properties()))
        if batch and (
            size + more > max_bytes
            or message.topic != batch[0].topic
            or message.wait_store != batch[0].wait_store
        ):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += more
    if batch:
        yield batch


_REPLY = "reply"
_COPIED = (names.CORRELATION_ID, names.REPLY_TO_CLIENT, names.TTL)


def as_request(message: Message, client_id: str, timeout_s: float) -> tuple[str, Message]:
    """Return a new correlation id, and a copy of `message` whose properties ask the consumer for a reply."""
    correlation_id = str(uuid.uuid4())
    asking = {
        names.CORRELATION_ID: correlation_id,
        names.REPLY_TO_CLIENT: client_id,
        names.TTL: str(math.ceil(timeout_s * 1000)),
    }
    return correlation_id, replace(message, properties={**message.properties, **asking})


def reply_to(
    request: MessageExt,
    body: bytes,
    *,
    tags: str | None = None,
    keys: Sequence[str] = (),
    flag: int = 0,
    properties: Mapping[str, str] | None = None,
) -> Message:
    """Return the message that replies to a `request`. Any producer may send it.

    Args:
        request: The received message. Its properties CORRELATION_ID, REPLY_TO_CLIENT, TTL (set by `request`)
            and CLUSTER (set by the broker) determine the receiver.
        body: The body of the reply.
        tags: The tag of the reply.
        keys: The keys of the reply.
        flag: The flag of the reply.
        properties: The user properties of the reply.

    Returns:
        The reply, to be sent with `Producer.send`.

    Raises:
        MessageIllegal: The received message does not request a reply.
    """
    asked = request.properties
    for name in (names.CLUSTER, *_COPIED):
        if not asked.get(name):
            problem = f"message {request.msg_id} does not request a reply: it has no property {name}"
            raise MessageIllegal(problem, request.topic, name)
    carried = {name: asked[name] for name in _COPIED}
    return Message(
        asked[names.CLUSTER] + REPLY_TOPIC_POSTFIX,
        body,
        tags,
        keys,
        flag,
        properties={**(properties or {}), **carried, names.MSG_TYPE: _REPLY},
    )
