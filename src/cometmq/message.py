"""Messages, queues and the results of sending and pulling."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from cometmq.errors import MessageIllegal, shown
from cometmq.protocol.codes import MAX_GROUP_LENGTH, MAX_TOPIC_LENGTH, is_legal_name
from cometmq.protocol.ids import offset_id_of
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.values import is_reserved

__all__ = [
    "Message", "MessageExt", "MessageQueue", "PullResult", "PullStatus", "SendResult", "SendStatus",
    "TransactionSendResult", "TransactionState", "WaitingMessage",
]  # fmt: skip


class Message(msgspec.Struct, kw_only=False):
    """A message to be sent.

    At most one of `delay_level`, `delay_ms` and `deliver_at_ms` may be set.

    Attributes:
        topic: Name of the topic.
        body: Content. A bytearray or memoryview is copied; a str must be encoded by the caller.
        tags: One tag for filters of subscriptions, without `||` and without surrounding spaces. Default:
            none.
        keys: List or tuple of keys by which the message can be searched, without spaces. A bare str is
            rejected, because each of its characters would become a key.
        flag: 32 bits for the application. Default: 0.
        delay_level: Level of a delayed delivery, 1 (1 s) to 18 (2 h); 0 for none. Brokers with more levels:
            see ProducerOptions.max_delay_level.
        properties: Properties of the application. RocketMQ's reserved names are rejected.
        wait_store: Whether the broker responds only after the flush and replication that it is configured
            for. Default: True.
        delay_ms: Delay of the delivery in milliseconds; 0 for none. The delivery is at most 1 s later and
            never earlier.
        deliver_at_ms: Time of the delivery in milliseconds since 1970; 0 for none. The delivery is at most 1
            s later and never earlier.
        priority: 0 or more, for a topic of type PRIORITY: consumers that lease messages (POP) receive
            messages of a higher priority first. Brokers have as many priorities as the topic has queues.
            Default: none.
        lite_topic: Name of a lite topic below `topic`, which must be a topic of type LITE: up to 64 letters,
            digits, `-` and `_`. Default: none.

    Raises:
        MessageIllegal: A field has a value that no broker accepts or no consumer can read.
    """

    topic: str
    body: bytes
    tags: str | None = None
    keys: Sequence[str] = ()
    flag: int = 0
    delay_level: int = 0
    properties: dict[str, str] = {}
    wait_store: bool = True
    delay_ms: int = 0
    deliver_at_ms: int = 0
    priority: int | None = None
    lite_topic: str | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Validate all fields of the message.

        The constructor calls this method. Each send calls it again, because the application may have assigned
        fields after the construction.

        Raises:
            MessageIllegal: A field has a value that no broker accepts or no consumer can read.
        """
        if type(self.topic) is not str or self.topic not in _good_topics:
            check_topic_name(self.topic)
            _remember(_good_topics, self.topic)
        if type(self.body) is not bytes:
            self.body = _as_bytes(self.body, self.topic)
        if self.tags is not None and (type(self.tags) is not str or self.tags not in _good_tags):
            _check_tags(self.tags, self.topic)
        keys = self.keys
        if (keys or type(keys) is not tuple) and not (type(keys) is tuple and _plain_words(keys)):
            self.keys = _as_keys(keys, self.topic)
        if not _is_number(self.flag) or not -0x80000000 <= self.flag <= 0x7FFFFFFF:
            raise MessageIllegal(f"flag must be a 32-bit number, not {self.flag!r}", self.topic, "flag")
        if not _is_number(self.delay_level) or self.delay_level < 0:
            problem = f"delay_level is 0 or a level from 1 on, not {self.delay_level!r}"
            raise MessageIllegal(problem, self.topic, "delay_level")
        if self.delay_ms or self.deliver_at_ms:
            self._check_times()
        if self.properties or type(self.properties) is not dict:
            _check_properties(self.properties, self.topic)
        if self.priority is not None or self.lite_topic is not None:
            self._check_kind()
        if type(self.wait_store) is not bool:
            raise MessageIllegal(
                f"wait_store must be True or False, not {self.wait_store!r}", self.topic, "wait_store"
            )

    def _check_times(self) -> None:
        for field in ("delay_ms", "deliver_at_ms"):
            value = getattr(self, field)
            if not _is_number(value) or not 0 <= value < 1 << 53:
                problem = f"{field} is a number of milliseconds, not {value!r}"
                raise MessageIllegal(problem, self.topic, field)
        if bool(self.delay_level) + bool(self.delay_ms) + bool(self.deliver_at_ms) > 1:
            problem = "only one of delay_level, delay_ms and deliver_at_ms may be set"
            raise MessageIllegal(problem, self.topic, "delay_ms" if self.delay_ms else "deliver_at_ms")
        field, own = (
            ("delay_ms", names.TIMER_DELAY_MS) if self.delay_ms else ("deliver_at_ms", names.TIMER_DELIVER_MS)
        )
        rival = next((name for name in _TIMES if name != own and name in self.properties), None)
        if rival is not None:
            problem = f"the property {rival} says when a message is delivered, and so does {field}"
            raise MessageIllegal(problem, self.topic, field)

    def _check_kind(self) -> None:
        """Validate the priority and the lite topic: a message has one of them and no other kind."""
        priority, lite_topic = self.priority, self.lite_topic
        if priority is not None and not (_is_number(priority) and 0 <= priority < 1 << 31):
            problem = f"priority must be a number from 0 to {2**31 - 1}, not {priority!r}"
            raise MessageIllegal(problem, self.topic, "priority")
        if lite_topic is not None and not (isinstance(lite_topic, str) and _LITE_TOPIC.fullmatch(lite_topic)):
            problem = f"lite_topic must be 1 to 64 letters, digits, - and _, not {shown(lite_topic)}"
            raise MessageIllegal(problem, self.topic, "lite_topic")
        field = "lite_topic" if priority is None else "priority"
        if (priority is not None and lite_topic is not None) or self.is_delayed:
            problem = f"a message with {field} has no delay, and not both a priority and a lite_topic"
            raise MessageIllegal(problem, self.topic, field)
        rival = next((name for name in (*_TIMES, names.SHARDING_KEY) if name in self.properties), None)
        if rival is not None:
            raise MessageIllegal(f"a message with {field} has no property {rival}", self.topic, field)

    @property
    def is_delayed(self) -> bool:
        """Whether the message has a delay or a delivery time."""
        return bool(self.delay_level or self.delay_ms or self.deliver_at_ms)

    def wire_properties(self) -> dict[str, str]:
        """Return all properties that are sent to the broker, including those for tags, keys, delay and wait.

        If `properties` contains a reserved name, as in a resent message, the value in `properties` is used,
        unless the field for the property is set.
        """
        found = dict(self.properties)
        if self.keys:
            found[names.KEYS] = " ".join(self.keys)
        if self.tags:
            found[names.TAGS] = self.tags
        if self.delay_level > 0:
            found[names.DELAY] = str(self.delay_level)
        if self.delay_ms:
            found[names.TIMER_DELAY_MS] = str(self.delay_ms)
        if self.deliver_at_ms:
            found[names.TIMER_DELIVER_MS] = str(self.deliver_at_ms)
        if self.priority is not None:
            found[names.PRIORITY] = str(self.priority)
        if self.lite_topic is not None:
            found[names.LITE_TOPIC] = self.lite_topic
        found[names.WAIT] = "true" if self.wait_store else "false"
        return found


