"""What tools ask about topics, groups and clients: 202, 203, 204, 208, 300, 328 and 321."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from cometmq.broker.base.store_views import queue_entries
from cometmq.broker.base.turns import Turns, encoded
from cometmq.broker.context import BrokerContext
from cometmq.broker.groups.clients import Members
from cometmq.errors import CommandError
from cometmq.protocol.bodies import (
    ClientConnection,
    ConsumeQueueData,
    ConsumerConnection,
    ConsumeStats,
    GroupList,
    OffsetWrapper,
    ProducerConnection,
    QueryConsumeQueueBody,
    TopicOffset,
    TopicStatsTable,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    GetConsumerConnectionListRequestHeader,
    GetConsumeStatsRequestHeader,
    GetProducerConnectionListRequestHeader,
    GetTopicStatsInfoRequestHeader,
    QueryConsumeQueueRequestHeader,
    QueryTopicConsumeByWhoRequestHeader,
)
from cometmq.remoting import Connection, Handler

SUCCESS = ResponseCode.SUCCESS


class StatsAdmin:
    """Answers from the tables and the store's queue bounds."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {
            RequestCode.GET_TOPIC_STATS_INFO: self.topic_stats,
            RequestCode.GET_CONSUMER_CONNECTION_LIST: self.consumer_connections,
            RequestCode.GET_PRODUCER_CONNECTION_LIST: self.producer_connections,
            RequestCode.GET_CONSUME_STATS: self.consume_stats,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self.consumed_by,
            RequestCode.QUERY_CONSUME_QUEUE: self.consume_queue,
        }

    async def topic_stats(self, _connection: Connection, frame: Frame) -> Frame:
        """202: bounds and last store time of each queue of a topic."""
        topic = frame.header(GetTopicStatsInfoRequestHeader).topic
        context = self._context
        config = context.topics.get(topic)
        if config is None:
            raise CommandError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        store = context.store
        table = {}
        turns = Turns()
        for queue_id in range(config.write_queue_nums):
            await turns.queue()
            maximum = store.max_offset(topic, queue_id)
            last = await self._store_time(topic, queue_id, maximum - 1) if maximum > 0 else 0
            table[context.queue(topic, queue_id)] = TopicOffset(
                min_offset=max(store.min_offset(topic, queue_id), 0),
                max_offset=maximum,
                last_update_timestamp=max(last, 0),
            )
        return frame.response(SUCCESS, body=await encoded(TopicStatsTable(offset_table=table), len(table)))

    def consumer_connections(self, _connection: Connection, frame: Frame) -> Frame:
        """203: who is online in a consumer group, and what it subscribes."""
        group = frame.header(GetConsumerConnectionListRequestHeader).consumer_group
        known = self._context.consumers.groups.get(group)
        if known is None:
            raise CommandError(ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{group}] not online")
        body = ConsumerConnection(
            connection_set=connections_of(known.members),
            subscription_table=dict(known.subscriptions),
            consume_type=known.consume_type,
            message_model=known.message_model,
            consume_from_where=known.consume_from_where,
        )
        return frame.response(SUCCESS, body=body.encode())

    def producer_connections(self, _connection: Connection, frame: Frame) -> Frame:
        """204: who is online in a producer group."""
        group = frame.header(GetProducerConnectionListRequestHeader).producer_group
        members = self._context.producers.groups.get(group)
        if members is None:
            raise CommandError(ResponseCode.SYSTEM_ERROR, f"the producer group[{group}] not exist")
        return frame.response(
            SUCCESS, body=ProducerConnection(connection_set=connections_of(members)).encode()
        )

    async def consume_stats(self, _connection: Connection, frame: Frame) -> Frame:
        """208: how far a group is in each queue of the topics it has offsets in, or of those named."""
        header = frame.header(GetConsumeStatsRequestHeader)
        context = self._context
        group = header.consumer_group
        if header.topic and header.topic.strip():
            topics = [header.topic]
        elif header.topic_list:
            topics = [name for name in dict.fromkeys(header.topic_list.split(";")) if name]
        else:
            topics = sorted(context.offsets.topics_of(group))
        stats = await self.progress_of(group, topics, Turns())
        return frame.response(SUCCESS, body=await encoded(stats, len(stats.offset_table)))

    async def progress_of(self, group: str, topics: Iterable[str], turns: Turns) -> ConsumeStats:
        """How far a group is in these topics; those that it does not subscribe while online are left out."""
        context = self._context
        online = context.consumers.groups.get(group)
        stats = ConsumeStats(offset_table={}, consume_tps=0.0)
        for topic in topics:
            config = context.topics.get(topic)
            if config is None or (
                online is not None and online.subscriptions and topic not in online.subscriptions
            ):
                continue
            for queue_id in range(config.read_queue_nums):
                await turns.queue()
                progress = await self._progress(group, topic, queue_id)
                stats.offset_table[context.queue(topic, queue_id)] = progress
            stats.consume_tps += context.stats.group_rate(group, topic, context.mono_ms())
        return stats

    async def _store_time(self, topic: str, queue_id: int, offset: int) -> int:
        store = self._context.store
        queue = store.queues.find(topic, queue_id)
        return await store.off_loop.ask(partial(store.lookups.store_time_of, queue, offset))

    async def _progress(self, group: str, topic: str, queue_id: int) -> OffsetWrapper:
        context = self._context
        consumer_offset = max(context.offsets.query(group, topic, queue_id), 0)
        last = 0
        if consumer_offset > 0:
            last = max(await self._store_time(topic, queue_id, consumer_offset - 1), 0)
        return OffsetWrapper(
            broker_offset=max(context.store.max_offset(topic, queue_id), 0),
            consumer_offset=consumer_offset,
            last_timestamp=last,
        )

    def consumed_by(self, _connection: Connection, frame: Frame) -> Frame:
        """300: groups that subscribe a topic or have offsets in it."""
        topic = frame.header(QueryTopicConsumeByWhoRequestHeader).topic
        groups = self._context.consumers.groups_of_topic(topic) | self._context.offsets.groups_of(topic)
        return frame.response(SUCCESS, body=GroupList(group_list=sorted(groups)).encode())

    async def consume_queue(self, _connection: Connection, frame: Frame) -> Frame:
        """321: entries of a consume queue."""
        header = frame.header(QueryConsumeQueueRequestHeader)
        context = self._context
        store = context.store
        topic, queue_id = header.topic, header.queue_id
        if topic not in context.topics.table:
            raise CommandError(ResponseCode.SYSTEM_ERROR, f"{queue_id}@{topic} is not exist!")
        minimum, maximum = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        body = QueryConsumeQueueBody(max_queue_index=maximum, min_queue_index=minimum)
        if header.consumer_group:
            body.subscription_data = context.consumers.subscription(header.consumer_group, topic)
            body.filter_data = "null"
            if body.subscription_data is None:
                body.filter_data = f"{header.consumer_group}@{topic} is not online!"
        if not minimum <= header.index < maximum:
            raise CommandError(
                ResponseCode.SYSTEM_ERROR, f"Index {header.index} of {queue_id}@{topic} is not exist!"
            )
        entries = await store.off_loop.ask(
            partial(queue_entries, store, topic, queue_id, header.index, header.count)
        )
        body.queue_data = [
            ConsumeQueueData(physic_offset=offset, physic_size=size, tags_code=code)
            for offset, size, code in entries
        ]
        return frame.response(SUCCESS, body=body.encode())


def connections_of(members: Members) -> list[ClientConnection]:
    """The clients of a group as 203 and 204 show them."""
    return [
        ClientConnection(
            client_id=client.client_id,
            client_addr=client.channel.peer,
            language=client.language,
            version=client.version,
        )
        for client in members.by_channel.values()
    ]
