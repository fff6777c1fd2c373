"""The delivery of messages to a caller that acknowledges each message, instead of to a listener.

A message stays in the queue until the caller requests it. Messages that are not requested or not acknowledged
count towards the limits of their queue (FlowLimits). A queue at its limit is not pulled.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, TypeVar

from cometmq import logs
from cometmq.client.cluster.traces import Consumption
from cometmq.client.cluster.workers import for_each
from cometmq.client.consumer.consume_mode import ConsumeMode
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.process_queue import Batch, LeasedQueue
from cometmq.errors import ClientStateError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.traces import ConsumeCode
from cometmq.text import counted

log = logs.logger("cometmq.client.consumer")

C = TypeVar("C")
S = TypeVar("S", bound=Enum)

_WITHOUT_YIELD = 32
"""Number of messages after which next() yields, so that no caller blocks the event loop."""
_SENT_BACK_AT_ONCE = 32


@dataclass(frozen=True, slots=True, eq=False)
class _Delivered(Generic[C]):
    """A delivered message that waits for its acknowledgement. It is stored under the id() of its message.

    So it must keep the message alive: the id() of a deleted message may be reused for another object.
    """

    message: MessageExt
    batch: Batch
    context: C
    trace: Consumption | None

    @property
    def is_lost(self) -> bool:
        """Return whether the message will be delivered again: it has timed out or its queue was revoked."""
        return self.batch.done or self.batch.queue.dropped


class Delivery(Generic[C, S]):
    """The delivery of messages to the user of a stream, who acknowledges them. Each batch has one message."""

    def __init__(self, mode: ConsumeMode[C, S], group: ConsumerGroup) -> None:
        self._mode = mode
        self._group = group.name
        self._traces = group.instance.traces
        self._telemetry = group.instance.options.telemetry
        self.concurrency = group.options.consume_concurrency
        """The concurrency that is reported to brokers. The value has no effect on the delivery."""
        self._line: deque[Batch] = deque()
        self._arrived = asyncio.Event()
        self._delivered: dict[int, _Delivered[C]] = {}
        self._acknowledging = 0
        """The number of acknowledgements in progress."""
        self._settled = asyncio.Event()
        self._highest_acknowledged: dict[MessageQueue, int] = {}
        """The highest acknowledged offset of each queue."""
        self._in_a_row = 0
        self._stopping = False
        self._left = False
        self.consumed = 0
        self.failed = 0
        self.last_error: BaseException | None = None

    @property
    def running(self) -> int:
        """The number of delivered messages that the caller has not acknowledged yet."""
        return len(self._delivered)

    @property
    def waiting(self) -> int:
        """The number of messages that wait to be requested by the caller."""
        return len(self._line)

    def problem(self) -> str | None:
        """Return None, because a stream has no listener that could fail."""
        return None

    def start(self) -> None:
        """Do nothing: messages are delivered in the tasks that iterate over the stream."""

    def set_concurrency(self, concurrency: int) -> None:
        raise ClientStateError(
            f"a stream has no listener, so its messages cannot be handled in {concurrency} concurrent calls"
        )

    def submit(self, batches: Iterable[Batch]) -> None:
        if not self._stopping:
            self._line.extend(batches)
            self._arrived.set()

    async def next(self) -> MessageExt:
        """Wait for the next message and return it. Raises StopAsyncIteration after a stop."""
        begun_ns = time.time_ns()
        self._in_a_row += 1
        if self._in_a_row >= _WITHOUT_YIELD:
            self._in_a_row = 0
            await asyncio.sleep(0)
        while not self._stopping:
            if not self._line:
                self._in_a_row = 0
                self._arrived.clear()
                await self._arrived.wait()
                continue
            batch = self._line.popleft()
            context = self._mode.begin(batch)
            if context is None:
                continue
            batch.started_at = asyncio.get_running_loop().time()
            if batch.refusal is not None:
                await self._refuse(batch, context, batch.refusal)
                continue
            (message,) = batch.messages
            batch.add_start_time(time.time())
            trace = None if self._traces is None else self._traces.consuming(self._group, batch.messages)
            self._delivered[id(message)] = _Delivered(message, batch, context, trace)
            if self._telemetry is not None:
                self._telemetry.received(self._group, batch.messages, begun_ns)
            return message
        raise StopAsyncIteration

    async def _refuse(self, batch: Batch, context: C, refusal: Exception) -> None:
        self.last_error = refusal
        self.failed += 1
        log.warning(
            "offset %d of %s cannot be delivered: %s", batch.first_offset, batch.queue.message_queue, refusal
        )
        try:
            await self._mode.acknowledge(batch, self._mode.later, context)
        except BaseException:
            if not self._mode.repeats:
                self._line.appendleft(batch)
            raise

    async def ack(self, message: MessageExt) -> None:
        """Acknowledge a delivered message as consumed. A call that is cancelled does not acknowledge it.

        Raises ClientStateError if the message was not delivered, or is about to be delivered again.
        """
        await self._acknowledge(message, self._mode.success)

    async def nack(self, message: MessageExt, delay_level: int) -> None:
        """Request another delivery of a message. Raises ConfigError and the errors of `ack`."""
        await self._acknowledge(message, self._mode.postpone(self._of(message).context, delay_level))

    async def _acknowledge(self, message: MessageExt, status: S) -> None:
        delivered = self._of(message)
        del self._delivered[id(message)]
        if delivered.is_lost:
            await self._end(delivered)
            raise _unknown(message)
        batch = delivered.batch
        begun = batch.started_at
        self._acknowledging += 1
        try:
            await self._mode.acknowledge(batch, status, delivered.context)
        except BaseException:
            self._keep_unacknowledged(delivered)
            raise
        finally:
            self._acknowledging -= 1
            self._settled.set()
        batch.queue.last_consume_at = now = asyncio.get_running_loop().time()
        done = status in self._mode.handled
        batch.queue.stats.handled(1, now - begun, done=done)
        if done:
            self.consumed += 1
            queue = batch.queue.message_queue
            self._highest_acknowledged[queue] = max(
                self._highest_acknowledged.get(queue, 0), message.queue_offset
            )
        else:
            self.failed += 1
        self._trace_end(delivered, done=done)

    def _keep_unacknowledged(self, delivered: _Delivered[C]) -> None:
        """Let a message whose acknowledgement failed be acknowledged again, unless the mode repeats it."""
        if not self._mode.repeats:
            context = self._mode.begin(delivered.batch)
            if context is not None:
                self._delivered[id(delivered.message)] = replace(delivered, context=context)

    async def drop_lost(self) -> None:
        """Treat delivered messages that can no longer be acknowledged as failures.

        Messages of orderly queues are not affected: a revoked queue is not assigned here before their
        acknowledgement.
        """
        if self._mode.repeats:
            return
        lost = [each for each in self._delivered.values() if each.is_lost]
        for each in lost:
            del self._delivered[id(each.message)]
        for each in lost:
            await self._end(each)

    async def _end(self, delivered: _Delivered[C]) -> None:
        self.failed += delivered.batch.done
        self._trace_end(delivered, done=False)
        await self._fail(delivered)
        self._settled.set()

    def _trace_end(self, delivered: _Delivered[C], *, done: bool) -> None:
        if self._traces is not None:
            code = ConsumeCode.SUCCESS if done else ConsumeCode.FAILED
            self._traces.consumed(delivered.trace, code, success=done)

    def _of(self, message: MessageExt) -> _Delivered[C]:
        delivered = self._delivered.get(id(message))
        if delivered is None:
            raise _unknown(message)
        return delivered

    def leave(self) -> None:
        """Record that the user reads no more: a stop then waits only for acknowledgements in progress."""
        self._left = True
        self._settled.set()

    async def stop(self, drain_timeout_s: float) -> int:
        """Deliver no more messages and wait until delivered messages are acknowledged.

        Messages that are not acknowledged in time are delivered again from their queue's committed offset. If
        a later message was acknowledged, the unacknowledged messages go to the retry topic instead, so that
        the later message is not repeated.
        """
        self._stopping = True
        self._line.clear()
        self._arrived.set()
        try:
            async with asyncio.timeout(drain_timeout_s):
                while self._acknowledging or (self._delivered and not self._left):
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            pass
        left = list(self._delivered.values())
        self._delivered.clear()
        if left:
            log.info(
                "group %s: %s were not acknowledged before the stop and will be delivered again",
                self._group,
                counted(len(left), "message"),
            )
        passed_by = [each for each in left if self._is_passed_by(each)]
        await for_each(passed_by, self._fail, _SENT_BACK_AT_ONCE)
        for each in left:
            if each not in passed_by:
                # Mark the queue as dropped. `_fail` then does not send the message back, and the message is
                # delivered again from the committed offset.
                each.batch.queue.dropped = True
                await self._fail(each)
        return 0

    def _is_passed_by(self, delivered: _Delivered[C]) -> bool:
        queue = delivered.batch.queue
        highest = self._highest_acknowledged.get(queue.message_queue, -1)
        return delivered.message.queue_offset < highest and not isinstance(queue, LeasedQueue)

    async def _fail(self, delivered: _Delivered[C]) -> None:
        await self._mode.acknowledge(delivered.batch, self._mode.later, delivered.context)


def _unknown(message: MessageExt) -> ClientStateError:
    why = (
        "it is acknowledged already, comes again since it was held too long or its queue went to another "
        "member, or is not a message that this stream gave out"
    )
    return ClientStateError(f"message {message.msg_id} cannot be acknowledged: {why}")
