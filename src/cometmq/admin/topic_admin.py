"""Operations on topics (creation, changes, state, deletion, queue allocation) and on lite topics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import msgspec

from cometmq.admin.errors import UnknownNameError, was_deleted
from cometmq.admin.groups import GroupStates
from cometmq.admin.servers import ServerAdmin, ask_each
from cometmq.admin.values import QueueStatus, TopicUse
from cometmq.client.cluster import lookups
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.client.group.allocate import AllocateAveragely
from cometmq.errors import CometError, NoRouteError
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import ClusterInfo, TopicConfig, TopicConfigList, TopicRouteData, TopicStatsTable
from cometmq.protocol.bodies.admin import (
    LiteBrokerInfo,
    LiteClientInfo,
    LiteGroupInfo,
    LiteTopicInfo,
    LiteTopicList,
    ParentTopicInfo,
    PurgedQueue,
)
from cometmq.protocol.codes import DLQ_PREFIX, MASTER_ID, ORDER_TOPIC_CONFIG, RETRY_PREFIX, Perm, RequestCode
from cometmq.protocol.headers import Header, TopicRequestHeader
from cometmq.protocol.headers.admin import (
    GetLiteClientInfoHeader,
    GetLiteGroupInfoHeader,
    GetLiteTopicInfoHeader,
    ListLiteTopicsHeader,
    TriggerLiteDispatchHeader,
)
from cometmq.protocol.json_body import Body

B = TypeVar("B", bound=Body)

UNIT_FLAG, UNIT_SUB_FLAG = 1, 2  # Bits of the field `topicSysFlag` of a topic


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a topic.

    Attributes:
        topic: Name of the topic.
        read_queue_nums: Number of queues that consumers read, per broker.
        write_queue_nums: Number of queues that producers write, per broker.
        perm: Permission: 2 write, 4 read, 6 both.
        order: Whether the topic is ordered. The queues of an ordered topic remain in its route when a broker
            fails, so that messages with the same sharding key stay in the same queue.
        unit: The topic belongs to a unit (RocketMQ's flag).
        has_unit_sub: A unit subscribes to the topic (RocketMQ's flag).
        attributes: Changes of attributes, as "+key=value,-key". None: no change.
    """

    topic: str
    read_queue_nums: int = 8
    write_queue_nums: int = 8
    perm: int = 6
    order: bool = False
    unit: bool = False
    has_unit_sub: bool = False
    attributes: str | None = None

    @property
    def topic_sys_flag(self) -> int:
        return UNIT_FLAG * self.unit + UNIT_SUB_FLAG * self.has_unit_sub

    def __str__(self) -> str:
        perm = ("R" if self.perm & 4 else "-") + ("W" if self.perm & 2 else "-") + "-"
        return (
            f"TopicConfig [topicName={self.topic}, readQueueNums={self.read_queue_nums}, "
            f"writeQueueNums={self.write_queue_nums}, perm={perm}, topicFilterType=SINGLE_TAG, "
            f"topicSysFlag={self.topic_sys_flag}, order={'true' if self.order else 'false'}]"
        )


