"""A push consumer as brokers and its client instance see it: heartbeats, and answers to what brokers ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping

from cometmq.client.consumer.listener import ConsumeStatus
from cometmq.client.consumer.membership import Held
from cometmq.client.consumer.push_session import PushSession
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.bodies import (
    ConsumeMessageDirectlyResult,
    ConsumerData,
    ConsumerRunningInfo,
    ProcessQueueInfo,
)
from cometmq.protocol.codes import VERSION_4_9_7, version_name

__all__ = ["PushPeer"]

_MIB = 1024 * 1024


class PushPeer:
    """The ConsumerPeer of a running push consumer."""

    def __init__(self, session: PushSession) -> None:
        self._session = session

    def topics(self) -> Collection[str]:
        return self._session.group.subscriptions.keys()

    def heartbeat(self) -> ConsumerData:
        group = self._session.group
        return ConsumerData(
            group_name=group.name,
            consume_type="CONSUME_PASSIVELY",
            message_model=group.options.message_model.value,
            consume_from_where=group.options.consume_from_where.value,
            subscription_data_set=[each.data() for each in group.subscriptions.values()],
            unit_mode=False,
        )

    def wake_rebalance(self) -> None:
        self._session.members.wake()

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        await self._session.members.reset_offsets(table)

    async def offsets(self, topic: str) -> dict[MessageQueue, int]:
        snapshot = self._session.group.offsets.snapshot()
        return {queue: offset for queue, offset in snapshot.items() if queue.topic == topic}

    def running_info(self) -> ConsumerRunningInfo:
        session = self._session
        group = session.group
        options = group.options
        properties = {
            "PROP_NAMESERVER_ADDR": ";".join(group.instance.namesrv.addrs),
            "PROP_THREADPOOL_CORE_SIZE": str(options.consume_concurrency),
            "PROP_CONSUMEORDERLY": str(session.consuming.ordered).lower(),
            "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
            "PROP_CLIENT_VERSION": version_name(VERSION_4_9_7),
            "PROP_CONSUMER_START_TIMESTAMP": str(session.started_at_ms),
            "consumerGroup": group.name,
            "messageModel": options.message_model.value,
            "consumeFromWhere": options.consume_from_where.value,
            "pullBatchSize": str(options.pull_batch_size),
            "consumeMessageBatchMaxSize": str(options.consume_batch_max_size),
            "maxReconsumeTimes": str(options.max_reconsume_times),
        }
        return ConsumerRunningInfo(
            properties=properties,
            subscription_set=[each.data() for each in group.subscriptions.values()],
            mq_table={queue: self._queue_info(held) for queue, held in session.members.held.items()},
        )

    def _queue_info(self, held: Held) -> ProcessQueueInfo:
        queue = held.queue
        # The brokers' tools want wall-clock milliseconds; the client keeps monotonic seconds.
        shift = time.time() - asyncio.get_running_loop().time()
        bounds = queue.bounds()
        return ProcessQueueInfo(
            commit_offset=self._session.group.offsets.memory(queue.message_queue) or 0,
            cached_msg_min_offset=bounds[0],
            cached_msg_max_offset=bounds[1],
            cached_msg_count=queue.count,
            cached_msg_size_in_mib=queue.body_bytes // _MIB,
            locked=queue.locked,
            droped=queue.dropped,
            last_pull_timestamp=int((queue.last_pull_at + shift) * 1000),
            last_consume_timestamp=int((queue.last_consume_at + shift) * 1000),
        )

    async def consume_directly(self, message: MessageExt) -> ConsumeMessageDirectlyResult:
        begun = time.monotonic()
        remark: str | None = None
        try:
            status, _ = await self._session.consume_directly(message)
            result = "CR_SUCCESS" if status is ConsumeStatus.SUCCESS else "CR_LATER"
        except Exception as error:
            # The administrator who asked is told; nothing here depends on it.
            result, remark = "CR_THROW_EXCEPTION", repr(error)
        return ConsumeMessageDirectlyResult(
            order=self._session.consuming.ordered,
            consume_result=result,
            remark=remark,
            spent_time_mills=int((time.monotonic() - begun) * 1000),
        )
