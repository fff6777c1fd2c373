"""The handling of a listener's results: commit consumed messages, and consume failed messages again.

A failed message is sent back to its broker. If the broker does not accept the message, it is sent to the
group's retry topic. If that fails too, the message is consumed again in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

from cometmq import logs
from cometmq.client.consumer.consume_mode import ConsumeMode, ModeUser
from cometmq.client.consumer.handoff import Handoff
from cometmq.client.consumer.listener import ConsumeContext, ConsumeStatus
from cometmq.client.consumer.retry_topic import check_delay_level
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.process_queue import Batch, ProcessQueue
from cometmq.errors import CometError
from cometmq.message import MessageExt, MessageQueue

log = logs.logger("cometmq.client.consumer")

_LOCAL_RETRY_DELAY_S = 5.0
"""Seconds before this process consumes a failed message again that no broker accepted."""
OVERDUE_LEVEL = 3
_OVERDUE_PER_ROUND = 16


class Concurrent(ConsumeMode[ConsumeContext, ConsumeStatus]):
    """The consume mode of a listener that does not require message order."""

    success = ConsumeStatus.SUCCESS
    later = ConsumeStatus.RECONSUME_LATER
    handled = (ConsumeStatus.SUCCESS,)

    def __init__(self, group: ConsumerGroup, user: ModeUser) -> None:
        super().__init__(group, user)
        self._handoff: Handoff | None = None
        if group.clustering and group.options.handover_timeout_s > 0:
            self._handoff = Handoff(group)

    # -- queues

    def start(self) -> None:
        if self._handoff is not None:
            self._handoff.locks.start()

    async def close(self) -> None:
        if self._handoff is not None:
            await self._handoff.close()
        await self._pauses.finish(cancel=True)
        await self.retry_topic.close()

    async def claim(self, queues: Sequence[MessageQueue], *, alone: bool) -> Collection[MessageQueue]:
        return queues if self._handoff is None else await self._handoff.take(queues, alone=alone)

    async def revoke(self, queues: Sequence[ProcessQueue]) -> None:
        if self._handoff is not None:
            self._handoff.leave(queues)
            return
        for queue in queues:
            queue.dropped = True
        await self._group.offsets.release(queue.message_queue for queue in queues)

    async def finish_rebalance(self, held: Collection[MessageQueue]) -> None:
        if self._handoff is not None:
            await self._handoff.finish_rebalance(held)

    # -- batches

    def submit(self, batches: list[Batch]) -> None:
        self._user.consume(batches)

    def begin(self, batch: Batch) -> ConsumeContext | None:
        """Return the context of the call, None if the batch was sent back or its queue was revoked."""
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
                return  # the batch was overdue and has been sent back, or its queue was revoked
            failed, delay_level = failed_messages(batch.messages, status, context)
            if not failed or await self._send_back_failed(batch, failed, delay_level):
                self._finish(batch)
        finally:
            queue.calls -= 1
            if queue.leaving and not queue.calls:
                self._ended(queue)

    async def _send_back_failed(self, batch: Batch, failed: Iterable[MessageExt], delay_level: int) -> bool:
        """Send failed messages back, or consume them here again. Return whether the batch is finished."""
        kept = await self._send_back_all(failed, delay_level)
        if batch.done or batch.queue.dropped:
            return False
        if kept:
            batch.queue.keep(batch, kept)
            self._pauses.start(self._again_later(batch))
        return not kept

    def _ended(self, queue: ProcessQueue) -> None:
        if self._handoff is not None:
            self._handoff.ended(queue)

    def postpone(self, context: ConsumeContext, delay_level: int) -> ConsumeStatus:
        check_delay_level(delay_level)
        context.delay_level = delay_level
        return self.later

    async def handle_overdue(self, queues: Iterable[ProcessQueue], timeout_s: float) -> None:
        """Send back messages whose call exceeds `timeout_s`, because the call blocks the queue's offset."""
        before = asyncio.get_running_loop().time() - timeout_s
        for queue in queues:
            for _ in range(_OVERDUE_PER_ROUND):
                batch = queue.oldest_started_before(before)
                if batch is None or queue.dropped:
                    break
                log.warning(
                    "listener call for %s from offset %d has run for more than %g s; its messages "
                    "are sent back",
                    queue.message_queue, batch.first_offset, timeout_s,
                )  # fmt: skip
                kept = await self._send_back_all(batch.messages, OVERDUE_LEVEL)
                if not kept and not batch.done and not queue.dropped:
                    self._finish(batch)
                if not batch.done:
                    break

    def _finish(self, batch: Batch) -> None:
        offset = batch.queue.finish(batch)
        if offset is not None:
            self._group.offsets.update(batch.queue.message_queue, offset)
        self._user.made_room(batch.queue)

    async def _send_back_all(self, messages: Iterable[MessageExt], delay_level: int) -> list[MessageExt]:
        """Send messages back and return the messages that could not be sent back."""
        kept: list[MessageExt] = []
        for message in messages:
            if not self._group.clustering:
                log.warning(
                    "broadcasting: consumption of message %s of %s failed; the message is dropped",
                    message.msg_id,
                    message.topic,
                )
                continue
            try:
                await self.retry_topic.send_back(message, delay_level)
            except CometError as error:
                log.warning(
                    "could not send message %s back; this consumer retries it: %s", message.msg_id, error
                )
                message.reconsume_times += 1
                kept.append(message)
        return kept

    async def _again_later(self, batch: Batch) -> None:
        await asyncio.sleep(_LOCAL_RETRY_DELAY_S)
        self._user.consume([batch])


def failed_messages(
    messages: list[MessageExt], status: ConsumeStatus, context: ConsumeContext
) -> tuple[list[MessageExt], int]:
    """Return the messages to consume again, which are the last ones of the call, and their delay level."""
    delay_level, ack_index = context.delay_level, context.ack_index
    if not isinstance(delay_level, int) or not (ack_index is None or isinstance(ack_index, int)):
        wrong = f"delay_level {delay_level!r}, ack_index {ack_index!r}"
        log.warning(
            "the listener context contains %s instead of whole numbers: all messages of the call are "
            "consumed again",
            wrong,
        )
        delay_level, ack_index = 0, -1
    if status is not ConsumeStatus.SUCCESS:
        return messages, delay_level
    return [] if ack_index is None else messages[max(ack_index, -1) + 1 :], delay_level
