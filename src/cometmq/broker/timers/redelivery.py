"""A message that has waited is stored again, where it was meant to go."""

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
    """The message will never be delivered: why."""

    def __init__(self, why: str) -> None:
        super().__init__(ResponseCode.SYSTEM_ERROR, why)


@dataclass(eq=False, kw_only=True)
class Redelivery:
    """Stores messages for their destinations in REAL_TOPIC and REAL_QID."""

    store: MessageStore
    topics: TopicTable

    def append(self, message: MessageExt, properties: bytes, *, link: int) -> None:
        """Store the real message with these properties. link: for the field of the prepared transaction.
        Raises CommandError if that will never be possible, StoreError if it is not possible now."""
        check_body(message)
        append_again(self.store, message, Place(*destination(self.topics, properties), properties), link)


def check_body(message: MessageExt) -> None:
    """Raise Undeliverable if the body is damaged: stored again it would get a CRC that vouches for that."""
    if message.body and body_crc(message.body) != message.body_crc:
        raise Undeliverable(f"it is damaged at log position {message.physical_offset}")


def append_again(
    store: MessageStore,
    message: MessageExt,
    place: Place,
    link: int,
    tags_code: int | None = None,
    *,
    makes_room: bool = False,
) -> TickMessage:
    """Store a message in another place. makes_room: see Appender.append. Raises as `Redelivery.append`
    does."""
    try:
        return move(
            store.appender, message, place, message.reconsume_times, link, tags_code, makes_room=makes_room
        )
    except StoreRefused as refusal:
        if refusal.response_code == ResponseCode.MESSAGE_ILLEGAL:
            raise Undeliverable(refusal.remark) from None
        raise
