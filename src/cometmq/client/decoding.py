"""From a body of records, as brokers answer pulls and queries, to messages.

Every body is checked against the CRC that its record carries. A message whose body has changed since it was
stored is never given out; what happens instead depends on who asks, see `decode_messages`.
"""

from __future__ import annotations

from cometmq import logs
from cometmq.errors import BodyError, RecordError
from cometmq.message import MessageExt
from cometmq.protocol.codes import SysFlag
from cometmq.protocol.compression import decompress
from cometmq.protocol.record import body_crc, decode_record, iter_records, record_starts

__all__ = ["decode_messages"]

log = logs.logger("cometmq.client")

_COMPRESSED = int(SysFlag.COMPRESSED)


def decode_messages(
    body: bytes | bytearray | memoryview, broker_name: str, damaged: list[int] | None = None
) -> list[MessageExt]:
    """The messages of a body of records, decompressed.

    damaged: takes the queue offsets of messages whose body does not match its CRC. They are left out, with
    an error in the log that names them: asking again gives the same bytes, so raising would hold up their
    queue for ever. Without it (somebody asked for just this message) RecordError is raised.
    """
    try:
        messages = list(iter_records(body, broker_name=broker_name, check_crc=True))
    except RecordError as error:
        if damaged is None or error.field != "body CRC":
            raise
        messages = _sound(body, broker_name, damaged)
    for message in messages:
        if message.sys_flag & _COMPRESSED:
            _decompress(message)
    return messages


def _sound(body: bytes | bytearray | memoryview, broker_name: str, damaged: list[int]) -> list[MessageExt]:
    """The messages whose body is as it was stored."""
    sound = []
    for position, _ in record_starts(body):
        message = decode_record(body, position, broker_name=broker_name)
        found = body_crc(message.body) if message.body else 0
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


def _decompress(message: MessageExt) -> None:
    try:
        message.body = decompress(message.sys_flag, message.body)
        message.sys_flag &= ~_COMPRESSED
    except BodyError as error:
        if "not installed" in error.problem:
            raise
        # A mistake of the producer; refusing it would hold up the queue for ever. The bit stays set.
        log.warning("body of message %s is given out as it was stored: %s", message.msg_id, error)
