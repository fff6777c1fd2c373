"""Text formats of POP consumption: receipt handles, offsets and counts of a response, names of retry topics.

A receipt handle names one delivery of a message. The client builds it from a response and sends it with the
acknowledgement. The formats and their words are those of docs/reference/remoting.md, POP family. All texts
come from other machines, so their lengths and numbers are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias, TypeVar

from cometmq.errors import ProtocolError, shown
from cometmq.message import MessageExt
from cometmq.protocol.codes import RETRY_PREFIX
from cometmq.protocol.ext import parse_value
from cometmq.protocol.headers import PopMessageResponseHeader
from cometmq.protocol.properties.values import POP_CK

MAX_HANDLE_LENGTH = 1024
"""The maximum length of a receipt handle. Real ones have at most about 400 characters."""
MAX_RECENT_HANDLES = 1024
"""The maximum number of handles that are kept in memory in parsed form."""
MAX_INFO_LENGTH = 1 << 16
"""The maximum length of an offset or count field. Those of 32 messages have less than 3,000 characters."""
ORDERED_REVIVE_QUEUE = 999
"""The revive queue id in the receipt handles of ordered consumption, for which no checkpoint is stored."""

K = TypeVar("K")
V = TypeVar("V")


class PopFormatError(ProtocolError):
    """A text of POP consumption is invalid. `kind` names the format, such as "receipt handle"."""

    kind: str
    text: str
    problem: str

    def __str__(self) -> str:
        return f"{self.kind} {shown(self.text)}: {self.problem}"


# -- names of topics


class TopicKind(IntEnum):
    """The kind of topic in which a message was found: the topic itself or one of the two retry topics."""

    NORMAL = 0
    RETRY_V1 = 1
    RETRY_V2 = 2

    @classmethod
    def of(cls, topic: str) -> TopicKind:
        """Return the kind of a topic by its name."""
        if not topic.startswith(RETRY_PREFIX):
            return cls.NORMAL
        return cls.RETRY_V2 if "+" in topic else cls.RETRY_V1

    def topic(self, topic: str, group: str) -> str:
        """Return the topic of this kind: `%RETRY%<group>_<topic>` is V1, `%RETRY%<group>+<topic>` is V2."""
        if self is TopicKind.NORMAL:
            return topic
        return f"{RETRY_PREFIX}{group}{'_' if self is TopicKind.RETRY_V1 else '+'}{topic}"


_KINDS = tuple(TopicKind)
_USUAL_HANDLE = re.compile(
    "([0-9]{1,18}) ([0-9]{1,18}) ([0-9]{1,18}) ([0-9]{1,9}) ([012]) ([^ ]+) ([0-9]{1,9}) ([0-9]{1,18})"
).fullmatch
"""Handles with eight valid words. All others are parsed word by word, which finds the invalid part."""


def subscribed_topic(topic: str, group: str) -> str:
    """Return the topic to which a group has subscribed, for the topic in which a message was found."""
    for kind in (TopicKind.RETRY_V1, TopicKind.RETRY_V2):
        topic = topic.removeprefix(kind.topic("", group))
    return topic


# -- the receipt handle


class ReceiptHandle(NamedTuple):
    """The handle of one delivery of a message (property POP_CK, ext field `extraInfo`).

    Attributes:
        start_offset: The first offset of the checkpoint that covers the message.
        pop_time_ms: When the broker delivered the message, in epoch ms.
        invisible_ms: How long the lease lasts from then, in ms.
        revive_queue_id: The queue of the revive topic, or ORDERED_REVIVE_QUEUE.
        kind: Whether the message was found in the topic itself or in a retry topic.
        broker_name: The name of the broker.
        queue_id: The queue in which the message was found.
        offset: The queue offset of the message, or None in the handle of a whole queue.
        commit_log_offset: The message's position in the commit log. Only proxies append it.
    """

    start_offset: int
    pop_time_ms: int
    invisible_ms: int
    revive_queue_id: int
    kind: TopicKind
    broker_name: str
    queue_id: int
    offset: int | None = None
    commit_log_offset: int | None = None

    def encode(self) -> str:
        """Return the handle as text."""
        start, popped, invisible, revive, kind, broker_name, queue_id, offset, position = self
        text = f"{start} {popped} {invisible} {revive} {kind:d} {broker_name} {queue_id}"
        if offset is not None:
            text += f" {offset}"
        return text if position is None else f"{text} {position}"

    @classmethod
    def decode(cls, text: str) -> ReceiptHandle:
        """Parse a receipt handle. Raises PopFormatError, which names the invalid part."""
        handle = _recent_handles.get(text)
        if handle is None:
            handle = _parsed_handle(text)
            handle.remember(text)
        return handle

    def remember(self, text: str) -> None:
        """Let `decode` return this handle for its text. A client soon acknowledges what it has received."""
        if len(_recent_handles) >= MAX_RECENT_HANDLES:
            _recent_handles.clear()
        _recent_handles[text] = self


_recent_handles: dict[str, ReceiptHandle] = {}


def _parsed_handle(text: str) -> ReceiptHandle:
    format_ = "receipt handle"
    if len(text) <= MAX_HANDLE_LENGTH and (usual := _USUAL_HANDLE(text)) is not None:
        start, popped, invisible, revive, kind, broker_name, queue_id, offset = usual.groups()
        return ReceiptHandle(
            int(start), int(popped), int(invisible), int(revive), _KINDS[int(kind)], broker_name,
            int(queue_id), int(offset),
        )  # fmt: skip
    words = _words(format_, text, MAX_HANDLE_LENGTH, " ")
    if not 7 <= len(words) <= 9:
        raise PopFormatError(format_, text, f"it has {len(words)} words instead of 7 to 9")
    if not words[5]:
        raise PopFormatError(format_, text, "the broker name is empty")
    start, popped, invisible, revive, kind, broker_name, queue_id, *rest = words
    return ReceiptHandle(
        _number(format_, text, "start offset", start),
        _number(format_, text, "pop time", popped),
        _number(format_, text, "invisible time", invisible),
        _number(format_, text, "revive queue id", revive, "i32"),
        _kind(format_, text, kind),
        broker_name,
        _number(format_, text, "queue id", queue_id, "i32"),
        *(_number(format_, text, "offset", each) for each in rest),
    )


# -- fields of a response

QueueKey: TypeAlias = tuple[TopicKind, int]
"""The kind of topic and the queue id: the key of the entries in a response's offset fields."""
CountKey: TypeAlias = tuple[TopicKind, int, int | None]
"""The kind of topic, the queue id, and the message's queue offset, or None for the whole queue."""


