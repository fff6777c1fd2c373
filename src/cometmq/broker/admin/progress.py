"""Handlers of the requests by which tools show queues, statistics and the progress of consumer groups."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec

from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.names import check_group
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.times import mono_ms, time_text
from cometmq.broker.base.turns import Turns, encoded
from cometmq.broker.groups.clients import ConsumerGroup, ConsumerTable
from cometmq.broker.pop.leases import Leases
from cometmq.broker.tables.durable import DurableTables
from cometmq.errors import CommandError
from cometmq.protocol import bodies, headers
from cometmq.protocol.bodies import Body
from cometmq.protocol.codes import RETRY_PREFIX, RequestCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import Header
from cometmq.remoting import Connection
from cometmq.store import Clock, MessageStore, Reads

# For each statistic of the whole broker, by its name in requests: the name of the counter in `Stats`.
OF_BROKER = {"BROKER_PUT_NUMS": "put", "BROKER_GET_NUMS": "transferred"}
MAX_ENTRIES = 4096  # Maximum number of consume queue entries in one response
INT64_MAX = 2**63 - 1


class QueryTopicsByConsumerRequestHeader(Header, gc=False):
    """The header of QUERY_TOPICS_BY_CONSUMER (5.x)."""

    group: str


class TopicsOfGroup(Body):
    """The body of the response to QUERY_TOPICS_BY_CONSUMER."""

    topic_list: list[str]
    broker_addr: str | None = None


class ProgressAdmin(msgspec.Struct, eq=False):
    """Answers requests about queues and groups from the broker's tables and the store."""

    clock: Clock
    store: MessageStore
    tables: DurableTables
    consumers: ConsumerTable
    stats: Stats
    address: BrokerAddress
    leases: Leases

    # -- queues

    @handles(RequestCode.GET_TOPIC_STATS_INFO)
    async def get_topic_stats_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the minimum and maximum offset of a topic's queues, and their last messages' store times."""
        topic = frame.header(headers.TopicRequestHeader).topic
        config = self.tables.topics.existing(topic)
        table = {}
        async for queue_id in Turns().each(range(config.write_queue_nums)):
            maximum = self.store.max_offset(topic, queue_id)
            table[self.tables.topics.queue(topic, queue_id)] = bodies.TopicOffset(
                min_offset=max(self.store.min_offset(topic, queue_id), 0),
                max_offset=maximum,
                last_update_timestamp=await self._stored_before(topic, queue_id, maximum),
            )
        total = sum(each.max_offset for each in table.values())
        rate = self.stats.topic_put(topic, total, mono_ms(self.clock))[0].per_second
        stats = bodies.TopicStatsTable(offset_table=table, topic_put_tps=rate)
        return frame.response(body=await encoded(stats, len(table)))

    @handles(RequestCode.QUERY_CONSUME_QUEUE)
    async def query_consume_queue(self, _connection: Connection, frame: Frame) -> Frame:
        """Return entries of a consume queue, beginning at the requested index."""
        header = frame.header(headers.QueryConsumeQueueRequestHeader)
        store = self.store
        topic, queue_id = header.topic, header.queue_id
        if topic not in self.tables.topics.table:
            raise CommandError.failed(f"{queue_id}@{topic} is not exist!")
        minimum, maximum = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        body = bodies.QueryConsumeQueueBody(max_queue_index=maximum, min_queue_index=minimum)
        if header.consumer_group:
            body.subscription_data = self.consumers.subscription(header.consumer_group, topic)
            body.filter_data = "null"
            if body.subscription_data is None:
                body.filter_data = f"{header.consumer_group}@{topic} is not online!"
        if not minimum <= header.index < maximum:
            raise CommandError.failed(f"Index {header.index} of {queue_id}@{topic} is not exist!")
        body.queue_data = await store.executor.query(partial(self._entries, header))
        return frame.response(body=body.encode())

    def _entries(
        self, header: headers.QueryConsumeQueueRequestHeader, reads: Reads
    ) -> list[bodies.ConsumeQueueData]:
        queue = self.store.queues.find_queue(header.topic, header.queue_id)
        if queue is None:
            return []
        stop = min(header.index + max(min(header.count, MAX_ENTRIES), 0), queue.max_offset)
        units = (queue.unit(offset, reads) for offset in range(max(header.index, queue.min_offset), stop))
        return [
            bodies.ConsumeQueueData(physic_offset=unit[0], physic_size=unit[1], tags_code=unit[2])
            for unit in units
            if unit is not None
        ]

    @handles(RequestCode.QUERY_CONSUME_TIME_SPAN)
    async def query_consume_time_span(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the store times of each queue's first, last, and last consumed message."""
        header = frame.header(headers.GroupTopicRequestHeader)
        config = self.tables.topics.existing(header.topic)
        spans = [
            await self._span(header.topic, header.group, queue_id)
            async for queue_id in Turns().each(range(config.write_queue_nums))
        ]
        body = bodies.QueryConsumeTimeSpanBody(consume_time_span_set=spans)
        return frame.response(body=await encoded(body, len(spans)))

    async def _span(self, topic: str, group: str, queue_id: int) -> bodies.ConsumeTimeSpan:
        store = self.store
        first, behind = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        consumed = self.tables.offsets.query(group, topic, queue_id)

        def times(reads: Reads) -> list[int]:
            offsets = (first, behind - 1, consumed - 1, max(consumed, first))
            queue = store.queues.find_queue(topic, queue_id)
            return [store.lookups.store_time_of(queue, offset, reads) for offset in offsets]

        earliest, latest, reached, waiting = await store.executor.query(times)
        if consumed <= 0:
            reached = earliest
        behind_ms = 0
        if first < behind and consumed < behind:
            behind_ms = self.clock.time_ms() - waiting
        return bodies.ConsumeTimeSpan(
            message_queue=self.tables.topics.queue(topic, queue_id),
            min_time_stamp=earliest,
            min_time_stamp_str=time_text(earliest),
            max_time_stamp=latest,
            max_time_stamp_str=time_text(latest),
            consume_time_stamp=reached,
            consume_time_stamp_str=time_text(reached),
            delay_time=behind_ms,
        )

    async def _stored_before(self, topic: str, queue_id: int, offset: int) -> int:
        """Return the store time (ms) of the message just before an offset, or 0 if it is unknown."""
        if offset <= 0:
            return 0
        queue = self.store.queues.find_queue(topic, queue_id)
        return max(await self.store.lookups.time_to_show(queue, offset - 1), 0)

    @handles(RequestCode.VIEW_BROKER_STATS_DATA)
    def view_broker_stats_data(self, _connection: Connection, frame: Frame) -> Frame:
        """Return message statistics of the last minute, hour and day.

        The request names one of four statistics, and the key for which to return it:

        - TOPIC_PUT_NUMS: messages stored in a topic (key: topic)
        - BROKER_PUT_NUMS: messages stored in the broker (key: the cluster's name)
        - GROUP_GET_NUMS: messages that a group consumed from a topic (key: topic@group)
        - BROKER_GET_NUMS: messages that all groups consumed from the broker (key: the cluster's name)
        """
        header = frame.header(headers.ViewBrokerStatsDataRequestHeader)
        name, key = header.stats_name, header.stats_key
        topic, at, group = key.partition("@")
        now_ms = mono_ms(self.clock)
        config = self.tables.topics.get(topic)
        if name == "TOPIC_PUT_NUMS" and config is not None and not at:
            total = sum(self.store.max_offset(topic, each) for each in range(config.write_queue_nums))
            found = self.stats.topic_put(topic, total, now_ms)
        elif name == "GROUP_GET_NUMS" and at:
            found = self.stats.group_got(group, topic, now_ms)
        elif name in OF_BROKER and key == self.address.config.broker_cluster_name:
            found = self.stats.of_broker(OF_BROKER[name], now_ms)
        else:
            found = []
        if not any(counted.sum for counted in found):
            raise CommandError.failed(f"The stats <{name}> <{key}> not exist")
        # `avgpt` is the average number of messages per counted event. It is 1, because each message counts as
        # one event.
        items = [bodies.BrokerStatsItem(sum=each.sum, tps=each.per_second, avgpt=1.0) for each in found]
        return frame.response(body=bodies.BrokerStatsData(*items).encode())

    # -- groups

    @handles(RequestCode.GET_CONSUME_STATS)
    async def get_consume_stats(self, _connection: Connection, frame: Frame) -> Frame:
        """Return a group's offsets in each queue of the requested topics.

        A request without topics is about all topics in which the group has offsets. The rate in the response
        then also includes topics to which the group subscribes without having offsets there, because the
        members of a broadcasting group store their own offsets.
        """
        header = frame.header(headers.GetConsumeStatsRequestHeader)
        group = header.consumer_group
        counted = set[str]()
        if header.topic and header.topic.strip():
            topics = [header.topic]
        elif header.topic_list:
            topics = [name for name in dict.fromkeys(header.topic_list.split(";")) if name]
        else:
            topics = sorted(self.tables.offsets.topics_of(group))
            counted = self.consumers.topics_of(group)
        stats = await self._progress_of(group, topics, Turns(), counted)
        return frame.response(body=await encoded(stats, len(stats.offset_table)))

    @handles(RequestCode.GET_BROKER_CONSUME_STATS)
    async def get_broker_consume_stats(self, _connection: Connection, frame: Frame) -> Frame:
        """Return, for each group that has settings or offsets, its offsets in each of its topics."""
        only_ordered = bool(frame.header(headers.GetBrokerConsumeStatsRequestHeader).is_order)
        listed: list[dict[str, list[bodies.ConsumeStats]]] = []
        total = entries = 0
        turns = Turns()
        async for group in turns.each(sorted(self.tables.groups.table.keys() | self.tables.offsets.groups())):
            tables = []
            for topic in sorted(self.tables.offsets.topics_of(group)):
                if only_ordered and not self.tables.topics.is_order(topic):
                    continue
                stats = await self._progress_of(group, [topic], turns)
                if stats.offset_table:
                    tables.append(stats)
                    entries += len(stats.offset_table)
                    total += sum(
                        row.broker_offset - row.consumer_offset for row in stats.offset_table.values()
                    )
            listed.append({group: tables})
        body = bodies.BrokerConsumeStats(
            broker_addr=self.address.text, consume_stats_list=listed, total_diff=total
        )
        return frame.response(body=await encoded(body, entries + len(listed)))

    async def _progress_of(
        self, group: str, topics: Iterable[str], turns: Turns, counted: Iterable[str] = ()
    ) -> bodies.ConsumeStats:
        """Return the offsets of a group in each queue of `topics`, and the group's consumption rate.

        If the group is online, topics to which it does not subscribe are left out, except retry topics from
        which it pops. The rate is the sum of the group's rates for the remaining topics and for the topics in
        `counted`.
        """
        rated = set(counted)
        online = self.consumers.groups.get(group)
        stats = bodies.ConsumeStats(offset_table={}, consume_tps=0.0)
        for topic in topics:
            config = self.tables.topics.get(topic)
            if config is None or (online is not None and not _is_consumed(topic, group, online)):
                continue
            async for queue_id in turns.each(range(config.read_queue_nums)):
                consumed = max(self.tables.offsets.query(group, topic, queue_id), 0)
                last = await self._stored_before(topic, queue_id, consumed)
                popped = self.leases.find((group, topic, queue_id))
                queue = self.tables.topics.queue(topic, queue_id)
                row = stats.offset_table[queue] = bodies.OffsetWrapper(
                    broker_offset=max(self.store.max_offset(topic, queue_id), 0),
                    consumer_offset=consumed,
                    last_timestamp=last,
                    # The broker does not store the offsets at which members pull
                    pull_offset=consumed if popped is None else popped.head,
                )
                if popped is not None or (online is not None and online.pops):
                    row.leased = 0 if popped is None else len(popped.leases)
                    first = popped and popped.first_pop
                    row.oldest_pop_time = first.pop_ms if first else None
            rated.add(topic)
        now_ms = mono_ms(self.clock)
        stats.consume_tps = float(sum(self.stats.group_rate(group, topic, now_ms) for topic in rated))
        return stats

    @handles(RequestCode.CLONE_GROUP_OFFSET)
    async def clone_group_offset(self, _connection: Connection, frame: Frame) -> Frame:
        """Copy a group's offsets to another group; of an online group only those in its subscriptions."""
        header = frame.header(headers.CloneGroupOffsetRequestHeader)
        check_group(header.dest_group, frame.version)
        topics = {header.topic} if header.topic else self.tables.offsets.topics_of(header.src_group)
        online = self.consumers.groups.get(header.src_group)
        async for topic in Turns().each(topics):
            if topic not in self.tables.topics.table:
                continue
            if not header.offline and online is not None and topic not in online.subscriptions:
                continue
            self.tables.offsets.clone(header.src_group, header.dest_group, topic)
        return frame.response()

    @handles(RequestCode.QUERY_CORRECTION_OFFSET)
    async def query_correction_offset(self, _connection: Connection, frame: Frame) -> Frame:
        """Return, for each queue of a topic, the lowest offset of all groups except those in `filterGroups`.

        Offsets below the queue's minimum offset are ignored. If the offset of `compareGroup` in a queue is
        lower than this lowest offset, INT64_MAX is returned for the queue (docs/reference/remoting.md,
        Statistics and connections).
        """
        header = frame.header(headers.QueryCorrectionOffsetRequestHeader)
        topic, offsets = header.topic, self.tables.offsets
        left_out = set((header.filter_groups or "").split(","))
        lowest: dict[int, int] = {}
        async for group in Turns().each(offsets.groups_of(topic) - left_out):
            for queue_id, offset in offsets.queues(group, topic).items():
                if offset >= self.store.min_offset(topic, queue_id):
                    lowest[queue_id] = min(offset, lowest.get(queue_id, offset))
        for queue_id, offset in offsets.queues(header.compare_group, topic).items():
            if lowest.get(queue_id, offset) > offset:
                lowest[queue_id] = INT64_MAX
        body = bodies.QueryCorrectionOffsetBody(correction_offsets=lowest)
        return frame.response(body=await encoded(body, len(lowest)))

    @handles(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO)
    def query_topic_consume_by_who(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the groups that subscribe to a topic or have offsets in it."""
        topic = frame.header(headers.TopicRequestHeader).topic
        groups = self.consumers.groups_of_topic(topic) | self.tables.offsets.groups_of(topic)
        return frame.response(body=bodies.GroupList(group_list=sorted(groups)).encode())

    @handles(RequestCode.QUERY_TOPICS_BY_CONSUMER)
    def query_topics_by_consumer(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the topics in which a group has offsets."""
        group = frame.header(QueryTopicsByConsumerRequestHeader).group
        topics = sorted(self.tables.offsets.topics_of(group))
        return frame.response(body=TopicsOfGroup(topics, self.address.text).encode())


def _is_consumed(topic: str, group: str, online: ConsumerGroup) -> bool:
    """Return whether a group subscribes to a topic, or the topic holds retries of a topic that it pops."""
    topics, retry = online.subscriptions, RETRY_PREFIX + group
    return not topics or topic in topics or (topic.startswith(retry) and topic[len(retry) + 1 :] in topics)
