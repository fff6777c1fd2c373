"""OFFSET_MOVED_EVENT: a master tells, in a topic of that name, whose pulls it sent elsewhere
(docs/reference/storage.md, Pull answers)."""

from __future__ import annotations

from cometmq import logs
from cometmq.broker.context import BrokerContext
from cometmq.errors import StoreError
from cometmq.protocol.bodies import OffsetMovedEvent
from cometmq.protocol.codes import OFFSET_MOVED_EVENT
from cometmq.protocol.ids import pack_host
from cometmq.protocol.properties.text import encode_properties, tags_code

log = logs.logger(__name__)


def store_offset_moved(
    context: BrokerContext, group: str, topic: str, queue_id: int, asked: int, begin: int
) -> None:
    """Append the event that a group asked for offset `asked` of a queue and was sent to `begin`. A store that
    takes no messages goes without."""
    event = OffsetMovedEvent(
        consumer_group=group,
        message_queue=context.queue(topic, queue_id),
        offset_request=asked,
        offset_new=begin,
    )
    try:
        context.store.appender.append(
            OFFSET_MOVED_EVENT,
            0,
            event.encode(),
            encode_properties({"KEYS": group, "TAGS": group}).encode(),
            born_timestamp_ms=context.clock.time_ms(),
            born_host=pack_host(context.addr),
            tags_code=tags_code(group),
        )
    except StoreError as error:
        log.warning("%s of group %s is not stored: %s", OFFSET_MOVED_EVENT, group, error)
        return
    context.writer.appended()
