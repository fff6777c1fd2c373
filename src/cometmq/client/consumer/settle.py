"""After the listener: what is done is committed, what failed is sent back to be consumed again later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from cometmq import logs
from cometmq.client.consumer.consuming import Consuming
from cometmq.client.consumer.group import ConsumerGroup
from cometmq.client.consumer.listener import ConsumeContext, ConsumeStatus
from cometmq.client.consumer.process_queue import Batch, ProcessQueue
from cometmq.client.consumer.send_back import SendBack
from cometmq.errors import CometError
from cometmq.message import MessageExt

__all__ = ["Settler"]

log = logs.logger("cometmq.client.consumer")

_AGAIN_HERE_S = 5.0
"""When neither the broker nor the retry topic takes a failed message: the next try is in this process."""
_OVERDUE_LEVEL = 3


class Settler:
    def __init__(
        self, group: ConsumerGroup, send_back: SendBack, made_room: Callable[[ProcessQueue], None]
    ) -> None:
        self._group = group
        self._send_back = send_back
        self._made_room = made_room
        self._consuming: Consuming | None = None
        self._timers: set[asyncio.TimerHandle] = set()

    def feeds(self, consuming: Consuming) -> None:
        """Where batches go that must be consumed again here."""
        self._consuming = consuming

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    async def settle(self, batch: Batch, status: ConsumeStatus, context: ConsumeContext) -> None:
        if batch.done or batch.queue.dropped:
            return  # overdue and sent back already, or somebody else's queue by now
        failed = _failed_messages(batch.messages, status, context)
        if failed:
            kept = await self._give_back(failed, context.delay_level)
            if batch.done or batch.queue.dropped:
                return
            if kept:
                batch.queue.keep(batch, kept)
                self._again_later(batch)
                return
        self._finish(batch)

    async def overdue(self, batch: Batch) -> None:
        """The listener takes longer than the consume time-out: let the queue's offset pass its messages."""
        kept = await self._give_back(batch.messages, _OVERDUE_LEVEL)
        if not kept and not batch.done and not batch.queue.dropped:
            self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        offset = batch.queue.finish(batch)
        if offset is not None:
            self._group.offsets.update(batch.queue.message_queue, offset)
        self._made_room(batch.queue)

    async def _give_back(self, messages: Iterable[MessageExt], delay_level: int) -> list[MessageExt]:
        """Send messages back; those that could not be."""
        if not self._group.clustering:
            for message in messages:
                log.warning("broadcasting: failed message %s of %s is dropped", message.msg_id, message.topic)
            return []
        kept: list[MessageExt] = []
        for message in messages:
            try:
                await self._send_back(message, delay_level)
            except CometError as error:
                log.warning("message %s could not be sent back, next try here: %s", message.msg_id, error)
                message.reconsume_times += 1
                kept.append(message)
        return kept

    def _again_later(self, batch: Batch) -> None:
        def again() -> None:
            self._timers.discard(timer)
            if self._consuming is not None:
                self._consuming.submit([batch])

        timer = asyncio.get_running_loop().call_later(_AGAIN_HERE_S, again)
        self._timers.add(timer)


def _failed_messages(
    messages: list[MessageExt], status: ConsumeStatus, context: ConsumeContext
) -> list[MessageExt]:
    if status is not ConsumeStatus.SUCCESS:
        return messages
    if context.ack_index is None:
        return []
    return messages[max(context.ack_index, -1) + 1 :]
