"""Heartbeats (34), unregistering (35), consumer lists (38), client checks (46) and queue locks (41, 42)."""

from __future__ import annotations

from cometmq.broker.context import BrokerContext
from cometmq.broker.subscriptions import is_tag_type
from cometmq.broker.topics import UNIT_SUB_FLAG
from cometmq.broker.turns import encoded, slices
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import (
    CheckClientRequestBody,
    ConsumerData,
    ConsumerList,
    HeartbeatData,
    LockBatchBody,
    LockBatchResult,
)
from cometmq.protocol.codes import RETRY_PREFIX, RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import GetConsumerListByGroupRequestHeader, UnregisterClientRequestHeader
from cometmq.remoting import CommandError, Connection, Handler


class ClientProcessor:
    """Handles what clients say about themselves, and tells groups when their membership changes."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    def handlers(self) -> dict[int, Handler]:
        """Request code -> handler."""
        return {
            RequestCode.HEART_BEAT: self.heartbeat,
            RequestCode.UNREGISTER_CLIENT: self.unregister,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            RequestCode.CHECK_CLIENT_CONFIG: self.check_client,
            RequestCode.LOCK_BATCH_MQ: self.lock,
            RequestCode.UNLOCK_BATCH_MQ: self.unlock,
        }

    def heartbeat(self, connection: Connection, frame: Frame) -> Frame:
        """34: the client's groups and subscriptions."""
        data = HeartbeatData.decode(frame.body)
        context = self._context
        now_ms = context.clock.time_ms()
        client = (data.client_id, str(frame.language), frame.version)
        for consumer in data.consumer_data_set:
            self._consumer(connection, client, consumer, now_ms)
        for producer in data.producer_data_set:
            context.producers.register(producer.group_name, connection, *client, now_ms)
        return frame.response(ResponseCode.SUCCESS)

    def _consumer(
        self, connection: Connection, client: tuple[str, str, int], data: ConsumerData, now_ms: int
    ) -> None:
        context = self._context
        group = data.group_name
        settings = context.groups.find(group)
        if settings is not None:
            flag = UNIT_SUB_FLAG if data.unit_mode else 0
            context.topics.ensure(RETRY_PREFIX + group, settings.retry_queue_nums, sys_flag=flag)
        described = (str(data.consume_type), str(data.message_model), str(data.consume_from_where))
        changed = context.consumers.register(
            group, connection, client, described, data.subscription_data_set, now_ms
        )
        if changed:
            context.notify_group(group)

    def unregister(self, connection: Connection, frame: Frame) -> Frame:
        """35: the client leaves the groups that are named."""
        header = frame.header(UnregisterClientRequestHeader)
        context = self._context
        if header.producer_group:
            context.producers.unregister(header.producer_group, connection)
        if header.consumer_group and context.consumers.unregister(header.consumer_group, connection):
            context.notify_group(header.consumer_group)
        return frame.response(ResponseCode.SUCCESS, ext={})

    def closed(self, connection: Connection) -> None:
        """A connection is gone: its clients leave, and their groups hear of it."""
        context = self._context
        context.producers.channel_closed(connection)
        for group in context.consumers.channel_closed(connection):
            context.notify_group(group)

    def expire(self) -> None:
        """Every 10 s: close the connections of clients that were silent for 120 s."""
        context = self._context
        now_ms = context.clock.time_ms()
        silent, groups = context.consumers.expire(now_ms)
        for channel in [*silent, *context.producers.expire(now_ms)]:
            channel.close()
        for group in groups:
            context.notify_group(group)

    def consumer_list(self, _connection: Connection, frame: Frame) -> Frame:
        """38: the client ids of a group."""
        group = frame.header(GetConsumerListByGroupRequestHeader).consumer_group
        known = self._context.consumers.groups.get(group)
        ids = known.members.client_ids() if known is not None else []
        if not ids:
            raise CommandError(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group}", ext={})
        return frame.response(ResponseCode.SUCCESS, body=ConsumerList(consumer_id_list=ids).encode())

    def check_client(self, _connection: Connection, frame: Frame) -> Frame:
        """46: whether a subscription other than by tags would be served."""
        subscription = CheckClientRequestBody.decode(frame.body).subscription_data
        if subscription is not None and not is_tag_type(subscription.expression_type):
            raise CommandError(
                ResponseCode.SYSTEM_ERROR,
                f"The broker does not support consumer to filter message by {subscription.expression_type}",
            )
        return frame.response(ResponseCode.SUCCESS)

    async def lock(self, _connection: Connection, frame: Frame) -> Frame:
        """41: take or renew queue locks; answers those held now."""
        body = LockBatchBody.decode(frame.body)
        context = self._context
        held: list[MessageQueue] = []
        async for queues in slices(body.mq_set):
            held += context.locks.lock(body.consumer_group, body.client_id, queues, context.clock.time_ms())
        answer = await encoded(LockBatchResult(lock_ok_mq_set=held), len(held))
        return frame.response(ResponseCode.SUCCESS, body=answer)

    async def unlock(self, _connection: Connection, frame: Frame) -> Frame:
        """42: give queue locks up."""
        body = LockBatchBody.decode(frame.body)
        async for queues in slices(body.mq_set):
            self._context.locks.unlock(body.consumer_group, body.client_id, queues)
        return frame.response(ResponseCode.SUCCESS)