# Properties with a delay or delivery time. A message with such a property must not have the field `delay_ms`
# or `deliver_at_ms`, because each of these fields sets another such property. The broker would then choose
# between two times.
_TIMES = (
    names.DELAY,
    names.TIMER_DELAY_SEC,
    names.TIMER_DELAY_MS,
    names.TIMER_DELIVER_MS,
    names.TIMER_OUT_MS,
)
_LITE_TOPIC = re.compile(r"[A-Za-z0-9_-]{1,64}")
_GOOD_MAX = 10_000
_good_topics: set[str] = set()
_good_tags: set[str] = set()
"""Tags that were found valid, so that they are not validated again for each message."""


def _is_number(value: object) -> bool:
    """Return whether a value is an int or an IntEnum. A bool is not."""
    return type(value) is int or (isinstance(value, int) and not isinstance(value, bool))


def _check_tags(tags: str, topic: str) -> None:
    check_text(tags, "tags", topic, "the tag")
    if tags:  # an empty tag counts as no tag
        check_tag(tags, topic)
    _remember(_good_tags, tags)


def _remember(good: set[str], name: str) -> None:
    if len(good) >= _GOOD_MAX:
        good.clear()
    good.add(name)


LONE_BAR = re.compile(r"^\||\|$|\s\||\|\s")
"""Pattern for a single `|` where `||` was probably intended. Tags and subscriptions with it are refused."""


