"""Members and settings of groups; producers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from cometmq.admin import groups
from cometmq.admin.known_groups import AtBroker, brokers_of, groups_at
from cometmq.admin.servers import ServerAdmin
from cometmq.admin.values import GroupConfig, GroupQueueProgress, QueueProgress
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.errors import BrokerError, NoRouteError
from cometmq.protocol.bodies import (
    BrokerConsumeStats,
    ClientConnection,
    ConsumerConnection,
    ConsumerRunningInfo,
    ProducerConnection,
    ProducerInfo,
    ProducerTableInfo,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
    SubscriptionGroupTable,
)
from cometmq.protocol.codes import RETRY_PREFIX, RequestCode
from cometmq.protocol.headers import (
    DeleteSubscriptionGroupRequestHeader,
    GetBrokerConsumeStatsRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetProducerConnectionListRequestHeader,
)

CONSUME_STATS_TIMEOUT_S = 50.0  # as Apache's tool waits: every queue of every group is counted


class GroupAdmin(ServerAdmin):
    """What is asked of brokers about groups and their members."""

    async def consumer_connection(self, group: str, broker_addr: str | None = None) -> ConsumerConnection:
        """Return the members of a consumer group and what they subscribe, from this broker or from the first
        that has any.

        Raises:
            BrokerError: CONSUMER_NOT_ONLINE without members, or another refusal.
            UnknownNameError: No broker has the group.
        """
        if broker_addr is not None:
            return await self.client.brokers.consumer_connection(broker_addr, group)
        return await groups.members(self.client, await brokers_of(self.client, group), group)

    async def running_info(
        self, group: str, client_id: str, *, jstack: bool = False, broker_addr: str | None = None
    ) -> ConsumerRunningInfo:
        """What a member says of itself; jstack: with its threads. Raises BrokerError if no broker reaches
        it."""
        if broker_addr is None and not jstack:
            brokers = await brokers_of(self.client, group)
            return await groups.running_info(self.client, brokers, group, client_id)
        header = GetConsumerRunningInfoRequestHeader(
            consumer_group=group, client_id=client_id, jstack_enable=jstack
        )
        addrs = [broker_addr] if broker_addr else []
        if not addrs:
            addrs = [*(await brokers_of(self.client, group)).values()]
        failure: BrokerError | NoRouteError = NoRouteError(RETRY_PREFIX + group)
        for addr in addrs:
            try:
                answer = await self.client.brokers.call(
                    addr, RequestCode.GET_CONSUMER_RUNNING_INFO, header, timeout_s=groups.STATS_TIMEOUT_S
                )
                return ConsumerRunningInfo.decode(answer.body)
            except BrokerError as error:
                failure = error
        raise failure

    async def producer_connection(self, group: str, topic: str) -> list[ClientConnection]:
        """The clients of a producer group at the brokers of a topic; a producer is known where it sends.
        Raises BrokerError if no broker knows the group."""
        header = GetProducerConnectionListRequestHeader(producer_group=group)
        found: dict[str, ClientConnection] = {}
        failure: BrokerError | None = None
        for addr in broker_addrs(await self.client.namesrv.route(topic)).values():
            try:
                answer = await self.client.brokers.call(
                    addr, RequestCode.GET_PRODUCER_CONNECTION_LIST, header
                )
            except BrokerError as error:
                failure = error
                continue
            for each in ProducerConnection.decode(answer.body).connection_set:
                found.setdefault(each.client_id, each)
        if not found and failure is not None:
            raise failure
        return [found[client_id] for client_id in sorted(found)]

    async def producers(self, broker_addr: str) -> dict[str, list[ProducerInfo]]:
        """Every producer group of a broker with its clients."""
        answer = await self.client.brokers.call(broker_addr, RequestCode.GET_ALL_PRODUCER_INFO)
        return dict(sorted(ProducerTableInfo.decode(answer.body).data.items()))

    async def groups_at(self, broker_addr: str) -> AtBroker:
        """Return the groups with settings or stored offsets at a broker; None where there are no settings."""
        return await groups_at(self.client, broker_addr)

    async def group_table(self, broker_addr: str) -> dict[str, SubscriptionGroupConfig]:
        """Every group of a broker with its settings."""
        answer = await self.client.brokers.call(broker_addr, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
        return dict(SubscriptionGroupTable.decode(answer.body).subscription_group_table)

    async def group_configs(self, group: str) -> list[GroupConfig]:
        """The settings of a group at each master that knows it."""
        info = await self.cluster_info()
        found = []
        for cluster, names in sorted(info.cluster_addr_table.items()):
            for name in sorted(names):
                data = info.broker_addr_table.get(name)
                if data is None or not data.broker_addrs:
                    continue
                table = await self.group_table(data.broker_addrs[min(data.broker_addrs)])
                if group in table:
                    found.append(GroupConfig(cluster_name=cluster, broker_name=name, config=table[group]))
        return found

    async def update_group(
        self,
        config: SubscriptionGroupConfig,
        *,
        broker_addr: str | None = None,
        cluster: str | None = None,
    ) -> AsyncIterator[str]:
        """Make a group, or replace its settings, at one broker or all masters of a cluster; yields each
        address."""
        for addr in [broker_addr] if broker_addr else await self.master_addrs(cluster or ""):
            await self.client.brokers.call(
                addr, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=config.encode()
            )
            yield addr

    async def update_groups(
        self,
        configs: Sequence[SubscriptionGroupConfig],
        *,
        broker_addr: str | None = None,
        cluster: str | None = None,
    ) -> AsyncIterator[str]:
        """Make groups, or replace their settings, in one request to one broker or to each master of a
        cluster; yields each address. Not for Apache's 4.9."""
        body = SubscriptionGroupList(group_config_list=list(configs)).encode()
        for addr in [broker_addr] if broker_addr else await self.master_addrs(cluster or ""):
            await self.client.brokers.call(
                addr, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=body
            )
            yield addr

    async def delete_group(self, broker_addr: str, group: str, *, with_offsets: bool) -> None:
        """Have a broker forget a group's settings, and its offsets if wanted."""
        header = DeleteSubscriptionGroupRequestHeader(
            group_name=group, remove_offset=with_offsets, clean_offset=with_offsets
        )
        await self.client.brokers.call(broker_addr, RequestCode.DELETE_SUBSCRIPTIONGROUP, header)

    async def broker_consume_stats(
        self, broker_addr: str, *, ordered: bool = False, timeout_s: float = CONSUME_STATS_TIMEOUT_S
    ) -> list[GroupQueueProgress]:
        """How far every group of a broker is in every queue in which it has an offset; ordered: in ordered
        topics."""
        answer = await self.client.brokers.call(
            broker_addr,
            RequestCode.GET_BROKER_CONSUME_STATS,
            GetBrokerConsumeStatsRequestHeader(is_order=ordered),
            timeout_s=timeout_s,
        )
        # A large broker's answer has megabytes: others go on while it is read.
        return await asyncio.to_thread(_all_progress, answer.body)


def _all_progress(body: bytes | memoryview) -> list[GroupQueueProgress]:
    found = []
    for each in BrokerConsumeStats.decode(body).consume_stats_list:
        for group, tables in each.items():
            for queue, offsets in sorted(
                (pair for table in tables for pair in table.offset_table.items()),
                key=lambda pair: pair[0],
            ):
                progress = QueueProgress(
                    topic=queue.topic,
                    broker_name=queue.broker_name,
                    queue_id=queue.queue_id,
                    broker_offset=offsets.broker_offset,
                    consumer_offset=offsets.consumer_offset,
                    last_timestamp=offsets.last_timestamp,
                )
                found.append(GroupQueueProgress(group=group, queue=progress))
    return found
