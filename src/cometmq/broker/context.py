"""What the request processors of a broker share. Built whole by `server.Broker`, before the first request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.delay_levels import DelayLevels
from cometmq.broker.base.notices import notify_consumer_ids_changed
from cometmq.broker.base.replies import SendReplies
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.writer import Writer
from cometmq.broker.groups.clients import ConsumerTable, ProducerTable
from cometmq.broker.groups.locks import QueueLocks
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.broker.tables.topics import TopicTable
from cometmq.message import MessageQueue
from cometmq.remoting import Tick
from cometmq.store import Clock, MessageStore


class BrokerContext(msgspec.Struct, kw_only=True, eq=False, dict=True):
    """The tables and services of one broker."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tick: Tick
    topics: TopicTable
    groups: SubscriptionGroups
    offsets: ConsumerOffsets
    producers: ProducerTable
    consumers: ConsumerTable
    locks: QueueLocks
    delays: DelayLevels
    stats: Stats
    replies: SendReplies
    writer: Writer
    # "ip:port" that clients and name servers use; known once the broker listens.
    addr: str = ""
    # Done when every name server has answered a registration that began after the call.
    registered: Callable[[], Awaitable[None]]

    def mono_ms(self) -> int:
        """Time in ms that goes on steadily, whatever is done to the wall clock: for all that expires."""
        return int(self.clock.monotonic() * 1000)

    def queue(self, topic: str, queue_id: int) -> MessageQueue:
        """A queue of this broker."""
        return MessageQueue(topic, self.config.broker_name, queue_id)

    def notify_group(self, group: str) -> None:
        """Tell every member of a consumer group that its membership changed (code 40)."""
        if not self.config.notify_consumer_ids_changed_enable:
            return
        settings = self.groups.table.get(group)
        if settings is not None and not settings.notify_consumer_ids_changed_enable:
            return
        for channel in self.consumers.channels(group):
            notify_consumer_ids_changed(channel, group)
