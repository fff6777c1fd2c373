"""From a body of records, as brokers answer pulls and queries, to messages.

Every body is checked against the CRC that its record carries. A message whose body has changed since it was
stored is never given out; what happens instead depends on who asks. Compressed bodies may be a thousand times
larger than what came over the network: each has a limit, and all bodies of one answer have another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cometmq import logs
from cometmq.errors import BodyError, BodyTooLarge, RecordError
from cometmq.message import MessageExt
from cometmq.protocol.codes import SysFlag
from cometmq.protocol.compression import decompress
from cometmq.protocol.record.one import body_crc, iter_records

__all__ = ["MAX_BODY", "Decoded", "decode_messages", "decode_one", "decode_pulled"]

log = logs.logger("cometmq.client")

_COMPRESSED = int(SysFlag.COMPRESSED)

MAX_BODY = 32 << 20
"""Bytes of one decompressed body: eight times what producers send unless told otherwise."""
PLAIN_BUDGET = 64 << 20
"""Decompressed bytes of one answer together; four frames of the greatest length."""

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(slots=True)
class Decoded:
    """What a body of records holds. Offsets are queue offsets."""

    messages: list[MessageExt]
    damaged: list[int]
    """Of messages left out, because their bodies do not match their CRCs."""
    oversized: list[int]
    """Of messages whose bodies are as stored, because they are too large when decompressed."""
    left_at: int | None
    """Of the first message left out because there was no room for its body any more."""


def decode_pulled(body: Buffer, broker_name: str, max_body: int = MAX_BODY) -> Decoded:
    """The messages of a pull's answer, decompressed.

    Damaged ones are left out, with an error in the log that names them: asking again gives the same bytes, so
    raising would hold up their queue for ever. Bodies of all messages together are at most PLAIN_BUDGET bytes
    when decompressed; what comes after that is left for the next pull.
    """
    damaged: list[int] = []
    messages = _records(body, broker_name, damaged)
    oversized, fitting = _inflate(messages, max_body)
    left_at = messages[fitting].queue_offset if fitting < len(messages) else None
    return Decoded(
        messages[:fitting], damaged, [messages[index].queue_offset for index in oversized], left_at
    )


def decode_messages(body: Buffer, broker_name: str, damaged: list[int] | None = None) -> list[MessageExt]:
    """The messages of an answer to a query. Bodies too large to be decompressed are as they were stored.

    damaged: takes the queue offsets of messages that are left out, as in Decoded; without it (somebody asked
    for just this message) RecordError is raised.
    """
    messages = _records(body, broker_name, damaged)
    fitting = _inflate(messages, MAX_BODY)[1]
    if fitting < len(messages):
        log.warning(
            "bodies from message %s on are given out as they were stored: those before have %d MiB",
            messages[fitting].msg_id, PLAIN_BUDGET >> 20,
        )  # fmt: skip
    return messages


def decode_one(body: Buffer, broker_name: str, *, refuse_large: bool = False) -> MessageExt:
    """The one message of a body. Raises RecordError if there is none, or its body is damaged.

    refuse_large: raise BodyTooLarge for what would be given out as stored because of its size.
    """
    messages = _records(body, broker_name, None)
    if not messages:
        raise RecordError(0, "size", "there is no record")
    oversized, _ = _inflate(messages[:1], MAX_BODY)
    if oversized and refuse_large:
        raise BodyTooLarge(f"body of message {messages[0].msg_id}", MAX_BODY)
    return messages[0]


def _records(body: Buffer, broker_name: str, damaged: list[int] | None) -> list[MessageExt]:
    """The messages as stored. Raises RecordError for what is no record, and for damage if nobody takes it."""
    try:
        return list(iter_records(body, broker_name=broker_name, check_crc=True))
    except RecordError as error:
        if damaged is None or error.field != "body CRC":
            raise
        return _sound(body, broker_name, damaged)


def _sound(body: Buffer, broker_name: str, damaged: list[int]) -> list[MessageExt]:
    """The messages whose body is as it was stored."""
    sound = []
    for message in iter_records(body, broker_name=broker_name):
        found = body_crc(message.body)
        if found == message.body_crc:
            sound.append(message)
            continue
        damaged.append(message.queue_offset)
        log.error(
            "message %s of %s/%d at offset %d on %s (log position %d) is damaged and not given out: its body "
            "has CRC %08x instead of %08x",
            message.msg_id, message.topic, message.queue_id, message.queue_offset, broker_name,
            message.physical_offset, found, message.body_crc & 0xFFFFFFFF,
        )  # fmt: skip
    return sound


def _inflate(messages: Sequence[MessageExt], max_body: int) -> tuple[list[int], int]:
    """Decompress the bodies in place; (indexes of those larger than max_body, how many messages were done).

    A body that cannot be read is charged as if it were of full size: finding out may have cost as much.
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
                return oversized, index  # it may fit when it comes first
            log.warning("body of message %s is not decompressed: %s", message.msg_id, error)
            oversized.append(index)
            left -= max_body
        except BodyError as error:
            if "not installed" in error.problem:
                raise
            # A mistake of the producer; refusing it would hold up the queue for ever. The bit stays set.
            log.warning("body of message %s is given out as it was stored: %s", message.msg_id, error)
            left -= max_body
        else:
            message.sys_flag &= ~_COMPRESSED
            left -= len(message.body)
        left = max(left, 0)
    return oversized, len(messages)
