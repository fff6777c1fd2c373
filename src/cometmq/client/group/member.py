"""The common code of push and pull consumers as members of a group.

It creates heartbeats, compares subscriptions with those of other members, and reports to administrators.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from cometmq.client.group.agreement import Agreement
from cometmq.client.group.group import Group
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import ConsumerData, ConsumerRunningInfo, ProcessQueueInfo
from cometmq.protocol.codes import VERSION_4_9_7, version_name


class Member:
    """The methods of a `ConsumerPeer` that push and pull consumers share."""

    consume_type: str

    def __init__(self, group: Group) -> None:
        self.group = group
        self.agreement = Agreement(group)
        self._started_at_ms = int(time.time() * 1000)

    async def join(self) -> None:
        """Compare the subscriptions with those of the other members, then send heartbeats."""
        await self.agreement.compare()
        await self.group.instance.send_heartbeats()

    def topics(self) -> Collection[str]:
        return self.group.subscriptions.keys()

    def heartbeat(self) -> ConsumerData:
        group = self.group
        return ConsumerData(
            group_name=group.name,
            consume_type=self.consume_type,
            message_model=group.options.message_model.value,
            consume_from_where=group.options.consume_from_where.value,
            subscription_data_set=[each.data() for each in group.subscriptions.values()],
            unit_mode=False,
        )

    async def compare_subscriptions(self) -> None:
        await self.agreement.compare()

    def lite_unsubscribed(self, lite_topic: str) -> None:
        """Do nothing: only consumers of lite topics subscribe to them."""

    def offsets(self, topic: str) -> dict[MessageQueue, int]:
        known = self.group.offsets.snapshot()
        return {queue: offset for queue, offset in known.items() if queue.topic == topic}

    def info_of(
        self, queues: dict[MessageQueue, ProcessQueueInfo], more: Mapping[str, str] | None = None
    ) -> ConsumerRunningInfo:
        """Return the information about this member for administrators. `more` contains further properties."""
        group, options = self.group, self.group.options
        properties = {
            "PROP_NAMESERVER_ADDR": ";".join(group.instance.namesrv.addrs),
            "PROP_CONSUME_TYPE": self.consume_type,
            "PROP_CLIENT_VERSION": version_name(VERSION_4_9_7),
            "PROP_CONSUMER_START_TIMESTAMP": str(self._started_at_ms),
            "consumerGroup": group.name,
            "messageModel": options.message_model.value,
            "consumeFromWhere": options.consume_from_where.value,
            "pullBatchSize": str(options.pull_batch_size),
            **(more or {}),
        }
        return ConsumerRunningInfo(
            properties=properties,
            subscription_set=[each.data() for each in group.subscriptions.values()],
            mq_table=queues,
            status_table=dict(group.stats.table()),
        )
