"""Handlers of the requests by which tools show lite topics, and slaves copy the offsets in them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.times import mono_ms
from cometmq.broker.base.turns import Turns, encoded
from cometmq.broker.lite.lite_queues import Lag
from cometmq.broker.lite.service import LiteService
from cometmq.errors import CommandError
from cometmq.protocol import lite
from cometmq.protocol.bodies import LiteState, OffsetWrapper, TopicOffset
from cometmq.protocol.bodies import admin as bodies
from cometmq.protocol.codes import RequestCode, ResponseCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import TopicRequestHeader
from cometmq.protocol.headers import admin as headers
from cometmq.remoting import Connection
from cometmq.store import Reads

OFFSETS_PER_PAGE = 2_000
MAX_COPIED_SUBSCRIPTIONS = 10_000
"""The number of subscriptions above which slaves get none, because any change makes them copy all."""
MAX_LISTED = 10_000
"""The maximum number of lite topics in one response, as in Apache's broker."""
DEFAULT_LISTED, DEFAULT_TOP = 1_000, 20


class LiteAdmin(msgspec.Struct, eq=False):
    """Answers requests about lite topics."""

    config: BrokerConfig
    service: LiteService

    # -- checks

    def _check_parent(self, topic: str) -> int:
        """Return the minutes after which lite topics of a parent expire. Raises CommandError."""
        config = self.service.tables.topics.existing(topic)
        if not lite.is_lite_parent(config.attributes):
            raise CommandError(
                ResponseCode.INVALID_PARAMETER,
                f"topic[{topic}] has no lite topics: its attribute message.type is not LITE",
            )
        self.service.check_ready(topic)
        return lite.expiration_minutes(config.attributes)

    def _parent_of(self, group: str, expected: str | None = None) -> str:
        """Return the parent topic of a group. Raises CommandError, also if it is not the expected one."""
        settings = self.service.tables.groups.table.get(group)
        if settings is None:
            raise CommandError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group[{group}] not exist"
            )
        parent = lite.bound_topic(settings.attributes)
        if not parent or expected not in (None, parent):
            raise CommandError(
                ResponseCode.INVALID_PARAMETER,
                f"group[{group}] is not bound to {expected or 'a parent topic'}: its attribute "
                f"lite.bind.topic is {parent or 'not set'}",
            )
        self._check_parent(parent)
        return parent

    def _groups_of(self, parent: str) -> list[str]:
        groups = self.service.tables.groups.table
        return sorted(name for name, each in groups.items() if lite.bound_topic(each.attributes) == parent)

    # -- the state

    @handles(RequestCode.GET_BROKER_LITE_INFO)
    async def get_broker_lite_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the numbers of lite topics, subscriptions and leases of this broker."""
        service, tables = self.service, self.service.tables
        parents = {
            name: lite.expiration_minutes(each.attributes)
            for name, each in sorted(tables.topics.table.items())
            if lite.is_lite_parent(each.attributes)
        }
        body = bodies.LiteBrokerInfo(
            max_lmq_num=self.config.max_lmq_consume_queue_num,
            current_lmq_num=service.queues.count,
            lite_subscription_count=service.subscriptions.count,
            order_info_count=len(service.leases),
            cq_table_size=len(service.store.queues),
            offset_table_size=len(tables.offsets),
            event_map_size=len(service.subscriptions),
            topic_meta=parents,
            group_meta={name: self._groups_of(name) for name in parents},
        )
        return frame.response(body=await encoded(body, len(parents)))

    @handles(RequestCode.GET_PARENT_TOPIC_INFO)
    async def get_parent_topic_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the groups and the number of lite topics of a parent topic."""
        topic = frame.header(TopicRequestHeader).topic
        minutes, queues = self._check_parent(topic), self.service.queues
        queues.flush()
        body = bodies.ParentTopicInfo(
            topic=topic,
            ttl=minutes,
            groups=self._groups_of(topic),
            lmq_num=queues.count,
            lite_topic_count=await asyncio.to_thread(queues.count_of, topic),
        )
        return frame.response(body=body.encode())

    @handles(RequestCode.GET_LITE_TOPIC_INFO)
    async def get_lite_topic_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the offsets and the subscribers of a lite topic."""
        header, service = frame.header(headers.GetLiteTopicInfoHeader), self.service
        parent, name = header.parent_topic, header.lite_topic
        self._check_parent(parent)
        lmq, queues = lite.lmq_name(parent, name), service.queues
        end, begin = queues.end(lmq), service.store.log.readable_min
        units = queues.units(lmq, 0, 1, begin)
        body = bodies.LiteTopicInfo(
            parent_topic=parent,
            lite_topic=name,
            subscriber=[
                bodies.LiteSubscriber(each.client_id, each.group) for each in service.subscriptions.of(lmq)
            ],
            topic_offset=TopicOffset(units[0][0] if units else end, end, queues.stored_ms(lmq)),
        )
        return frame.response(body=await encoded(body, len(body.subscriber)))

    @handles(RequestCode.LIST_LITE_TOPICS)
    async def list_lite_topics(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the first lite topics of a parent whose names begin with a prefix."""
        header, service = frame.header(headers.ListLiteTopicsHeader), self.service
        parent = header.parent_topic
        self._check_parent(parent)
        at_most = min(max(DEFAULT_LISTED if header.max_count is None else header.max_count, 1), MAX_LISTED)
        groups, queues = set(self._groups_of(parent)), service.queues
        queues.flush()
        rows = await asyncio.to_thread(queues.listed, parent, header.prefix or "", at_most + 1)
        found: dict[str, bodies.LiteTopicState] = {}
        async for lmq, begin, end, stored_ms, group, offset in Turns().each(rows):
            state = found.get(lmq)
            if state is None:
                subscribers = service.subscriptions.of(lmq)
                lags = {each.group: end for each in subscribers}
                state = found[lmq] = bodies.LiteTopicState(
                    lite.lite_topic_of(lmq), begin, end, stored_ms, len(subscribers), lags
                )
            if group in groups:
                state.lags[group] = max(end - offset, 0)
        body = bodies.LiteTopicList(list(found.values())[:at_most], len(found) > at_most)
        return frame.response(body=await encoded(body, len(body.topics)))

    @handles(RequestCode.GET_LITE_CLIENT_INFO)
    async def get_lite_client_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the lite topics to which a client is subscribed."""
        header, service = frame.header(headers.GetLiteClientInfoHeader), self.service
        parent = self._parent_of(header.group, header.parent_topic)
        body = bodies.LiteClientInfo(parent_topic=parent, group=header.group, client_id=header.client_id)
        found = service.subscriptions.find(header.client_id, header.group)
        if found is not None:
            at_most = DEFAULT_LISTED if header.max_count is None else min(header.max_count, MAX_LISTED)
            body.lite_topic_count = len(found.lmqs)
            body.lite_topic_set = sorted(found.lmqs)[: max(at_most, 0)]
            body.last_access_time = service.clock.time_ms() - (mono_ms(service.clock) - found.seen_ms)
        return frame.response(body=await encoded(body, len(body.lite_topic_set)))

    @handles(RequestCode.GET_LITE_GROUP_INFO)
    async def get_lite_group_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the progress of a group in a lite topic, or the lite topics with the largest lags."""
        header = frame.header(headers.GetLiteGroupInfoHeader)
        parent = self._parent_of(header.group)
        body = bodies.LiteGroupInfo(
            group=header.group, parent_topic=parent, lite_topic=header.lite_topic or None
        )
        if header.lite_topic:
            await self._add_progress(body, lite.lmq_name(parent, header.lite_topic))
        else:
            queues = self.service.queues
            queues.flush()
            at_most = min(max(DEFAULT_TOP if header.top_k is None else header.top_k, 0), MAX_LISTED)
            total, largest, oldest = await asyncio.to_thread(queues.lags, header.group, at_most)
            body.total_lag_count = total
            body.lag_count_top_k = await self._lags(largest)
            body.lag_timestamp_top_k = await self._lags(oldest)
            if oldest:
                body.earliest_unconsumed_timestamp = body.lag_timestamp_top_k[0].earliest_unconsumed_timestamp
        return frame.response(body=await encoded(body, len(body.lag_count_top_k or ())))

    async def _add_progress(self, body: bodies.LiteGroupInfo, lmq: str) -> None:
        queues = self.service.queues
        end, offset = queues.end(lmq), queues.query(body.group, lmq, 0)
        if not end:
            body.total_lag_count = -1
            return
        begin = self.service.store.log.readable_min
        following = queues.units(lmq, max(offset, 0), 1, begin)
        last = [each for each in queues.units(lmq, offset - 1, 1, begin) if each[0] < offset]
        times = await self._store_times([position for _, position in (*following, *last)])
        body.total_lag_count = end - max(offset, 0)
        if following:
            body.earliest_unconsumed_timestamp = times[0]
        if offset >= 0:
            last_ms = times[-1] if last else 0
            body.lite_topic_offset_wrapper = OffsetWrapper(end, offset, last_ms)

    async def _lags(self, lags: Sequence[Lag]) -> list[bodies.LiteLag]:
        times = await self._store_times([position for _, _, position in lags])
        return [
            bodies.LiteLag(lite.lite_topic_of(lmq), lag, ms)
            for (lmq, lag, _), ms in zip(lags, times, strict=True)
        ]

    async def _store_times(self, positions: Sequence[int | None]) -> list[int]:
        """Return the store times of the records at log positions, in epoch ms, or -1 where there is none."""
        store = self.service.store

        def read(reads: Reads) -> list[int]:
            return [-1 if each is None else store.lookups.store_time_at(each, reads) for each in positions]

        return await store.executor.query(read)

    @handles(RequestCode.TRIGGER_LITE_DISPATCH)
    async def trigger_lite_dispatch(self, _connection: Connection, frame: Frame) -> Frame:
        """Offer all lite topics with unconsumed messages to a group's clients once more."""
        header, service = frame.header(headers.TriggerLiteDispatchHeader), self.service
        self._parent_of(header.group)
        turns = Turns()
        for subscriber in service.subscriptions:
            if subscriber.group == header.group and header.client_id in (None, "", subscriber.client_id):
                async for lmq in turns.each(list(subscriber.lmqs)):
                    if lmq in subscriber.lmqs:
                        service.pops.add_ready(subscriber, [lmq])
        return frame.response()

    # -- slaves

    @handles(RequestCode.GET_LITE_STATE)
    async def get_lite_state(self, _connection: Connection, frame: Frame) -> Frame:
        """Return consumer offsets and subscriptions that have changed after a change."""
        header, service = frame.header(headers.GetLiteStateHeader), self.service
        queues, body = service.queues, LiteState()
        if service.is_open:
            known = header.epoch == queues.epoch
            since = header.since if known else 0
            body.subscription_change = queues.subscription_change
            changed = not known or header.subscriptions != body.subscription_change
            if changed and service.subscriptions.count <= MAX_COPIED_SUBSCRIPTIONS:
                body.subscriptions = queues.subscriptions()
            queues.flush()
            body.epoch = queues.epoch
            body.changes = await asyncio.to_thread(queues.changed_offsets, since, OFFSETS_PER_PAGE)
            body.more = len(body.changes) == OFFSETS_PER_PAGE
            body.log_end = service.store.visible_end
        return frame.response(body=await encoded(body, len(body.changes)))