def check_tag(tag: str, topic: str) -> None:
    """Raise MessageIllegal for a tag that no subscription can name: `||` separates tags, `*` matches all."""
    if "||" in tag or tag != tag.strip() or LONE_BAR.search(tag) or tag == "*":
        problem = f"the tag {shown(tag)} cannot be subscribed to: `||` divides tags, blanks around them go"
        problem += ", `*` is all" if tag == "*" else ""
        raise MessageIllegal(problem, topic, "tags")


def check_text(text: object, field: str, topic: str = "", what: str = "") -> None:
    """Raise MessageIllegal for a value that is no str or that message properties cannot contain.

    `what` is the description of the field in the error text.
    """
    what = what or field
    if not isinstance(text, str):
        raise MessageIllegal(f"{what} must be a str, not {shown(text)}", topic, field)
    if text.isascii() and text.isprintable():
        return
    if "\x01" in text or "\x02" in text:
        raise MessageIllegal(f"{what} contains a separator (0x01 or 0x02): {shown(text)}", topic, field)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MessageIllegal(f"{what} cannot be encoded as UTF-8: {error.reason}", topic, field) from None


def _as_bytes(body: object, topic: str) -> bytes:
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)  # copy the body, because it must not change during the send
    hint = ": encode() it" if isinstance(body, str) else ""
    raise MessageIllegal(f"the body must be bytes, not {type(body).__name__}{hint}", topic, "body")


def _plain_words(keys: tuple[str, ...]) -> bool:
    """Return whether all keys of a message are valid. For speed, the keys are joined and tested together."""
    try:
        text = " ".join(keys)
    except TypeError:
        return False
    return text.isascii() and text.isprintable() and tuple(text.split()) == keys


def _as_keys(keys: object, topic: str) -> tuple[str, ...]:
    if isinstance(keys, str | bytes) or not isinstance(keys, Sequence):
        problem = f"keys are a list or tuple of words, not {shown(keys)}"
        hint = f": [{shown(keys)}] is one" if keys and isinstance(keys, str) else ""
        raise MessageIllegal(problem + hint, topic, "keys")
    for key in keys:
        check_text(key, "keys", topic, "a key")
        if key.split() != [key]:
            raise MessageIllegal(
                f"the key {shown(key)} contains a blank, which separates keys", topic, "keys"
            )
    return tuple(keys)


def _check_properties(properties: object, topic: str) -> None:
    if not isinstance(properties, dict):
        raise MessageIllegal(f"properties must be a dict, not {shown(properties)}", topic, "properties")
    for name, value in properties.items():
        check_text(name, "properties", topic, "the name of a property")
        check_text(value, name, topic, f"property {shown(name)}")


class MessageQueue(msgspec.Struct, frozen=True, order=True, gc=False, cache_hash=True, rename="camel"):
    """A queue of a topic at a broker. Queues are sorted in the order in which consumers allocate them.

    Attributes:
        topic: Name of the topic.
        broker_name: Name of the broker.
        queue_id: Number of the queue, counted from 0 at each broker.
    """

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker_name}:{self.queue_id}"


