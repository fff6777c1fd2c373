"""A message that has waited is stored again, where it was meant to go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cometmq.broker.send.send import Place, move, topic_of_send
from cometmq.broker.tables.topics import TopicTable
from cometmq.errors import CommandError
from cometmq.message import MessageExt
from cometmq.protocol.codes import TBW102, VERSION_4_9_7, ResponseCode
from cometmq.protocol.properties.values import REAL_QID, REAL_TOPIC
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
        append_again(self.store, message, Place(*self._destination(message.properties), properties), link)

    def _destination(self, properties: Mapping[str, str]) -> tuple[str, int]:
        """Topic and queue id, checked as those of a send are; the topic is created if a send could do that. A
        queue that the topic has lost meanwhile is replaced."""
        topic, queue_text = properties.get(REAL_TOPIC), properties.get(REAL_QID)
        if not topic or not queue_text or not queue_text.isdecimal() or len(queue_text) > 10:
            raise Undeliverable(f"it has no destination: topic {topic}, queue {queue_text}")
        queue_id = int(queue_text)
        known = topic_of_send(self.topics, topic, VERSION_4_9_7, TBW102, max(queue_id + 1, 4), False)
        queues = max(known.read_queue_nums, known.write_queue_nums)
        if queue_id < queues:
            return topic, queue_id
        if not known.write_queue_nums:
            raise Undeliverable(f"topic {topic} has no queue {queue_id}, and none to write to")
        return topic, queue_id % known.write_queue_nums


def check_body(message: MessageExt) -> None:
    """Raise Undeliverable if the body is damaged: stored again it would get a CRC that vouches for that."""
    if message.body and body_crc(message.body) != message.body_crc:
        raise Undeliverable(f"it is damaged at log position {message.physical_offset}")


def append_again(
    store: MessageStore, message: MessageExt, place: Place, link: int, tags_code: int | None = None
) -> TickMessage:
    """Store a message in another place. Raises as `Redelivery.append` does."""
    try:
        return move(store.appender, message, place, message.reconsume_times, link, tags_code)
    except StoreRefused as refusal:
        if refusal.response_code == ResponseCode.MESSAGE_ILLEGAL:
            raise Undeliverable(refusal.remark) from None
        raise