def encode_start_offsets(offsets: Mapping[QueueKey, int]) -> str:
    """Return the field `startOffsetInfo`: the first offset of each queue's checkpoint."""
    return ";".join([f"{int(kind)} {queue_id} {offset}" for (kind, queue_id), offset in offsets.items()])


def decode_start_offsets(text: str | None) -> dict[QueueKey, int]:
    """Parse the field `startOffsetInfo`. An absent field has no entries. Raises PopFormatError."""
    format_, found = "startOffsetInfo", dict[QueueKey, int]()
    for kind, queue, value in _entries(format_, text):
        key = kind, _number(format_, value, "queue id", queue, "i32")
        _put(format_, found, key, _number(format_, value, "offset", value))
    return found


def encode_message_offsets(offsets: Mapping[QueueKey, Sequence[int]]) -> str:
    """Return the field `msgOffsetInfo`: the offsets of each queue's messages, in the order of the records."""
    return ";".join(
        [f"{int(kind)} {queue_id} {','.join(map(str, each))}" for (kind, queue_id), each in offsets.items()]
    )


def encode_order_counts(counts: Mapping[CountKey, int]) -> str:
    """Return the field `orderCountInfo`: how often messages of ordered consumption were delivered before."""
    return ";".join(
        [
            f"{int(kind)} {queue_id if offset is None else f'qo{queue_id}%{offset}'} {count}"
            for (kind, queue_id, offset), count in counts.items()
        ]
    )


def decode_order_counts(text: str | None) -> dict[CountKey, int]:
    """Parse the field `orderCountInfo`. An absent field has no entries. Raises PopFormatError."""
    format_, found = "orderCountInfo", dict[CountKey, int]()
    for kind, queue, value in _entries(format_, text):
        queue_text, separator, offset_text = queue.removeprefix("qo").partition("%")
        if bool(separator) != queue.startswith("qo"):
            raise PopFormatError(format_, queue, "the entry names neither a queue nor a message")
        queue_id = _number(format_, queue, "queue id", queue_text, "i32")
        offset = _number(format_, queue, "offset", offset_text) if separator else None
        _put(format_, found, (kind, queue_id, offset), _number(format_, value, "count", value, "i32"))
    return found


# -- the receipt handles of a response


