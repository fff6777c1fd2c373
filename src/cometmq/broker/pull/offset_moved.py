"""Events about corrected offsets, which a master stores in the topic OFFSET_MOVED_EVENT.

If a pull requests an offset outside its queue, the response contains a corrected offset, and the master
stores an event (docs/reference/storage.md, Pull answers).
"""

from __future__ import annotations

import msgspec

from cometmq import logs
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.writer import Writer
from cometmq.broker.tables.topics import TopicTable
from cometmq.errors import StoreError
from cometmq.protocol.bodies import OffsetMovedEvent
from cometmq.protocol.codes import OFFSET_MOVED_EVENT
from cometmq.protocol.properties.values import encode_properties, tags_code
from cometmq.store import Clock, MessageStore

log = logs.logger(__name__)


class OffsetMovedEvents(msgspec.Struct, eq=False):
    """Stores events about corrected offsets in the topic OFFSET_MOVED_EVENT."""

    clock: Clock
    store: MessageStore
    topics: TopicTable
    writer: Writer
    address: BrokerAddress

    def store_event(self, group: str, topic: str, queue_id: int, asked: int, begin: int) -> None:
        """Store an event which reports that the broker has corrected the offset of a group in a queue.

        If the store accepts no messages at present, the event is lost.

        Args:
            asked: The offset from which the group requested messages.
            begin: The offset from which the group must continue, according to the broker's response.
        """
        event = OffsetMovedEvent(
            consumer_group=group,
            message_queue=self.topics.queue(topic, queue_id),
            offset_request=asked,
            offset_new=begin,
        )
        try:
            self.store.appender.append(
                OFFSET_MOVED_EVENT,
                0,
                event.encode(),
                encode_properties({"KEYS": group, "TAGS": group}),
                born_timestamp_ms=self.clock.time_ms(),
                born_host=self.address.packed,
                tags_code=tags_code(group),
            )
        except StoreError as error:
            log.warning("%s event of group %s could not be stored: %s", OFFSET_MOVED_EVENT, group, error)
            return
        self.writer.appended()
