"""Groups (members, settings, offsets at a broker), rates and backlogs, and cluster reports for exports."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cometmq.admin import values
from cometmq.admin.groups import STATS_TIMEOUT_S, GroupStates, queue_progress
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.client.cluster.requests import pull_request
from cometmq.errors import BrokerError, CometError
from cometmq.message import MessageQueue
from cometmq.protocol import bodies, codes, headers
from cometmq.protocol.bodies.admin import QueryConsumeQueueBody

# Timeout in seconds, as in Apache's tool. It is long because the broker must read the offsets of all groups
# in all queues.
CONSUME_STATS_TIMEOUT_S = 50.0


class GroupAdmin(GroupStates):
    """Operations on groups and their members."""

    async def consumer_connection(
        self, group: str, broker_addr: str | None = None
    ) -> bodies.ConsumerConnection:
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
    ) -> bodies.ConsumerRunningInfo:
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

    async def producer_connection(self, group: str, topic: str) -> list[bodies.ClientConnection]:
        """Return the clients of a producer group that are connected to the brokers of a topic.

        Raises:
            BrokerError: No broker has a client of the group.
        """
        header = headers.GetProducerConnectionListRequestHeader(producer_group=group)
        found: dict[str, bodies.ClientConnection] = {}
        failure: BrokerError | None = None
        for addr in broker_addrs(await self.client.namesrv.route(topic)).values():
            try:
                answer = await self.client.brokers.fetch(
                    addr, codes.RequestCode.GET_PRODUCER_CONNECTION_LIST, bodies.ProducerConnection, header
                )
            except BrokerError as error:
                failure = error
                continue
            for each in answer.connection_set:
                found.setdefault(each.client_id, each)
        if not found and failure is not None:
            raise failure
        return [found[client_id] for client_id in sorted(found)]

    async def producers(self, broker_addr: str) -> dict[str, list[bodies.ProducerInfo]]:
        """Return the clients of every producer group that are connected to a broker."""
        code = codes.RequestCode.GET_ALL_PRODUCER_INFO
        return dict(
            sorted(
                (await self.client.brokers.fetch(broker_addr, code, bodies.ProducerTableInfo)).data.items()
            )
        )

    async def group_configs(self, group: str) -> list[values.GroupConfig]:
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
                    found.append(
                        values.GroupConfig(cluster_name=cluster, broker_name=name, config=table[group])
                    )
        return found

    async def update_group(
        self,
        config: bodies.SubscriptionGroupConfig,
        *,
        broker_addr: str | None = None,
        cluster: str | None = None,
    ) -> AsyncIterator[str]:
        """Create a consumer group, or replace its settings. Yield the address of each changed broker."""
        for addr in await self.target_addrs(broker_addr, cluster):
            await self.client.brokers.call(
                addr, codes.RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=config.encode()
            )
            yield addr

    async def update_groups(
        self,
        configs: Sequence[bodies.SubscriptionGroupConfig],
        *,
        broker_addr: str | None = None,
        cluster: str | None = None,
    ) -> AsyncIterator[str]:
        """Create or replace consumer groups, with one request per broker (not for Apache 4.9).

        Yields:
            The address of each changed broker.
        """
        body = bodies.SubscriptionGroupList(group_config_list=list(configs)).encode()
        for addr in await self.target_addrs(broker_addr, cluster):
            await self.client.brokers.call(
                addr, codes.RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body=body
            )
            yield addr

    async def set_consume_mode(self, broker_addr: str, mode: bodies.SetMessageRequestModeRequestBody) -> None:
        """Set whether the push consumers of a group pull or pop a topic from a broker (5.x).

        Only Java's consumers with `clientRebalance=false`, and ours with `PushOptions(share="broker")`, ask
        for the mode.

        Raises:
            BrokerError: The topic or the group does not exist, or the mode is invalid.
        """
        await self.client.brokers.call(
            broker_addr, codes.RequestCode.SET_MESSAGE_REQUEST_MODE, body=mode.encode()
        )

    async def delete_group(self, broker_addr: str, group: str, *, with_offsets: bool) -> None:
        """Delete the settings of a consumer group at a broker."""
        header = headers.DeleteSubscriptionGroupRequestHeader(
            group_name=group, remove_offset=with_offsets, clean_offset=with_offsets
        )
        await self.client.brokers.call(broker_addr, codes.RequestCode.DELETE_SUBSCRIPTIONGROUP, header)

    async def broker_consume_stats(
        self, broker_addr: str, *, ordered: bool = False, timeout_s: float = CONSUME_STATS_TIMEOUT_S
    ) -> list[values.GroupQueueProgress]:
        """Return the offsets of every consumer group of a broker in each queue."""
        answer = await self.client.brokers.call(
            broker_addr,
            codes.RequestCode.GET_BROKER_CONSUME_STATS,
            headers.GetBrokerConsumeStatsRequestHeader(is_order=ordered),
            timeout_s=timeout_s,
        )
        # Decode the response in a thread, because it may contain several megabytes.
        return await asyncio.to_thread(_all_progress, answer.body)


def _all_progress(body: bytes | memoryview) -> list[values.GroupQueueProgress]:
    found = []
    for each in bodies.BrokerConsumeStats.decode(body).consume_stats_list:
        for group, tables in each.items():
            for queue, offsets in sorted(
                (pair for table in tables for pair in table.offset_table.items()), key=lambda pair: pair[0]
            ):
                found.append(values.GroupQueueProgress(group=group, queue=queue_progress(queue, offsets)))
    return found


# The settings that `exportConfigs` writes. Apache's tool writes the same settings.
CONFIG_KEYS = (
    *("brokerClusterName", "brokerId", "brokerName", "brokerRole", "fileReservedTime", "filterServerNums"),
    *("flushDiskType", "maxMessageSize", "messageDelayLevel", "msgTraceTopicName", "slaveReadEnable"),
    *("traceOn", "traceTopicEnable", "useTLS", "autoCreateTopicEnable", "autoCreateSubscriptionGroup"),
)
# Default and built-in groups of clients. They are not exported, because they belong to no application.
CLIENT_GROUPS = {
    *("DEFAULT_CONSUMER", "DEFAULT_PRODUCER", "__MONITOR_CONSUMER", "SELF_TEST_P_GROUP"),
    codes.CLIENT_INNER_PRODUCER_GROUP,
}
AVERAGE_SIZE = "putMessageAverageSize"


def counted_runtime(runtime: Mapping[str, str]) -> dict[str, str | None]:
    """Return a copy of a runtime table. Its average message size is None if the broker has stored no message.

    Such a broker reports 0.0, because exporters for Apache's brokers expect a number.
    """
    table: dict[str, str | None] = {**runtime}
    if AVERAGE_SIZE in table and table.get("putMessageTimesTotal") == "0":
        table[AVERAGE_SIZE] = None
    return table


class StatsAdmin(GroupAdmin):
    """Statistics that combine the responses of several servers."""

    async def topic_stats(self, topic: str) -> list[values.TopicStats]:
        """Return rates, daily counts and backlog of a topic, for each of its consumer groups.

        Returns:
            One value per group, or a single value with an empty group. Brokers that do not answer are left
                out.
        """
        route = await self.client.namesrv.route(topic)
        masters = [
            data.broker_addrs[codes.MASTER_ID]
            for data in route.broker_datas
            if codes.MASTER_ID in data.broker_addrs
        ]
        in_tps, came = await self._counted(masters, "TOPIC_PUT_NUMS", topic)
        found = []
        for group in await self._groups_of_topic(route, topic) or [""]:
            out_tps: float | None = None
            went: int | None = 0
            behind: int | None = 0
            if group:
                out_tps, went = await self._counted(masters, "GROUP_GET_NUMS", f"{topic}@{group}")
                behind = await self._lag(group, topic, broker_addrs(route))
            found.append(values.TopicStats(topic, group, behind, in_tps, out_tps, came, went))
        return found

    async def _counted(self, masters: list[str], name: str, key: str) -> tuple[float | None, int | None]:
        """Return the rate per second and the 24-hour count of a statistic, summed over the masters.

        If no broker has the statistic, the rate is None and the count is 0. If no broker answers, both are
        None.
        """
        found = []
        for addr in masters:
            with suppress(CometError):
                found.append(await self.broker_stats(addr, name, key))
        if not found:
            return None, None
        rate = values.known_sum(stats.minute.tps if stats else None for stats in found)
        return rate, sum(stats.most for stats in found if stats)

    async def _lag(self, group: str, topic: str, offsets_at: Mapping[str, str]) -> int | None:
        try:
            brokers = await self.brokers_of(group, offsets_at)
            found = await self.progress(group, brokers=brokers)
        except CometError:
            return None
        return max(0, sum(row.diff for row in found.queues if row.topic == topic))

    async def consume_queue(
        self,
        topic: str,
        queue_id: int,
        index: int,
        count: int = 10,
        *,
        broker_addr: str | None = None,
        group: str | None = None,
    ) -> QueryConsumeQueueBody:
        """Return entries of a consume queue.

        Args:
            index: Index of the first entry.
            broker_addr: Address of the broker. None: the first broker of the topic.
            group: Consumer group whose subscription is applied to the entries.

        Raises:
            BrokerError: The queue has no entry at the index.
        """
        addr = broker_addr or next(iter(broker_addrs(await self.client.namesrv.route(topic)).values()))
        header = headers.QueryConsumeQueueRequestHeader(
            topic=topic, queue_id=queue_id, index=index, count=count, consumer_group=group
        )
        return await self.client.brokers.fetch(
            addr, codes.RequestCode.QUERY_CONSUME_QUEUE, QueryConsumeQueueBody, header, topic=topic
        )

    async def undone(self, *, missing: dict[str, CometError] | None = None) -> AsyncIterator[values.Undone]:
        """Yield the backlog and the failures of each group that is online, one value per topic of the group.

        Members that do not answer are left out. If a broker of a group does not answer, the group is left
        out.
        """
        for group, place in (await self.group_places(missing=missing)).items():
            try:
                brokers = place or await self.brokers_of(group)
                if missing and missing.keys() & brokers.keys():
                    continue  # Leave out the group: its sums would lack the brokers that have failed
                members = (await self._members(brokers, group)).connection_set
                rows = (await self.progress(group, brokers=brokers)).queues
            except CometError:
                continue
            failed: Counter[str] = Counter()
            for member in members:
                with suppress(CometError):
                    info = await self._running_info(brokers, group, member.client_id)
                    statuses = info.status_table.items()
                    failed.update({topic: status.consume_failed_msgs for topic, status in statuses})
            for topic in sorted({row.topic for row in rows}):
                of_topic = [row for row in rows if row.topic == topic]
                yield values.Undone(
                    consumer_group=group,
                    topic=topic,
                    undone_msgs_total=sum(max(row.diff, 0) for row in of_topic),
                    undone_msgs_single_mq=max(max(row.diff, 0) for row in of_topic),
                    undone_msgs_delay_time_mills=max([await self._delay_ms(row) for row in of_topic]),
                    failed_msgs_total_recently=failed[topic],
                )

    async def _delay_ms(self, row: values.QueueProgress) -> int:
        """Return the time, in ms, from a queue's last consumed message to its last message, 0 if unknown."""
        queue = MessageQueue(row.topic, row.broker_name, row.queue_id)
        if row.last_timestamp <= 0 or row.broker_offset <= 0:
            return 0
        try:
            addr = broker_addrs(await self.client.namesrv.route(row.topic))[row.broker_name]
            request = pull_request(codes.TOOLS_CONSUMER_GROUP, queue, row.broker_offset - 1, 1)
            found = (await self.client.brokers.pull(addr, queue, request)).messages
        except (CometError, KeyError):
            return 0
        return max(0, found[0].store_timestamp_ms - row.last_timestamp) if found else 0

    # -- broker contents and exports

    async def topic_table(self, broker_addr: str, *, special: bool = True) -> bodies.TopicConfigTable:
        """Return the topics of a broker without the system topics.

        Args:
            special: Include retry and dead-letter topics.
        """
        table = await self.topic_configs(broker_addr)
        code = codes.RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER
        system = set((await self.client.brokers.fetch(broker_addr, code, bodies.TopicList)).topic_list)
        table.topic_config_table = {
            name: config
            for name, config in sorted(table.topic_config_table.items())
            if name not in system and (special or not name.startswith((codes.RETRY_PREFIX, codes.DLQ_PREFIX)))
        }
        return table

    async def topic_configs(self, broker_addr: str) -> bodies.TopicConfigTable:
        """Return all topics of a broker, including system topics."""
        return await self.client.brokers.fetch(
            broker_addr, codes.RequestCode.GET_ALL_TOPIC_CONFIG, bodies.TopicConfigTable
        )

    async def user_groups(self, broker_addr: str) -> dict[str, bodies.SubscriptionGroupConfig]:
        """Return the consumer groups of a broker without RocketMQ's own groups."""
        table = await self.group_table(broker_addr)
        return {
            name: table[name]
            for name in sorted(table)
            if not (codes.is_system_group(name) or name in CLIENT_GROUPS)
        }

    async def cluster_metadata(
        self, cluster: str, *, special: bool = False
    ) -> tuple[dict[str, bodies.TopicConfig], dict[str, bodies.SubscriptionGroupConfig]]:
        """Return the topics and the consumer groups of a cluster.

        The queue numbers of a topic, and the retry queues of a group, are the sums over all masters.

        Args:
            special: Include retry and dead-letter topics.
        """
        topics: dict[str, bodies.TopicConfig] = {}
        found: dict[str, bodies.SubscriptionGroupConfig] = {}
        for addr in await self.master_addrs(cluster):
            for name, topic in (await self.topic_table(addr, special=special)).topic_config_table.items():
                if (known := topics.get(name)) is not None:
                    topic.read_queue_nums += known.read_queue_nums
                    topic.write_queue_nums += known.write_queue_nums
                topics[name] = topic
            for name, group in (await self.user_groups(addr)).items():
                if (before := found.get(name)) is not None:
                    group.retry_queue_nums += before.retry_queue_nums
                found[name] = group
        return topics, found

    async def cluster_configs(self, cluster: str) -> dict[str, Any]:
        """Return the main settings of a cluster's masters and the numbers of servers (`exportConfigs`)."""
        addrs = await self.cluster_addrs(cluster, slaves=True)
        configs = {}
        for master in addrs:
            settings = await self.broker_config(master)
            configs[settings.get("brokerName", master)] = {key: settings.get(key) for key in CONFIG_KEYS}
        scale = {
            "namesrvSize": len(self.client.namesrv.addrs),
            "masterBrokerSize": len(addrs),
            "slaveBrokerSize": sum(map(len, addrs.values())),
        }
        return {"brokerConfigs": configs, "clusterScale": scale}

    async def cluster_metrics(self, cluster: str) -> dict[str, Any]:
        """Return the data of Apache's `exportMetrics` about a cluster's masters, under the same keys.

        The data are message rates, daily counts, disk usage, the numbers of topics and groups, and client
        versions.
        """
        info = await self.cluster_info()
        report: dict[str, Any] = {}
        for addr in await self.master_addrs(cluster):
            name = next(
                (name for name, data in info.broker_addr_table.items() if addr in data.broker_addrs.values()),
                addr,
            )
            report[name] = await self._metrics_of(addr)
        quotas = [each["runtimeQuota"] for each in report.values()]
        tps = {
            "total" + key[0].upper() + key[1:]: values.known_sum(quota["tps"][key] for quota in quotas)
            for key in ("normalInTps", "normalOutTps", "transInTps", "scheduleInTps")
        }
        day = {
            key: sum(quota["oneDayNum"][key] for quota in quotas)
            for key in ("normalOneDayInNum", "normalOneDayOutNum", "transOneDayInNum", "scheduleOneDayInNum")
        }
        return {"evaluateReport": report, "totalData": {"totalTps": tps, "totalOneDayNum": day}}

    async def _metrics_of(self, addr: str) -> dict[str, Any]:
        runtime = await self.client.brokers.runtime_info(addr)
        settings = await self.broker_config(addr)
        table = await self.user_groups(addr)
        half = await self.broker_stats(addr, "TOPIC_PUT_NUMS", codes.TRANS_HALF_TOPIC)
        late = await self.broker_stats(addr, "TOPIC_PUT_NUMS", codes.SCHEDULE_TOPIC)
        clients = set()
        for group in table:
            try:
                connected = await self.consumer_connection(group, addr)
            except CometError:
                continue
            clients |= {
                f"{each.language}%{codes.version_name(each.version)}" for each in connected.connection_set
            }
        return {
            "runtimeEnv": {
                "cpuNum": settings.get("clientCallbackExecutorThreads"),
                "totalMemKBytes": runtime.get("totalMemKBytes"),
            },
            "runtimeQuota": {
                **quota(runtime, half, late),
                "topicSize": len((await self.topic_table(addr, special=False)).topic_config_table),
                "groupSize": len(table),
            },
            "runtimeVersion": {
                "rocketmqVersion": runtime.get("brokerVersionDesc"),
                "clientInfo": sorted(clients),
            },
        }