def property_of(message: MessageExt, name: str) -> str | None:
    """Return a property of a message, or None. Parses the stored properties only if they may contain it."""
    stored = message._stored  # noqa: SLF001
    if isinstance(stored, tuple):
        added: Mapping[str, str]
        for added in reversed(stored[2:]):
            if name in added:
                return added[name]
        if name.encode() not in stored[1]:
            return None
    return message.properties.get(name)


class Receipts:
    """Finds the receipt handles of the messages in a pop's response.

    The receiver builds the handle of a message from the response's header, the request's topic and the name
    of the broker. Only for a message from a retry topic, whose record the broker rewrites, the broker puts
    the handle into the record. Raises PopFormatError if a field of the header is invalid.
    """

    def __init__(self, header: PopMessageResponseHeader, topic: str, broker_name: str) -> None:
        self._header = header
        self._topic = topic
        self._broker_name = broker_name
        self._starts = decode_start_offsets(header.start_offset_info)
        self._counts = decode_order_counts(header.order_count_info)

    def of(self, message: MessageExt) -> tuple[ReceiptHandle, int]:
        """Return the handle of a message, and how often the message was delivered before."""
        handle = self._rewritten(message) or self._built(message)
        if not self._counts:
            return handle, message.reconsume_times
        of_queue = self._counts.get((handle.kind, handle.queue_id, None), 0)
        deliveries = self._counts.get((handle.kind, handle.queue_id, handle.offset), of_queue)
        return handle, deliveries or message.reconsume_times

    def _rewritten(self, message: MessageExt) -> ReceiptHandle | None:
        """Return the handle that the broker has put into a message from a retry topic.

        Return None for any other value of the property, because a producer can set it, too: by sending on a
        message that it has popped, or to let the consumer acknowledge another message.
        """
        text = property_of(message, POP_CK)
        if text is None:
            return None
        try:
            handle = ReceiptHandle.decode(text)
        except PopFormatError:
            return None
        found = handle.pop_time_ms, handle.broker_name, handle.queue_id, handle.offset
        expected = self._header.pop_time, self._broker_name, message.queue_id, message.queue_offset
        return handle if handle.kind is not TopicKind.NORMAL and found == expected else None

    def _built(self, message: MessageExt) -> ReceiptHandle:
        header = self._header
        kind = TopicKind.NORMAL if message.topic == self._topic else TopicKind.of(message.topic)
        return ReceiptHandle(
            self._starts.get((kind, message.queue_id), message.queue_offset),
            header.pop_time,
            header.invisible_time,
            header.revive_qid,
            kind,
            self._broker_name,
            message.queue_id,
            message.queue_offset,
        )


# -- parts of a text


def _entries(format_: str, text: str | None) -> list[tuple[TopicKind, str, str]]:
    """Return the entries of a response's field, each of three words. Raises PopFormatError."""
    found = []
    for entry in _words(format_, text, MAX_INFO_LENGTH, ";") if text else ():
        words = entry.split(" ")
        if len(words) != 3:
            raise PopFormatError(format_, entry, f"the entry has {len(words)} words instead of 3")
        found.append((_kind(format_, entry, words[0]), words[1], words[2]))
    return found


def _words(format_: str, text: str, longest: int, separator: str) -> list[str]:
    if len(text) > longest:
        raise PopFormatError(format_, text, f"the length {len(text)} exceeds {longest} characters")
    return text.split(separator)


def _kind(format_: str, text: str, word: str) -> TopicKind:
    if word not in ("0", "1", "2"):
        raise PopFormatError(format_, text, f"the kind of topic {word[:20]!r} is not 0, 1 or 2")
    return _KINDS[int(word)]


def _number(format_: str, text: str, field: str, word: str, kind: str = "i64") -> int:
    """Return a word as a number that is not negative. Raises PopFormatError, which names the field."""
    if len(word) < (10 if kind == "i32" else 19) and word.isdecimal():
        return int(word)
    try:
        value = int(parse_value(word, kind))
    except ValueError as error:
        raise PopFormatError(format_, text, f"{field} {word[:40]!r}: {error}") from None
    if value < 0:
        raise PopFormatError(format_, text, f"{field} {value} is negative")
    return value


def _put(format_: str, found: dict[K, V], key: K, value: V) -> None:
    """Add an entry. Raises PopFormatError if its key occurs twice, as Apache's client does."""
    if key in found:
        raise PopFormatError(format_, str(key), "the entry occurs twice")
    found[key] = value
