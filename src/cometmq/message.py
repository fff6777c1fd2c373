"""What a user sends and receives: messages, queues and the results of sending and pulling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

import msgspec

from cometmq.errors import MessageIllegal, shown
from cometmq.protocol.codes import check_topic_name
from cometmq.protocol.ids import offset_id_of
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.values import is_reserved

__all__ = [
    "Message",
    "MessageExt",
    "MessageQueue",
    "PullResult",
    "PullStatus",
    "SendResult",
    "SendStatus",
    "TransactionSendResult",
    "TransactionState",
    "WaitingMessage",
]


class Message(msgspec.Struct, kw_only=False):
    """A message to be sent. Raises MessageIllegal, which names the field, for what no consumer could read.

    body: bytes; of a bytearray or memoryview a copy is taken, and text is refused (encode it).
    tags: one tag, by which the broker filters, without `||` and without blanks around it.
    keys: words by which the message can be found again: a list or tuple of them, without blanks inside. A
    bare str is refused, for its letters would become keys.
    flag: 32 bits of the user's own.
    delay_level: 1 to 18 (1 s to 2 h) for a later delivery, 0 for none; a broker may be set to more levels,
    see ProducerOptions.max_delay_level.
    delay_ms, deliver_at_ms: a later delivery after so many milliseconds, or at a time in ms since 1970; up to
    a second after that, and never before. A message has one of the three, or none.
    properties: the user's own, without RocketMQ's reserved names.
    wait_store: whether the broker answers only when the message is as safe as it is configured to make it.
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

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """What the making checks; a send does so again, since fields may be set. Raises MessageIllegal."""
        if type(self.topic) is not str or self.topic not in _good_topics:
            _check_topic(self.topic)
        if type(self.body) is not bytes:
            self.body = _as_bytes(self.body, self.topic)
        if self.tags is not None and (type(self.tags) is not str or self.tags not in _good_tags):
            _check_tags(self.tags, self.topic)
        keys = self.keys
        if (keys or type(keys) is not tuple) and not (type(keys) is tuple and _plain_words(keys)):
            self.keys = _as_keys(keys, self.topic)
        if not _is_number(self.flag) or not -0x80000000 <= self.flag <= 0x7FFFFFFF:
            raise MessageIllegal(f"flag is a number of 32 bits, not {self.flag!r}", self.topic, "flag")
        if not _is_number(self.delay_level) or self.delay_level < 0:
            problem = f"delay_level is 0 or a level from 1 on, not {self.delay_level!r}"
            raise MessageIllegal(problem, self.topic, "delay_level")
        if self.delay_ms or self.deliver_at_ms:
            self._check_times()
        if self.properties or type(self.properties) is not dict:
            _check_properties(self.properties, self.topic)
        if type(self.wait_store) is not bool:
            raise MessageIllegal(
                f"wait_store is True or False, not {self.wait_store!r}", self.topic, "wait_store"
            )

    def _check_times(self) -> None:
        for field in ("delay_ms", "deliver_at_ms"):
            value = getattr(self, field)
            if not _is_number(value) or not 0 <= value < 1 << 53:
                problem = f"{field} is a number of milliseconds, not {value!r}"
                raise MessageIllegal(problem, self.topic, field)
        if bool(self.delay_level) + bool(self.delay_ms) + bool(self.deliver_at_ms) > 1:
            problem = "one of delay_level, delay_ms and deliver_at_ms says when a message is delivered"
            raise MessageIllegal(problem, self.topic, "delay_ms" if self.delay_ms else "deliver_at_ms")
        field, own = (
            ("delay_ms", names.TIMER_DELAY_MS) if self.delay_ms else ("deliver_at_ms", names.TIMER_DELIVER_MS)
        )
        rival = next((name for name in _TIMES if name != own and name in self.properties), None)
        if rival is not None:
            problem = f"the property {rival} says when a message is delivered, and so does {field}"
            raise MessageIllegal(problem, self.topic, field)

    @property
    def is_delayed(self) -> bool:
        """Whether it is to be delivered later."""
        return bool(self.delay_level or self.delay_ms or self.deliver_at_ms)

    def wire_properties(self) -> dict[str, str]:
        """All properties as they go to the broker, the reserved ones for tags, keys, delay and wait included.

        A reserved name that stands in `properties` (a message sent again) keeps its value unless a field says
        otherwise.
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
        found[names.WAIT] = "true" if self.wait_store else "false"
        return found


# Each of these counts before delay_ms or deliver_at_ms at the broker, or may.
_TIMES = (
    names.DELAY,
    names.TIMER_DELAY_SEC,
    names.TIMER_DELAY_MS,
    names.TIMER_DELIVER_MS,
    names.TIMER_OUT_MS,
)
_GOOD_MAX = 10_000
_good_topics: set[str] = set()
_good_tags: set[str] = set()
"""Names that passed their check, so that it is not made for each message."""


def _is_number(value: object) -> bool:
    """An int or IntEnum; True and False are no numbers."""
    return type(value) is int or (isinstance(value, int) and not isinstance(value, bool))


def _check_topic(topic: str) -> None:
    check_topic_name(topic)
    _remember(_good_topics, topic)


def _check_tags(tags: str, topic: str) -> None:
    check_text(tags, "tags", topic, "the tag")
    if tags:  # as good as None: no tag
        check_tag(tags, topic)
    _remember(_good_tags, tags)


def _remember(good: set[str], name: str) -> None:
    if len(good) >= _GOOD_MAX:
        good.clear()
    good.add(name)


LONE_BAR = re.compile(r"^\||\|$|\s\||\|\s")
"""A `|` that is meant as `||`, and no subscription takes as part of a tag."""


def check_tag(tag: str, topic: str) -> None:
    """Raise MessageIllegal for a tag no subscription can name: `||` divides, `*` is all."""
    if "||" in tag or tag != tag.strip() or LONE_BAR.search(tag) or tag == "*":
        problem = f"the tag {shown(tag)} cannot be subscribed to: `||` divides tags, blanks around them go"
        problem += ", `*` is all" if tag == "*" else ""
        raise MessageIllegal(problem, topic, "tags")


def check_text(text: object, field: str, topic: str = "", what: str = "") -> None:
    """Raise MessageIllegal for what is no str, or cannot stand in a message's properties. `what`: the field
    as a sentence calls it."""
    what = what or field
    if not isinstance(text, str):
        raise MessageIllegal(f"{what} is a str, not {shown(text)}", topic, field)
    if text.isascii() and text.isprintable():
        return
    if "\x01" in text or "\x02" in text:
        raise MessageIllegal(f"{what} holds a separator (0x01 or 0x02): {shown(text)}", topic, field)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MessageIllegal(f"{what} is no text that UTF-8 has: {error.reason}", topic, field) from None


def _as_bytes(body: object, topic: str) -> bytes:
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)  # what is on its way must not change any more
    hint = ": encode() it" if isinstance(body, str) else ""
    raise MessageIllegal(f"the body is bytes, not {type(body).__name__}{hint}", topic, "body")


def _plain_words(keys: tuple[str, ...]) -> bool:
    """Whether these are good keys, as nearly all are, at the price of one look at all of them together."""
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
                f"the key {shown(key)} is not one word: blanks divide keys on the wire", topic, "keys"
            )
    return tuple(keys)


def _check_properties(properties: object, topic: str) -> None:
    if not isinstance(properties, dict):
        raise MessageIllegal(f"properties are a dict, not {shown(properties)}", topic, "properties")
    for name, value in properties.items():
        check_text(name, "properties", topic, "the name of a property")
        check_text(value, name, topic, f"property {shown(name)}")


class MessageQueue(msgspec.Struct, frozen=True, order=True, gc=False, cache_hash=True, rename="camel"):
    """One queue of a topic on a broker (its name). Ordered as allocation among consumers needs it."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker_name}:{self.queue_id}"