class TopicAdmin(GroupStates):
    """Operations on topics."""

    async def create_topic(
        self, settings: TopicSettings, *, broker_addr: str | None = None, cluster: str | None = None
    ) -> AsyncIterator[str]:
        """Create or change a topic. Yield the address of each changed broker."""
        for addr in await self.target_addrs(broker_addr, cluster):
            await self.client.brokers.create_topic(
                addr,
                settings.topic,
                read_queue_nums=settings.read_queue_nums,
                write_queue_nums=settings.write_queue_nums,
                perm=settings.perm,
                topic_sys_flag=settings.topic_sys_flag,
                order=settings.order,
                attributes=settings.attributes,
            )
            yield addr

    async def create_topics(
        self, topics: Sequence[TopicConfig], *, broker_addr: str | None = None, cluster: str | None = None
    ) -> AsyncIterator[str]:
        """Create or change several topics with one request per broker.

        Apache's 4.9 brokers lack this request.

        Args:
            topics: Names and settings of the topics. `attributes` holds changes: the key "+name" sets the
                attribute `name` to the value, and "-name" removes the attribute.

        Yields:
            The address of each changed broker.
        """
        body = TopicConfigList(topic_config_list=list(topics)).encode()
        for addr in await self.target_addrs(broker_addr, cluster):
            await self.client.brokers.call(addr, RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)
            yield addr

    async def purge_topic(
        self, topic: str, *, queue_id: int | None = None, before_ms: int | None = None, execute: bool = False
    ) -> list[tuple[str, PurgedQueue]]:
        """Delete the messages of a topic's queues, but not the topic (CometMQ brokers only).

        Args:
            queue_id: Only the queues with this id. None: all queues.
            before_ms: Only messages stored before this time. None: all messages.
            execute: False: only return what would be deleted.

        Returns:
            Broker name and result of each queue.
        """
        found = []
        for broker in sorted((await self.route(topic)).broker_datas, key=lambda broker: broker.broker_name):
            addr = broker.broker_addrs.get(MASTER_ID)
            if addr is not None:
                queues = await self.client.brokers.purge_topic(
                    addr, topic, queue_id=queue_id, before_ms=before_ms, execute=execute
                )
                found += [(broker.broker_name, queue) for queue in queues]
        return found

    async def set_order_conf(
        self, settings: TopicSettings, *, broker_addr: str | None = None, cluster: str | None = None
    ) -> str:
        """Register the queues of an ordered topic in the order configuration of all name servers.

        For one broker its entry is merged into the configuration; for a cluster the configuration is
        replaced.

        Args:
            settings: Name and number of write queues of the topic.
            cluster: For all brokers of this cluster. Has an effect only without `broker_addr`.

        Returns:
            The new configuration, for example "broker-a:8;broker-b:8".
        """
        info = await self.client.namesrv.cluster_info()
        entries: dict[str, str] = {}
        if broker_addr:
            noted = await self.client.namesrv.kv_config(ORDER_TOPIC_CONFIG, settings.topic) or ""
            entries = dict(word.split(":", 1) for word in noted.split(";") if ":" in word)
            names = [
                name
                for name, data in info.broker_addr_table.items()
                if broker_addr in data.broker_addrs.values()
            ]
        else:
            names = sorted(info.cluster_addr_table.get(cluster or "", ()))
        entries.update(dict.fromkeys(names, str(settings.write_queue_nums)))
        conf = ";".join(f"{name}:{count}" for name, count in entries.items())
        for addr in self.client.namesrv.addrs:
            await self.client.namesrv.put_kv_config(addr, ORDER_TOPIC_CONFIG, settings.topic, conf)
        return conf

    async def delete_topic_in_brokers(
        self, topic: str, cluster: str | None = None, *, broker_addr: str | None = None
    ) -> list[str]:
        """Delete a topic and its messages at brokers, and return the addresses of the brokers."""
        addrs = await self.target_addrs(broker_addr, cluster)
        for addr in addrs:
            await self.client.brokers.delete_topic(addr, topic)
        return addrs

    async def delete_topic_in_name_servers(self, topic: str, namesrv: str | None = None) -> None:
        """Delete a topic's route and order configuration at the name server `namesrv`.

        If `namesrv` is None, delete them at all name servers.
        """
        for addr in (namesrv,) if namesrv else self.client.namesrv.addrs:
            await self.client.namesrv.delete_topic(addr, topic)
            await self.client.namesrv.delete_kv_config(addr, ORDER_TOPIC_CONFIG, topic)

    async def topics(self) -> list[str]:
        """Return the names of all topics, sorted, including system, retry and dead-letter topics."""
        return await self.client.namesrv.topics()

    async def topic_uses(
        self, topics: Sequence[str] | None = None, *, missing: dict[str, CometError] | None = None
    ) -> list[TopicUse]:
        """Return topics with their clusters and consumer groups, but no retry and dead-letter topics.

        Args:
            topics: The topics. None: all.
            missing: Receives, by topic, the error of a broker that does not answer. The groups of this topic
                are then left out. None: the first error is raised.

        Raises:
            RemotingError: A broker does not answer and `missing` is None.
        """
        info = await self.client.namesrv.cluster_info()
        uses: list[TopicUse] = []
        for topic in await self.topics() if topics is None else topics:
            if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
                continue
            found, consumers = list[str](), list[str]()
            try:
                route = await self.route(topic)
                found = _clusters_of(route, info)
                consumers = await self._groups_of_topic(route, topic)
            except CometError as error:
                # As in Apache's tool, list a topic that was deleted after the topics were requested.
                if not was_deleted(error):
                    if missing is None:
                        raise
                    missing[topic] = error
            uses.append(
                TopicUse(cluster_name=found[0] if found else "", topic=topic, consumer_groups=consumers)
            )
        return uses

    async def route(self, topic: str) -> TopicRouteData:
        """Return the route of a topic: its brokers and queues.

        Raises:
            NoRouteError: No name server has the topic. The error lists the name servers and their responses.
        """
        return await self.client.namesrv.route(topic)

    async def clusters_of(self, topic: str) -> list[str]:
        """Return the clusters whose brokers have a topic, sorted; [] for a topic without a route."""
        try:
            route = await self.route(topic)
        except NameServersUnreachable:
            raise
        except NoRouteError:
            return []
        return sorted(_clusters_of(route, await self.cluster_info()))

    async def topic_status(self, topic: str) -> list[QueueStatus]:
        """Return the offsets and the last store time of each queue of a topic, sorted by broker and queue."""
        addrs = lookups.broker_addrs(await self.route(topic)).values()
        rows = [row for addr in addrs for row in await self.topic_status_at(addr, topic)]
        return sorted(rows, key=lambda row: (row.broker_name, row.queue_id))

    async def topic_status_at(self, addr: str, topic: str) -> list[QueueStatus]:
        """Return the offsets and the last store time of each queue that one broker has of a topic."""
        header = TopicRequestHeader(topic=topic)
        table = await self.client.brokers.fetch(
            addr, RequestCode.GET_TOPIC_STATS_INFO, TopicStatsTable, header, topic=topic
        )
        return [
            QueueStatus(
                broker_name=queue.broker_name,
                queue_id=queue.queue_id,
                min_offset=offsets.min_offset,
                max_offset=offsets.max_offset,
                last_update_timestamp=offsets.last_update_timestamp,
            )
            for queue, offsets in table.offset_table.items()
        ]

    async def change_topic_perm(
        self,
        topic: str,
        perm: int,
        *,
        broker_addr: str | None = None,
        cluster: str | None = None,
        execute: bool = True,
    ) -> AsyncIterator[tuple[str, int, TopicSettings]]:
        """Change only the permission of a topic.

        Args:
            perm: The new permission: 2 write, 4 read, 6 both.
            execute: False: only yield what would be changed.

        Yields:
            Address, old permission and new settings of each changed broker.

        Raises:
            UnknownNameError: The cluster does not exist, or the address is not a master of the topic.
        """
        route = await self.route(topic)
        queues = {data.broker_name: data for data in route.queue_datas}
        masters = {
            data.broker_addrs[MASTER_ID]: queues[data.broker_name]
            for data in sorted(route.broker_datas, key=lambda data: data.broker_name)
            if MASTER_ID in data.broker_addrs and data.broker_name in queues
        }
        wanted = await self.target_addrs(broker_addr, cluster)
        for addr in wanted:
            if addr not in masters:
                raise UnknownNameError("master of the topic", addr, list(masters))
        for addr in wanted:
            data = masters[addr]
            settings = TopicSettings(
                topic=topic,
                read_queue_nums=data.read_queue_nums,
                write_queue_nums=data.write_queue_nums,
                perm=perm,
                unit=bool(data.topic_sys_flag & UNIT_FLAG),
                has_unit_sub=bool(data.topic_sys_flag & UNIT_SUB_FLAG),
            )
            if execute:
                async for _ in self.create_topic(settings, broker_addr=addr):
                    pass
            yield addr, data.perm, settings

    async def allocation(self, topic: str, clients: Sequence[str]) -> dict[str, list[MessageQueue]]:
        """Return the queues of a topic that each client would hold if the clients were one consumer group.

        The clients are sorted before the allocation, like the members of a group. Apache's tool keeps the
        given order.
        """
        queues = sorted(
            MessageQueue(topic, data.broker_name, queue_id)
            for data in (await self.route(topic)).queue_datas
            if data.perm & Perm.READ
            for queue_id in range(data.read_queue_nums)
        )
        members = sorted(set(clients))
        return {client: AllocateAveragely().allocate(client, queues, members) for client in members}


