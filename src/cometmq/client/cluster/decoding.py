"""The decoding of records in answers to pulls and queries.

Every body is checked against the CRC of its record. A damaged message is never returned: depending on the
request, it is omitted or an exception is raised. A compressed body may be a thousand times smaller than its
content, so the decompressed size of each body and of each answer is limited.

Budget: 1.2 µs for a message of 100 bytes, 1.4 µs for one of 1 KiB, with uncompressed bodies. Therefore no
code on the way of a message to its listener reads `properties`: the first access parses them (MessageExt).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from cometmq import logs
from cometmq.errors import BodyError, BodyTooLarge, RecordError
from cometmq.message import MessageExt
from cometmq.protocol.codes import SysFlag
from cometmq.protocol.compression import decompress
from cometmq.protocol.record.one import body_crc, iter_records

log = logs.logger("cometmq.client")

_COMPRESSED = int(SysFlag.COMPRESSED)

MAX_BODY = 32 << 20
"""Maximum size of one decompressed body in bytes: eight times the default maximum of producers."""
PLAIN_BUDGET = 64 << 20
"""Maximum size of all decompressed bodies of one answer in bytes: four times the maximum frame length."""

Buffer: TypeAlias = bytes | bytearray | memoryview


class Decoded(msgspec.Struct):
    """The decoded messages, and the queue offsets of messages that were omitted or stay compressed."""

    messages: list[MessageExt]
    damaged: list[int]
    """Queue offsets of messages that were omitted because their bodies do not match their CRCs."""
    oversized: list[int]
    """Queue offsets of messages whose bodies stay compressed, because they are too large to decompress."""
    left_at: int | None
    """Queue offset of the first message that was omitted because the limit of the answer was reached."""


def decode_pulled(body: Buffer, broker_name: str, max_body: int = MAX_BODY) -> Decoded:
    """Return the messages in the answer to a pull, with decompressed bodies.

    Damaged messages are omitted and logged as errors: a repeated pull would return the same bytes, so an
    exception would block the queue for ever. The decompressed bodies of one answer have at most PLAIN_BUDGET
    bytes together; the next pull returns the remaining messages.
    """
    damaged: list[int] = []
    messages = _records(body, broker_name, damaged)
    oversized, fitting = _inflate(messages, max_body)
    left_at = messages[fitting].queue_offset if fitting < len(messages) else None
    return Decoded(
        messages[:fitting], damaged, [messages[index].queue_offset for index in oversized], left_at
    )


def decode_messages(body: Buffer, broker_name: str, damaged: list[int] | None = None) -> list[MessageExt]:
    """Return the messages of an answer to a query. Bodies that would be too large stay compressed.

    `damaged` receives the queue offsets of damaged messages, which are omitted. None: RecordError is raised.
    """
    messages = _records(body, broker_name, damaged)
    fitting = _inflate(messages, MAX_BODY)[1]
    if fitting < len(messages):
        log.warning(
            "bodies from message %s on stay compressed, because an answer is decompressed only up to %d MiB",
            messages[fitting].msg_id, PLAIN_BUDGET >> 20,
        )  # fmt: skip
    return messages


def decode_one(body: Buffer, broker_name: str, *, refuse_large: bool = False) -> MessageExt:
    """Return the only message of an answer. Raises RecordError if there is none, or its body is damaged.

    With `refuse_large`, BodyTooLarge is raised for a body that would be too large when decompressed.
    """
    messages = _records(body, broker_name, None)
    if not messages:
        raise RecordError(0, "size", "there is no record")
    oversized, _ = _inflate(messages[:1], MAX_BODY)
    if oversized and refuse_large:
        raise BodyTooLarge(f"body of message {messages[0].msg_id}", MAX_BODY)
    return messages[0]


def _records(body: Buffer, broker_name: str, damaged: list[int] | None) -> list[MessageExt]:
    """Decode records. Raises RecordError for invalid ones and, if `damaged` is None, for damaged messages."""
    try:
        return list(iter_records(body, broker_name=broker_name, check_crc=True))
    except RecordError as error:
        if damaged is None or error.field != "body CRC":
            raise
        return _sound(body, broker_name, damaged)


def _sound(body: Buffer, broker_name: str, damaged: list[int]) -> list[MessageExt]:
    """Return the messages whose bodies match their CRCs."""
    sound = []
    for message in iter_records(body, broker_name=broker_name):
        found = body_crc(message.body)
        if found == message.body_crc:
            sound.append(message)
            continue
        damaged.append(message.queue_offset)
        log.error(
            "message %s of %s/%d at offset %d on %s (log position %d) is damaged and skipped: its "
            "body has CRC %08x instead of %08x",
            message.msg_id, message.topic, message.queue_id, message.queue_offset, broker_name,
            message.physical_offset, found, message.body_crc & 0xFFFFFFFF,
        )  # fmt: skip
    return sound


def _inflate(messages: Sequence[MessageExt], max_body: int) -> tuple[list[int], int]:
    """Decompress the bodies in place, until the limit of one answer is reached.

    Return the indexes of the bodies that are too large, and the number of messages before the limit. A body
    that cannot be decompressed counts as one of the maximum size, because the attempt may have produced as
    many bytes.
    """
    oversized: list[int] = []
    left = max(PLAIN_BUDGET, max_body)
    for index, message in enumerate(messages):
        if not message.sys_flag & _COMPRESSED:
            continue
        try:
            message.body = decompress(message.sys_flag, message.body, min(left, max_body))
        except BodyTooLarge as error:
            if left < max_body:
                # Leave this message to the next answer, in which its body may fit within the limit.
                return oversized, index
            log.warning("could not decompress the body of message %s: %s", message.msg_id, error)
            oversized.append(index)
            left -= max_body
        except BodyError as error:
            if "not installed" in error.problem:
                raise
            # The producer stored a body that cannot be decompressed. An exception would block the queue, so
            # the body is passed on with its compression bit set.
            log.warning("the body of message %s is passed on as stored: %s", message.msg_id, error)
            left -= max_body
        else:
            message.sys_flag &= ~_COMPRESSED
            left -= len(message.body)
        left = max(left, 0)
    return oversized, len(messages)
