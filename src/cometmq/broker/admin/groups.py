"""What tools ask about the groups of a broker as a whole: 303, 314, 317, 328, 343 and 345."""

from __future__ import annotations

import time

from cometmq.broker.admin.stats import StatsAdmin
from cometmq.broker.base.names import check_group
from cometmq.broker.base.turns import Turns, encoded
from cometmq.broker.context import BrokerContext
from cometmq.errors import CommandError
from cometmq.protocol.bodies import (
    Body,
    BrokerConsumeStats,
    ConsumeStats,
    ConsumeTimeSpan,
    ProducerInfo,
    ProducerTableInfo,
    QueryConsumeTimeSpanBody,
    SubscriptionData,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    CloneGroupOffsetRequestHeader,
    GetBrokerConsumeStatsRequestHeader,
    Header,
    QueryConsumeTimeSpanRequestHeader,
)
from cometmq.remoting import Connection, Handler
from cometmq.store import Reads

SUCCESS = ResponseCode.SUCCESS


class QuerySubscriptionRequestHeader(Header, gc=False):
    """Codes 343 and 345 (5.x)."""

    group: str
    topic: str | None = None


class TopicsOfGroup(Body):
    """Answer to 343."""

    topic_list: list[str]
    broker_addr: str | None = None


class SubscriptionOfGroup(Body):
    """Answer to 345."""

    group: str
    topic: str
    subscription_data: SubscriptionData | None = None


class GroupAdmin:
    """Answers from the tables of groups, offsets and clients."""

    def __init__(self, context: BrokerContext, stats: StatsAdmin) -> None:
        self._context = context
        self._stats = stats

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {
            RequestCode.QUERY_CONSUME_TIME_SPAN: self.time_span,
            RequestCode.CLONE_GROUP_OFFSET: self.clone_offsets,
            RequestCode.GET_BROKER_CONSUME_STATS: self.all_progress,
            RequestCode.GET_ALL_PRODUCER_INFO: self.producers,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self.topics_of_group,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self.subscription_of_group,
        }

    async def time_span(self, _connection: Connection, frame: Frame) -> Frame:
        """303: store times of each queue's first, last, and last consumed message."""
        header = frame.header(QueryConsumeTimeSpanRequestHeader)
        topic, group = header.topic, header.group
        config = self._context.topics.get(topic)
        if config is None:
            raise CommandError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        spans = []
        turns = Turns()
        for queue_id in range(config.write_queue_nums):
            await turns.queue()
            spans.append(await self._span(topic, group, queue_id))
        body = QueryConsumeTimeSpanBody(consume_time_span_set=spans)
        return frame.response(SUCCESS, body=await encoded(body, len(spans)))

    async def _span(self, topic: str, group: str, queue_id: int) -> ConsumeTimeSpan:
        context = self._context
        store = context.store
        first, behind = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        consumed = context.offsets.query(group, topic, queue_id)

        def times(reads: Reads) -> list[int]:
            offsets = (first, behind - 1, consumed - 1, max(consumed, first))
            queue = store.queues.find(topic, queue_id)
            return [store.lookups.store_time_of(queue, offset, reads) for offset in offsets]

        earliest, latest, reached, waiting = await store.off_loop.ask(times)
        if consumed <= 0:
            reached = earliest
        behind_ms = 0
        if first < behind and consumed < behind:
            behind_ms = context.clock.time_ms() - waiting
        return ConsumeTimeSpan(
            message_queue=context.queue(topic, queue_id),
            min_time_stamp=earliest,
            min_time_stamp_str=time_text(earliest),
            max_time_stamp=latest,
            max_time_stamp_str=time_text(latest),
            consume_time_stamp=reached,
            consume_time_stamp_str=time_text(reached),
            delay_time=behind_ms,
        )

    async def clone_offsets(self, _connection: Connection, frame: Frame) -> Frame:
        """314: give a group the offsets of another. An online source clones what it subscribes only."""
        header = frame.header(CloneGroupOffsetRequestHeader)
        context = self._context
        check_group(header.dest_group, frame.version)
        topics = {header.topic} if header.topic else context.offsets.topics_of(header.src_group)
        online = context.consumers.groups.get(header.src_group)
        turns = Turns()
        for topic in topics:
            await turns.queue()
            if topic not in context.topics.table:
                continue
            if not header.offline and online is not None and topic not in online.subscriptions:
                continue
            context.offsets.clone(header.src_group, header.dest_group, topic)
        return frame.response(SUCCESS)

    async def all_progress(self, _connection: Connection, frame: Frame) -> Frame:
        """317: how far every group is in every topic in which it has offsets."""
        only_ordered = bool(frame.header(GetBrokerConsumeStatsRequestHeader).is_order)
        context = self._context
        listed: list[dict[str, list[ConsumeStats]]] = []
        total = entries = 0
        turns = Turns()
        for group in sorted(context.groups.table):
            tables = []
            await turns.queue()
            for topic in sorted(context.offsets.topics_of(group)):
                if only_ordered and not context.topics.is_order(topic):
                    continue
                stats = await self._stats.progress_of(group, [topic], turns)
                if stats.offset_table:
                    tables.append(stats)
                    entries += len(stats.offset_table)
                    total += sum(
                        row.broker_offset - row.consumer_offset for row in stats.offset_table.values()
                    )
            listed.append({group: tables})
        body = BrokerConsumeStats(broker_addr=context.addr, consume_stats_list=listed, total_diff=total)
        return frame.response(SUCCESS, body=await encoded(body, entries + len(listed)))

    def producers(self, _connection: Connection, frame: Frame) -> Frame:
        """328: every producer group and its clients."""
        context = self._context
        shift = context.clock.time_ms() - context.mono_ms()  # tools want wall-clock milliseconds
        table = {
            group: [
                ProducerInfo(
                    client_id=client.client_id,
                    remote_ip=f"/{client.channel.peer}",
                    language=client.language,
                    version=client.version,
                    last_update_timestamp=client.seen_ms + shift,
                )
                for client in members.by_channel.values()
            ]
            for group, members in context.producers.groups.items()
        }
        return frame.response(SUCCESS, body=ProducerTableInfo(data=table).encode())

    def topics_of_group(self, _connection: Connection, frame: Frame) -> Frame:
        """343: topics in which a group has offsets."""
        group = frame.header(QuerySubscriptionRequestHeader).group
        topics = sorted(self._context.offsets.topics_of(group))
        return frame.response(SUCCESS, body=TopicsOfGroup(topics, self._context.addr).encode())

    def subscription_of_group(self, _connection: Connection, frame: Frame) -> Frame:
        """345: what a group subscribes of a topic now."""
        header = frame.header(QuerySubscriptionRequestHeader)
        topic = header.topic or ""
        found = self._context.consumers.subscription(header.group, topic)
        return frame.response(SUCCESS, body=SubscriptionOfGroup(header.group, topic, found).encode())


def time_text(when_ms: int) -> str | None:
    """A time as Apache prints it here: 2026-11-20#10:31:57:286, in local time; None for no time."""
    if when_ms < 0:
        return None
    return time.strftime("%Y-%m-%d#%H:%M:%S", time.localtime(when_ms / 1000)) + f":{when_ms % 1000:03d}"
