"""What a user sends and receives: messages, queues and the results of sending and pulling."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

from cometmq.protocol import properties as names
from cometmq.protocol.ids import offset_id_of
from cometmq.protocol.properties import is_reserved

__all__ = [
    "Message",
    "MessageExt",
    "MessageQueue",
    "PullResult",
    "PullStatus",
    "SendResult",
    "SendStatus",
]


class Message(msgspec.Struct, kw_only=False):
    """A message to be sent.

    tags: one tag (the broker filters by it); keys: words by which the message can be found again;
    delay_level: 1 to 18 (1 s to 2 h) for a later delivery, 0 for none; properties: the user's own, without
    RocketMQ's reserved names; wait_store: whether the broker answers only when the message is as safe as it
    is configured to make it.
    """

    topic: str
    body: bytes
    tags: str | None = None
    keys: tuple[str, ...] = ()
    flag: int = 0
    delay_level: int = 0
    properties: dict[str, str] = {}
    wait_store: bool = True

    def wire_properties(self) -> dict[str, str]:
        """All properties as they go to the broker, the reserved ones for tags, keys, delay and wait included.

        A reserved name that stands in `properties` (a message sent again) keeps its value unless a field says
        otherwise.
        """
        found = dict(self.properties)
        if self.keys:
            found[names.KEYS] = " ".join(self.keys)
        if self.tags is not None:
            found[names.TAGS] = self.tags
        if self.delay_level > 0:
            found[names.DELAY] = str(self.delay_level)
        found[names.WAIT] = "true" if self.wait_store else "false"
        return found


class MessageQueue(msgspec.Struct, frozen=True, order=True, gc=False, cache_hash=True, rename="camel"):
    """One queue of a topic on one broker (by name, not by address). Ordered as the consumers' allocation
    orders them."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker_name}:{self.queue_id}"


class MessageExt(msgspec.Struct):
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


class SendResult(msgspec.Struct, frozen=True):
    """What a broker said about a message it took. For a batch the ids are joined by commas, the offset is the
    first."""

    status: SendStatus
    msg_id: str
    offset_msg_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    region_id: str | None = None
    trace_on: bool = True


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


def keys_of(words: str | Iterable[str]) -> tuple[str, ...]:
    """Keys from one blank-separated text or from several words."""
    return tuple(words.split()) if isinstance(words, str) else tuple(words)