class MessageExt(msgspec.Struct, gc=False):
    """A stored message.

    The properties of a received message are parsed when `properties` is read for the first time. Until then,
    msgspec's encoders raise TypeError, and its `asdict` and `astuple` do not return the properties, because
    these functions bypass `properties`.

    Attributes:
        topic: Name of the topic.
        body: Content, decompressed if the client pulled the message.
        flag: 32 bits of the application.
        properties: All properties, including RocketMQ's reserved ones.
        queue_id: Number of the queue at its broker.
        queue_offset: Offset of the message in its queue.
        physical_offset: Position of the message in the broker's commit log, in bytes.
        sys_flag: Bits of `codes.SysFlag`.
        born_timestamp_ms: Time of the send, in milliseconds since 1970.
        born_host: Address ("ip:port") of the producer.
        store_timestamp_ms: Time of the storage, in milliseconds since 1970.
        store_host: Address ("ip:port") of the broker.
        reconsume_times: Number of redeliveries so far.
        prepared_transaction_offset: Position of the half message of a committed transaction.
        body_crc: CRC-32 of the stored body without the top bit.
        store_size: Size of the stored record in bytes.
        broker_name: Name of the broker.
    """

    topic: str
    body: bytes
    flag: int = 0
    properties: dict[str, str] = {}
    queue_id: int = 0
    queue_offset: int = 0
    physical_offset: int = 0
    sys_flag: int = 0
    born_timestamp_ms: int = 0
    born_host: str = ""
    store_timestamp_ms: int = 0
    store_host: str = ""
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    body_crc: int = 0
    store_size: int = 0
    broker_name: str = ""

    if TYPE_CHECKING:

        @property
        def _stored(self) -> dict[str, str] | Unparsed: ...
        @_stored.setter
        def _stored(self, stored: dict[str, str] | Unparsed) -> None: ...

    def _parse(self) -> dict[str, str]:
        """Return the properties. The first call parses them."""
        stored = self._stored
        if not isinstance(stored, tuple):
            return stored
        properties = stored[0](stored[1])
        for added in stored[2:]:
            properties |= added
        self._stored = properties
        return properties

    def _set(self, properties: dict[str, str]) -> None:
        self._stored = properties

    def __eq__(self, other: object) -> bool:
        self._parse()
        if isinstance(other, MessageExt):
            other._parse()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        self._parse()
        return super().__repr__()

    def __rich_repr__(self) -> Any:
        self._parse()
        return super().__rich_repr__()

    def __copy__(self) -> Any:
        self._parse()
        return super().__copy__()  # type: ignore[misc]  # in C

    def __reduce__(self) -> Any:
        self._parse()
        return super().__reduce__()

    @property
    def msg_id(self) -> str:
        """Message id: the producer's unique key, or the offset id of a message without one."""
        return self.properties.get(names.UNIQ_KEY) or self.offset_msg_id

    @property
    def offset_msg_id(self) -> str:
        """Offset id: the broker's address and the position in its commit log, encoded."""
        return offset_id_of(self.store_host, self.physical_offset) if self.store_host else ""

    @property
    def tags(self) -> str | None:
        return self.properties.get(names.TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.properties.get(names.KEYS, "").split())

    @property
    def delay_level(self) -> int:
        text = self.properties.get(names.DELAY, "0")
        try:
            return int(text)
        except ValueError:
            return 0

    @property
    def priority(self) -> int | None:
        """Priority, None for a message without one."""
        text = self.properties.get(names.PRIORITY, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None

    @property
    def lite_topic(self) -> str | None:
        """Name of the message's lite topic below `topic`, None for a message without one."""
        return self.properties.get(names.LITE_TOPIC)

    @property
    def wait_store(self) -> bool:
        """Whether the sender waited for the broker's configured flush and replication.

        The result is also True if the broker has not stored the property WAIT. RocketMQ 4.9 stores this
        property only for batches, and so does CometMQ for clients of 4.9's protocol such as this one.
        """
        return self.properties.get(names.WAIT, "true").lower() != "false"

    @property
    def user_properties(self) -> dict[str, str]:
        """Properties of the application, without RocketMQ's reserved ones."""
        return {name: value for name, value in self.properties.items() if not is_reserved(name)}

    @property
    def queue(self) -> MessageQueue:
        return MessageQueue(self.topic, self.broker_name, self.queue_id)


Unparsed = tuple[Callable[[bytes], dict[str, str]], bytes, *tuple[Mapping[str, str], ...]]
"""Properties before they are parsed: the parsing function, the property string, properties set later."""

# The decoder of records stores unparsed properties in the field `properties`. Therefore the field is accessed
# as `_stored`, and `properties` becomes a property that replaces unparsed properties with a dict.
MessageExt._stored = MessageExt.__dict__["properties"]  # type: ignore[method-assign]  # noqa: SLF001
MessageExt.properties = property(MessageExt._parse, MessageExt._set)  # type: ignore[assignment]  # noqa: SLF001


def add_properties(messages: Iterable[MessageExt], properties: Mapping[str, str]) -> None:
    """Set properties of received messages, without parsing the properties that the messages have.

    Unparsed messages refer to `properties` until they are parsed, so it must not change afterwards.
    """
    added = (properties,)
    for message in messages:
        stored = message._stored  # noqa: SLF001
        if isinstance(stored, tuple):
            message._stored = stored + added  # noqa: SLF001
        else:
            stored.update(properties)


class SendStatus(Enum):
    """How safely the broker has stored a sent message. All four values mean that the message is stored.

    Attributes:
        SEND_OK: Flushed and replicated as the broker is configured.
        FLUSH_DISK_TIMEOUT: The flush to disk was not confirmed in time.
        FLUSH_SLAVE_TIMEOUT: The replication to a slave was not confirmed in time.
        SLAVE_NOT_AVAILABLE: No slave was available for the replication.
    """

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """The result of a send.

    Attributes:
        status: Durability of the stored message.
        msg_id: Message id; for a batch all ids, joined by commas.
        offset_msg_id: Offset id; for a batch all ids, joined by commas.
        queue: Queue that stores the message.
        queue_offset: Offset in the queue; for a batch that of the first message.
        transaction_id: Unique key of the message of a transaction.
        region_id: Region of the broker.
        trace_on: Whether the broker permits tracing of the message.
        recall_handle: Handle of a delayed message for Producer.recall.
    """

    status: SendStatus
    msg_id: str
    offset_msg_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    region_id: str | None = None
    trace_on: bool = True
    recall_handle: str | None = None


class WaitingMessage(msgspec.Struct, frozen=True):
    """A delayed message that its broker has not delivered yet.

    Attributes:
        message: Message as the broker stores it until the delivery, in an internal topic.
        topic: Topic that the message will be delivered to.
        deliver_at_ms: Time of the delivery in milliseconds since 1970.
        recall_handle: Handle for Producer.recall; None for a message without a unique key or with a delay
            level.
        delay_level: Delay level; 0 for a message with a delivery time.
    """

    message: MessageExt
    topic: str
    deliver_at_ms: int
    recall_handle: str | None
    delay_level: int = 0


class TransactionState(Enum):
    """State of a local transaction. If it is UNKNOWN, the broker sends a transaction check later."""

    COMMIT = "COMMIT_MESSAGE"
    ROLLBACK = "ROLLBACK_MESSAGE"
    UNKNOWN = "UNKNOW"


class TransactionSendResult(SendResult, frozen=True, kw_only=True, gc=True):
    """The result of sending a message in a transaction. The inherited fields describe the half message.

    Attributes:
        state: State of the local transaction.
        error: Exception that the local transaction raised; `state` is UNKNOWN then.
    """

    state: TransactionState
    error: BaseException | None = None


class PullStatus(Enum):
    """Outcome of a pull."""

    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    NO_MATCHED_MSG = "NO_MATCHED_MSG"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


class PullResult(msgspec.Struct, frozen=True):
    """The result of a pull.

    Attributes:
        status: Outcome of the pull.
        next_begin_offset: Offset at which the next pull begins, whatever the status.
        min_offset: Min offset of the queue.
        max_offset: Max offset of the queue.
        messages: Pulled messages.
        suggest_which_broker_id: Id of the broker that the next pull should use; 0 is the master.
        damaged: Queue offsets of messages that are not in `messages`, because their bodies do not match their
            CRCs.
        oversized: Queue offsets of messages whose bodies are left compressed, because the decompressed bodies
            would be too large.
    """

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    messages: list[MessageExt] = []
    suggest_which_broker_id: int = 0
    damaged: list[int] = []
    oversized: list[int] = []


def check_topic_name(topic: str) -> None:
    """Raise MessageIllegal for a topic name that clients may not use."""
    _check_name(topic, "topic", MAX_TOPIC_LENGTH)


def check_group_name(group: str) -> None:
    """Raise MessageIllegal for a group name that clients may not use."""
    _check_name(group, "group", MAX_GROUP_LENGTH)


def _check_name(name: str, kind: str, longest: int) -> None:
    if not isinstance(name, str):
        raise MessageIllegal(f"the {kind} name must be a str, not {type(name).__name__}", field=kind)
    if not name or name.isspace():
        raise MessageIllegal(f"the {kind} name is blank", name, kind)
    if len(name) > longest:
        problem = f"the {kind} name has {len(name)} characters, at most {longest} are allowed"
        raise MessageIllegal(problem, name, kind)
    if not is_legal_name(name, longest):
        problem = f"the {kind} name {name!r} contains characters other than letters, digits, %, |, _ and -"
        raise MessageIllegal(problem, name, kind)
