"""Operations that show the members and settings of consumer groups, and the clients of producer groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from cometmq.admin.groups import STATS_TIMEOUT_S, GroupStates, queue_progress
from cometmq.admin.values import GroupConfig, GroupQueueProgress
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.errors import BrokerError
from cometmq.protocol.bodies import (
    BrokerConsumeStats,
    ClientConnection,
    ConsumerConnection,
    ConsumerRunningInfo,
    ProducerConnection,
    ProducerInfo,
    ProducerTableInfo,
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
)
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    DeleteSubscriptionGroupRequestHeader,
    GetBrokerConsumeStatsRequestHeader,
    GetProducerConnectionListRequestHeader,
)

# Timeout in seconds, as in Apache's tool. It is long because the broker must read the offsets of all groups
# in all queues.
CONSUME_STATS_TIMEOUT_S = 50.0


class GroupAdmin(GroupStates):
    """Operations on groups and their members."""

    async def consumer_connection(self, group: str, broker_addr: str | None = None) -> ConsumerConnection:
        """Return the members of a consumer group and their subscriptions.

        Args:
            broker_addr: Broker that reports its members. None: the first broker that has members.

        Raises:
            BrokerError: With CONSUMER_NOT_ONLINE: the group has no members.
        """
        if broker_addr is not None:
            return await self.client.brokers.consumer_connection(broker_addr, group)
        return await self._members(await self.brokers_of(group), group)

    async def running_info(
        self, group: str, client_id: str, *, jstack: bool = False, broker_addr: str | None = None
    ) -> ConsumerRunningInfo:
        """Return the running info of a member: settings, subscriptions, queues and statistics.

        Args:
            jstack: Include the stacks of the member's threads.
            broker_addr: Broker that forwards the request to the member. None: the first broker to which the
                member is connected.

        Raises:
            BrokerError: No broker is connected to the member.
        """
        brokers = {"": broker_addr} if broker_addr else await self.brokers_of(group)
        timeout_s = STATS_TIMEOUT_S if broker_addr or jstack else None
        return await self._running_info(brokers, group, client_id, jstack=jstack, timeout_s=timeout_s)

    async def producer_connection(self, group: str, topic: str) -> list[ClientConnection]:
        """Return the clients of a producer group that are connected to the brokers of a topic.

        Raises:
            BrokerError: No broker has a client of the group.
        """
        header = GetProducerConnectionListRequestHeader(producer_group=group)
        found: dict[str, ClientConnection] = {}
        failure: BrokerError | None = None
        for addr in broker_addrs(await self.client.namesrv.route(topic)).values():
            try:
                answer = await self.client.brokers.fetch(
                    addr, RequestCode.GET_PRODUCER_CONNECTION_LIST, ProducerConnection, header
                )
            except BrokerError as error:
                failure = error
                continue
            for each in answer.connection_set:
                found.setdefault(each.client_id, each)
        if not found and failure is not None:
            raise failure
        return [found[client_id] for client_id in sorted(found)]

    async def producers(self, broker_addr: str) -> dict[str, list[ProducerInfo]]:
        """Return the clients of every producer group that are connected to a broker."""
        code = RequestCode.GET_ALL_PRODUCER_INFO
        return dict(
            sorted((await self.client.brokers.fetch(broker_addr, code, ProducerTableInfo)).data.items())
        )

    async def group_configs(self, group: str) -> list[GroupConfig]:
        """Return the settings of a consumer group at each broker that has them."""
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
        self, config: SubscriptionGroupConfig, *, broker_addr: str | None = None, cluster: str | None = None
    ) -> AsyncIterator[str]:
        """Create a consumer group, or replace its settings. Yield the address of each changed broker."""
        for addr in await self.target_addrs(broker_addr, cluster):
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
        """Create or replace consumer groups, with one request per broker (not for Apache 4.9).

        Yields:
            The address of each changed broker.
        """
        body = SubscriptionGroupList(group_config_list=list(configs)).encode()
        for addr in await self.target_addrs(broker_addr, cluster):
            await self.client.brokers.call(
                addr, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=body
            )
            yield addr

    async def set_consume_mode(self, broker_addr: str, mode: SetMessageRequestModeRequestBody) -> None:
        """Set whether the push consumers of a group pull or pop a topic from a broker (5.x).

        Only Java's consumers with `clientRebalance=false`, and ours with `PushOptions(share="broker")`, ask
        for the mode.

        Raises:
            BrokerError: The topic or the group does not exist, or the mode is invalid.
        """
        await self.client.brokers.call(broker_addr, RequestCode.SET_MESSAGE_REQUEST_MODE, body=mode.encode())

    async def delete_group(self, broker_addr: str, group: str, *, with_offsets: bool) -> None:
        """Delete the settings of a consumer group at a broker."""
        header = DeleteSubscriptionGroupRequestHeader(
            group_name=group, remove_offset=with_offsets, clean_offset=with_offsets
        )
        await self.client.brokers.call(broker_addr, RequestCode.DELETE_SUBSCRIPTIONGROUP, header)

    async def broker_consume_stats(
        self, broker_addr: str, *, ordered: bool = False, timeout_s: float = CONSUME_STATS_TIMEOUT_S
    ) -> list[GroupQueueProgress]:
        """Return the offsets of every consumer group of a broker in each queue."""
        answer = await self.client.brokers.call(
            broker_addr,
            RequestCode.GET_BROKER_CONSUME_STATS,
            GetBrokerConsumeStatsRequestHeader(is_order=ordered),
            timeout_s=timeout_s,
        )
        # Decode the response in a thread, because it may contain several megabytes.
        return await asyncio.to_thread(_all_progress, answer.body)


def _all_progress(body: bytes | memoryview) -> list[GroupQueueProgress]:
    found = []
    for each in BrokerConsumeStats.decode(body).consume_stats_list:
        for group, tables in each.items():
            for queue, offsets in sorted(
                (pair for table in tables for pair in table.offset_table.items()), key=lambda pair: pair[0]
            ):
                found.append(GroupQueueProgress(group=group, queue=queue_progress(queue, offsets)))
    return found