def quota(runtime: Mapping[str, str], half: values.Stats | None, late: values.Stats | None) -> dict[str, Any]:
    """Return disk usage, message rates, daily counts and average message size, under `exportMetrics`'s keys.

    Args:
        runtime: The runtime table of a broker.
        half: The statistics of half messages. None: the broker has none.
        late: The statistics of messages with a delay level. None: the broker has none.
    """
    broker = values.BrokerStatus(
        cluster_name="", broker_name="", broker_id=0, broker_addr="", runtime=dict(runtime)
    )
    out = "getTransferredTps" if "getTransferredTps" in runtime else "getTransferedTps"
    return {
        "diskRatio": {key: runtime.get(key) for key in ("commitLogDiskRatio", "consumeQueueDiskRatio")},
        "tps": {
            "normalInTps": broker.first_number("putTps"),
            "normalOutTps": broker.first_number(out),
            "transInTps": half.minute.tps if half else None,
            "scheduleInTps": late.minute.tps if late else None,
        },
        "oneDayNum": {
            "normalOneDayInNum": broker.count("msgPutTotalTodayMorning")
            - broker.count("msgPutTotalYesterdayMorning"),
            "normalOneDayOutNum": broker.count("msgGetTotalTodayMorning")
            - broker.count("msgGetTotalYesterdayMorning"),
            "transOneDayInNum": half.most if half else 0,
            "scheduleOneDayInNum": late.most if late else 0,
        },
        "messageAverageSize": counted_runtime(runtime).get(AVERAGE_SIZE),
    }
