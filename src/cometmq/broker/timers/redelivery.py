"""Stores messages in their destinations after they have waited in another topic."""

from __future__ import annotations

from cometmq.broker.send.send import Place, destination, move
from cometmq.broker.tables.topics import TopicTable
from cometmq.errors import CommandError
from cometmq.message import MessageExt
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.record.one import body_crc
from cometmq.store import MessageStore, StoreRefused, TickMessage


class Undeliverable(CommandError):
    """A message can never be delivered. The remark contains the reason."""


def redeliver(
    store: MessageStore, topics: TopicTable, message: MessageExt, properties: bytes, link: int
) -> None:
    """Store a message in its destination, which its properties REAL_TOPIC and REAL_QID name.

    Args:
        properties: The properties of the new record.
        link: The new record's prepared-transaction field, which links it to the original record.

    Raises:
        CommandError: The message can never be stored.
        StoreError: The message cannot be stored at present.
    """
    check_body(message)
    append_again(store, message, Place(*destination(topics, properties), properties), link)


def check_body(message: MessageExt) -> None:
    """Raise Undeliverable for a damaged body, because the new CRC of a copy would hide the damage."""
    if message.body and body_crc(message.body) != message.body_crc:
        raise Undeliverable.failed(f"the message is damaged at log position {message.physical_offset}")


def append_again(
    store: MessageStore,
    message: MessageExt,
    place: Place,
    link: int,
    tags_code: int | None = None,
    *,
    makes_room: bool = False,
) -> TickMessage:
    """Store a message once more, in the queue of `place` (see `redeliver`, `move` and `Appender.append`)."""
    try:
        return move(
            store.appender, message, place, message.reconsume_times, link, tags_code, makes_room=makes_room
        )
    except StoreRefused as refusal:
        if refusal.response_code == ResponseCode.MESSAGE_ILLEGAL:
            raise Undeliverable.failed(refusal.remark) from None
        raise
