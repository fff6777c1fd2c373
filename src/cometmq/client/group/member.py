"""The common code of consumers as members of a group: heartbeats, equal subscriptions, reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping

from cometmq import logs
from cometmq.client.group.group import Group
from cometmq.errors import CometError, CommandError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.bodies import (
    ConsumeMessageDirectlyResult,
    ConsumerConnection,
    ConsumerData,
    ConsumerRunningInfo,
    ProcessQueueInfo,
)
from cometmq.protocol.bodies.subscriptions import Wants, describe_differences, differences, wants_of
from cometmq.protocol.codes import VERSION_4_9_7, ResponseCode, version_name

log = logs.logger("cometmq.client.consumer")

_PATIENCE_S = 3.0
_MAX_TOPICS_NAMED = 10
"""Maximum number of topics that a warning names one by one, because members may subscribe to thousands."""
_ANOTHER = "another member"


def _distinguishes_members(found: ConsumerConnection) -> bool:
    """Return whether the broker reports each member's subscriptions. Apache's does not."""
    return any(each.subscriptions is not None for each in found.connection_set)


def disagreements(client_id: str, own: Wants, found: ConsumerConnection) -> list[str]:
    """Return the differences between the subscriptions of a member and of the others, each as a sentence."""
    members = {
        each.client_id: frozenset((each.subscriptions or {}).items())
        for each in found.connection_set
        if each.subscriptions is not None
    }
    if not _distinguishes_members(found) and {each.client_id for each in found.connection_set} - {client_id}:
        members[_ANOTHER] = wants_of(found.subscription_table.values())
    members[client_id] = own
    return [
        f"members subscribe {topic} differently, and messages may be lost: {describe_differences(said)}"
        for topic, said in differences(members).items()
    ]


class Member:
    """The methods of a `ConsumerPeer` that push and pull consumers share."""

    consume_type: str
    kind = ""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.subscription_problems: tuple[str, ...] = ()
        """A sentence about each topic to which the members of the group subscribe differently."""
        self._compared: tuple[Wants, set[str]] = frozenset(), set()
        """This member's subscriptions and the other members at the last update of `subscription_problems`."""
        self._started_at_ms = int(time.time() * 1000)

    async def join(self) -> None:
        """Compare the subscriptions with those of the other members, then send heartbeats."""
        await self.compare_subscriptions()
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
        """Compare this member's subscriptions with those of the other members, and log new differences.

        A broker stores a single subscription per group and topic. A member whose subscription differs from it
        misses messages without an error (docs/reference/storage.md, Subscriptions of a group). A broker may
        store only the subscriptions of the group's latest heartbeat. The comparison therefore takes place
        before each heartbeat of this member: after it, the broker would return this member's own ones.
        """
        group = self.group
        instance = group.instance
        own = wants_of([each.data() for each in group.subscriptions.values()])
        addr = next((a for topic in group.subscriptions for a in instance.routes.readers_of(topic)), None)
        if addr is None:
            return
        try:
            async with asyncio.timeout(_PATIENCE_S):
                found = await instance.brokers.consumer_connection(addr, group.name)
        except (CometError, TimeoutError):
            return  # nothing to compare: the broker did not report any members
        differing = disagreements(instance.client_id, own, found)
        problems = tuple(differing[:_MAX_TOPICS_NAMED])
        if len(differing) > _MAX_TOPICS_NAMED:
            problems += (f"members differ in {len(differing)} topics in all",)
        others = {each.client_id for each in found.connection_set} - {instance.client_id}
        wanted, were = self._compared
        if not problems and not _distinguishes_members(found) and wanted == own and were <= others:
            # Keep the earlier problems. The broker stores only the subscriptions of the latest heartbeat,
            # which may be this member's own, so the comparison does not show that the members agree.
            return
        for problem in set(problems).difference(self.subscription_problems):
            log.warning("group %s: %s", group.name, problem)
        self.subscription_problems, self._compared = problems, (own, others)

    async def consume_directly(self, message: MessageExt) -> ConsumeMessageDirectlyResult:
        """Refuse an administrator's request to consume a message: only a push consumer has a listener."""
        raise CommandError(ResponseCode.SYSTEM_ERROR, f"{message.msg_id}: a {self.kind} has no listener")

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
