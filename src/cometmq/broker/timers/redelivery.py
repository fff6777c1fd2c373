"""Storing a message that has waited in the queue of its destination."""

from __future__ import annotations

from dataclasses import dataclass

from cometmq.broker.send.send import Place, destination, move
from cometmq.broker.tables.topics import TopicTable
from cometmq.errors import CommandError
from cometmq.message import MessageExt
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.record.one import body_crc
from cometmq.store import MessageStore, StoreRefused, TickMessage


class Undeliverable(CommandError):
    """The message will never be delivered; the remark contains the reason."""

    def __init__(self, why: str) -> None:
        super().__init__(ResponseCode.SYSTEM_ERROR, why)


@dataclass(eq=False, kw_only=True)
class Redelivery:
    """Stores messages in the destinations of REAL_TOPIC and REAL_QID."""

    store: MessageStore
    topics: TopicTable

    def append(self, message: MessageExt, properties: bytes, *, link: int) -> None:
        """Store the real message.

        Args:
            message: The message that waited.
            properties: The properties of the stored message.
            link: The value of the field for the prepared transaction.

        Raises:
            CommandError: The message can never be stored.
            StoreError: The message cannot be stored now.
        """
        check_body(message)
        append_again(self.store, message, Place(*destination(self.topics, properties), properties), link)


def check_body(message: MessageExt) -> None:
    """Raise Undeliverable for a damaged body, which would get a valid CRC if it were stored again."""
    if message.body and body_crc(message.body) != message.body_crc:
        raise Undeliverable(f"the message is damaged at log position {message.physical_offset}")


def append_again(
    store: MessageStore,
    message: MessageExt,
    place: Place,
    link: int,
    tags_code: int | None = None,
    *,
    makes_room: bool = False,
) -> TickMessage:
    """Store a message in another queue. Raises the errors of `Redelivery.append`.

    `makes_room` is explained at Appender.append.
    """
    try:
        return move(
            store.appender, message, place, message.reconsume_times, link, tags_code, makes_room=makes_room
        )
    except StoreRefused as refusal:
        if refusal.response_code == ResponseCode.MESSAGE_ILLEGAL:
            raise Undeliverable(refusal.remark) from None
        raise