def _clusters_of(route: TopicRouteData, info: ClusterInfo) -> list[str]:
    names = {data.broker_name for data in route.broker_datas}
    return [cluster for cluster, brokers in info.cluster_addr_table.items() if names & set(brokers)]


class LiteTopicAdmin(ServerAdmin):
    """Operations on lite topics.

    All but the first send a request to each broker that has the parent topic, and return the results by
    broker name. `missing` receives the errors of brokers that fail while others respond.
    """

    async def lite_broker_info(self, broker_addr: str) -> LiteBrokerInfo:
        """Return the numbers of lite topics, subscriptions and leases of a broker."""
        return await self.client.brokers.fetch(broker_addr, RequestCode.GET_BROKER_LITE_INFO, LiteBrokerInfo)

    async def parent_topic(self, parent: str, missing: dict[str, CometError]) -> dict[str, ParentTopicInfo]:
        """Return the groups and the number of lite topics of a parent topic."""
        header = TopicRequestHeader(topic=parent)
        return await self._fetch(parent, missing, RequestCode.GET_PARENT_TOPIC_INFO, ParentTopicInfo, header)

    async def lite_topics(
        self, parent: str, prefix: str, at_most: int, missing: dict[str, CometError]
    ) -> dict[str, LiteTopicList]:
        """Return the first lite topics of a parent topic whose names begin with `prefix`.

        Only CometMQ's brokers list them.
        """
        header = ListLiteTopicsHeader(parent, prefix, at_most)
        return await self._fetch(parent, missing, RequestCode.LIST_LITE_TOPICS, LiteTopicList, header)

    async def lite_topic(
        self, parent: str, lite_topic: str, missing: dict[str, CometError]
    ) -> dict[str, LiteTopicInfo]:
        """Return the offsets and the subscribers of a lite topic."""
        header = GetLiteTopicInfoHeader(parent, lite_topic)
        return await self._fetch(parent, missing, RequestCode.GET_LITE_TOPIC_INFO, LiteTopicInfo, header)

    async def lite_client(
        self,
        parent: str,
        group: str,
        client_id: str,
        missing: dict[str, CometError],
        at_most: int | None = None,
    ) -> dict[str, LiteClientInfo]:
        """Return the lite topics to which a client is subscribed: at most 1,000, or `at_most`."""
        header = GetLiteClientInfoHeader(parent, group, client_id, at_most)
        return await self._fetch(parent, missing, RequestCode.GET_LITE_CLIENT_INFO, LiteClientInfo, header)

    async def lite_group(
        self, parent: str, group: str, lite_topic: str | None, top: int, missing: dict[str, CometError]
    ) -> dict[str, LiteGroupInfo]:
        """Return a group's progress in a lite topic, or the `top` lite topics with the largest lags."""
        header = GetLiteGroupInfoHeader(group, lite_topic, top)
        return await self._fetch(parent, missing, RequestCode.GET_LITE_GROUP_INFO, LiteGroupInfo, header)

    async def trigger_lite_dispatch(
        self,
        parent: str,
        group: str,
        client_id: str | None,
        broker_name: str | None,
        missing: dict[str, CometError],
    ) -> list[str]:
        """Offer all unconsumed lite topics to a client or to all clients of a group. Return broker names."""
        code, header = RequestCode.TRIGGER_LITE_DISPATCH, TriggerLiteDispatchHeader(group, client_id)
        addrs = lookups.broker_addrs(await self.client.namesrv.route(parent))
        if broker_name is not None:
            if broker_name not in addrs:
                raise UnknownNameError("broker of the topic", broker_name, sorted(addrs))
            addrs = {broker_name: addrs[broker_name]}
        return list(await ask_each(addrs, lambda _, to: self.client.brokers.call(to, code, header), missing))

    async def _fetch(
        self, parent: str, missing: dict[str, CometError], code: RequestCode, kind: type[B], header: Header
    ) -> dict[str, B]:
        brokers = self.client.brokers
        addrs = lookups.broker_addrs(await self.client.namesrv.route(parent))
        return await ask_each(addrs, lambda _, addr: brokers.fetch(addr, code, kind, header), missing)