class MessageExt(msgspec.Struct, gc=False):
    """A message as a broker stored it.

    properties: all of them, reserved ones included; queue_offset: its number in its queue; physical_offset:
    its byte position in the broker's commit log; sys_flag: bits of codes.SysFlag; hosts are "ip:port"; body:
    decompressed if the client pulled it, as stored if a codec read it; body_crc: CRC-32 of the stored body
    with the top bit cleared.
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

    @property
    def msg_id(self) -> str:
        """The id that users see: the producer's unique key, or the offset id where there is none."""
        return self.properties.get(names.UNIQ_KEY) or self.offset_msg_id

    @property
    def offset_msg_id(self) -> str:
        """The broker's id: where the message is stored."""
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
    def wait_store(self) -> bool:
        """Whether the sender waited until the message was as safe as the broker makes it.

        True also where the broker has not stored that: 4.9 does so for batches only.
        """
        return self.properties.get(names.WAIT, "true").lower() != "false"

    @property
    def user_properties(self) -> dict[str, str]:
        """The properties that are not RocketMQ's own."""
        return {name: value for name, value in self.properties.items() if not is_reserved(name)}

    @property
    def queue(self) -> MessageQueue:
        return MessageQueue(self.topic, self.broker_name, self.queue_id)


class SendStatus(Enum):
    """How safe a stored message is. All four mean that it was stored."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """A broker's answer to a send. A batch has its ids joined by commas and its first offset.

    recall_handle: of a message that waits for its time, for Producer.recall."""

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
    """A message that waits, as its broker keeps it: `message.topic` is the broker's topic for that.

    deliver_at_ms: when it will come, in ms since 1970. recall_handle: for Producer.recall; None for a message
    without a unique key, and at a delay level. delay_level: 0 for one with a time of its own.
    """

    message: MessageExt
    topic: str
    deliver_at_ms: int
    recall_handle: str | None
    delay_level: int = 0


class TransactionState(Enum):
    """How a local transaction stands. Of one that is UNKNOWN the broker asks again later."""

    COMMIT = "COMMIT_MESSAGE"
    ROLLBACK = "ROLLBACK_MESSAGE"
    UNKNOWN = "UNKNOW"


class TransactionSendResult(SendResult, frozen=True, kw_only=True, gc=True):
    """Where the half message is, and how its local transaction stands.

    transaction_id: the unique key of the message; error: what the local transaction raised, which leaves it
    UNKNOWN.
    """

    state: TransactionState
    error: BaseException | None = None


class PullStatus(Enum):
    """What a pull found."""

    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    NO_MATCHED_MSG = "NO_MATCHED_MSG"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


class PullResult(msgspec.Struct, frozen=True):
    """The answer to a pull. Whatever the status, the next pull begins at next_begin_offset.

    damaged: queue offsets of messages left out of `messages` because their bodies do not match their CRCs;
    oversized: of messages whose compressed bodies are as stored, because they would be too large.
    """

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    messages: list[MessageExt] = []
    suggest_which_broker_id: int = 0
    damaged: list[int] = []
    oversized: list[int] = []
