"""The handling of a listener's results: consumed messages are committed, failed ones are consumed again.

A failed message is sent back to its broker, otherwise to the group's retry topic, otherwise consumed again in
this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from cometmq import logs
from cometmq.client.consumer.listener import ConsumeContext, ConsumeStatus
from cometmq.client.consumer.retry_topic import RetryTopic
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.process_queue import Batch, ProcessQueue
from cometmq.errors import CometError
from cometmq.message import MessageExt

__all__ = ["Acknowledger"]

log = logs.logger("cometmq.client.consumer")

_AGAIN_HERE_S = 5.0
"""Seconds before a retry in this process, if neither broker nor retry topic accepts a message."""
_OVERDUE_LEVEL = 3


class Acknowledger:
    """The consume mode of a listener without message order (see consuming.ConsumeMode).

    made_room, consume_again and left are notified of queues that hold fewer messages, of batches that failed
    here, and of revoked queues whose last call has ended.
    """

    later = ConsumeStatus.RECONSUME_LATER
    handled = (ConsumeStatus.SUCCESS,)

    def __init__(
        self,
        group: ConsumerGroup,
        made_room: Callable[[ProcessQueue], None],
        consume_again: Callable[[list[Batch]], None],
        left: Callable[[ProcessQueue], None],
    ) -> None:
        self._group = group
        self._made_room = made_room
        self._consume_again = consume_again
        self._left = left
        self.retry_topic = RetryTopic(group.instance, group.name, group.options.most_reconsume_times)
        self._timers: set[asyncio.TimerHandle] = set()

    async def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        await self.retry_topic.close()

    def begin(self, batch: Batch) -> ConsumeContext | None:
        """Return the context of a batch's call, None if the batch was sent back or its queue was revoked."""
        queue = batch.queue
        if batch.done or queue.dropped or queue.leaving:
            return None
        queue.calls += 1
        return ConsumeContext(queue.message_queue)

    async def acknowledge(self, batch: Batch, status: ConsumeStatus, context: ConsumeContext) -> None:
        """Commit or send back the messages of a batch, according to the listener's result."""
        queue = batch.queue
        try:
            if batch.done or queue.dropped:
                return  # overdue and sent back already, or the queue was revoked
            delay_level, ack_index = context.delay_level, context.ack_index
            if not isinstance(delay_level, int) or not isinstance(ack_index, int | None):
                wrong = f"delay_level {delay_level!r}, ack_index {ack_index!r}"
                log.warning(
                    "listener context with %s, not whole numbers: all is consumed again",
                    wrong,
                )
                delay_level, ack_index = 0, -1
            failed = _failed_messages(batch.messages, status, ack_index)
            if not failed or await self._went_back(batch, failed, delay_level):
                self._finish(batch)
        finally:
            queue.calls -= 1
            if queue.leaving and not queue.calls:
                self._left(queue)

    async def _went_back(self, batch: Batch, failed: Iterable[MessageExt], delay_level: int) -> bool:
        """Send messages back and return whether the batch is finished. The others are consumed again here."""
        kept = await self._send_back_all(failed, delay_level)
        if batch.done or batch.queue.dropped:
            return False
        if kept:
            batch.queue.keep(batch, kept)
            self._again_later(batch)
        return not kept

    async def overdue(self, batch: Batch) -> None:
        """Send back a batch whose call exceeds the consume timeout, so that the offset can advance."""
        kept = await self._send_back_all(batch.messages, _OVERDUE_LEVEL)
        if not kept and not batch.done and not batch.queue.dropped:
            self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        offset = batch.queue.finish(batch)
        if offset is not None:
            self._group.offsets.update(batch.queue.message_queue, offset)
        self._made_room(batch.queue)

    async def _send_back_all(self, messages: Iterable[MessageExt], delay_level: int) -> list[MessageExt]:
        """Send messages back and return those for which that failed."""
        kept: list[MessageExt] = []
        for message in messages:
            if not self._group.clustering:
                log.warning("broadcasting: message %s of %s failed, dropped", message.msg_id, message.topic)
                continue
            try:
                await self.retry_topic.send_back(message, delay_level)
            except CometError as error:
                log.warning(
                    "message %s was not sent back, it is retried here: %s",
                    message.msg_id,
                    error,
                )
                message.reconsume_times += 1
                kept.append(message)
        return kept

    def _again_later(self, batch: Batch) -> None:
        def again() -> None:
            self._timers.discard(timer)
            self._consume_again([batch])

        timer = asyncio.get_running_loop().call_later(_AGAIN_HERE_S, again)
        self._timers.add(timer)


def _failed_messages(
    messages: list[MessageExt], status: ConsumeStatus, ack_index: int | None
) -> list[MessageExt]:
    if status is not ConsumeStatus.SUCCESS:
        return messages
    if ack_index is None:
        return []
    return messages[max(ack_index, -1) + 1 :]
