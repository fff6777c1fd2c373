"""Giving the messages of a push consumer out to a caller who acknowledges each, in the place of a listener.

Nothing is taken from the line before the caller asks for it. What a caller does not take or acknowledge fills
the limits of its queues (FlowLimits), and these are pulled no further.
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
from cometmq.client.consumer.consuming import Manner
from cometmq.client.consumer.listener import ConsumeContext
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.process_queue import Batch
from cometmq.errors import ClientStateError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.properties.values import CONSUME_START_TIME
from cometmq.protocol.traces import ConsumeCode
from cometmq.text import counted

__all__ = ["Giving"]

log = logs.logger("cometmq.client.consumer")

C = TypeVar("C")
S = TypeVar("S", bound=Enum)

_WITHOUT_YIELD = 32
"""A caller that never really waits would keep the loop from reading its sockets."""
_SENT_BACK_AT_ONCE = 32


@dataclass(frozen=True, slots=True, eq=False)
class _Given(Generic[C]):
    """A message that the caller has, until it is acknowledged. Keeps the message, whose id is its key."""

    message: MessageExt
    batch: Batch
    context: C
    trace: Consumption | None

    @property
    def is_lost(self) -> bool:
        """It went back to the broker, held too long, or its queue went: it comes again whatever is said."""
        return self.batch.done or self.batch.queue.dropped


class Giving(Generic[C, S]):
    """What PushSession takes for a Consuming. Batches have one message each."""

    def __init__(self, manner: Manner[C, S], group: ConsumerGroup) -> None:
        self._manner = manner
        self._group = group.name
        self._traces = group.instance.traces
        self._telemetry = group.instance.options.telemetry
        self.concurrency = group.options.consume_concurrency
        """What brokers are told; nothing here depends on it."""
        self._line: deque[Batch] = deque()
        self._arrived = asyncio.Event()
        self._given: dict[int, _Given[C]] = {}
        self._settling = 0
        """Acknowledgements under way."""
        self._settled = asyncio.Event()
        self._furthest: dict[MessageQueue, int] = {}
        """The highest offset of each queue that was acknowledged."""
        self._in_a_row = 0
        self._stopping = False
        self._left = False
        self.consumed = 0
        self.failed = 0
        self.last_error: BaseException | None = None

    @property
    def running(self) -> int:
        """Messages that the caller has not acknowledged yet."""
        return len(self._given)

    @property
    def waiting(self) -> int:
        """Messages in line."""
        return len(self._line)

    def problem(self) -> str | None:
        """There is no listener that could fail."""
        return None

    def start(self) -> None:
        """Nothing has to run."""

    def set_concurrency(self, concurrency: int) -> None:
        raise ClientStateError(f"a stream has no listener to be called {concurrency} times at once")

    def submit(self, batches: Iterable[Batch]) -> None:
        if not self._stopping:
            self._line.extend(batches)
            self._arrived.set()

    async def next(self) -> MessageExt:
        """The next message, as soon as there is one. Raises StopAsyncIteration once it stops."""
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
            context = self._manner.begin(batch)
            if context is None:
                continue
            batch.started_at = asyncio.get_running_loop().time()
            if batch.refusal is not None:
                await self._refuse(batch, context, batch.refusal)
                continue
            (message,) = batch.messages
            message.properties[CONSUME_START_TIME] = str(int(time.time() * 1000))
            trace = None if self._traces is None else self._traces.consuming(self._group, batch.messages)
            self._given[id(message)] = _Given(message, batch, context, trace)
            if self._telemetry is not None:
                self._telemetry.received(self._group, batch.messages, begun_ns)
            return message
        raise StopAsyncIteration

    async def _refuse(self, batch: Batch, context: C, refusal: Exception) -> None:
        self.last_error = refusal
        self.failed += 1
        log.warning("nobody gets offset %d of %s: %s", batch.first_offset, batch.queue.message_queue, refusal)
        try:
            await self._manner.acknowledge(batch, self._manner.later, context)
        except BaseException:
            if isinstance(context, ConsumeContext):  # an orderly queue has it in line again by itself
                self._line.appendleft(batch)
            raise

    def context(self, message: MessageExt) -> C:
        """That of a message that is given out. Raises ClientStateError for any other."""
        return self._of(message).context

    async def settle(self, message: MessageExt, status: S) -> None:
        """Acknowledge a message that was given out, and still is if this is cancelled. Raises
        ClientStateError for any other, and for one that comes again by now."""
        given = self._of(message)
        del self._given[id(message)]
        if given.is_lost:
            await self._end(given)
            raise _unknown(message)
        batch = given.batch
        begun = batch.started_at
        self._settling += 1
        try:
            await self._manner.acknowledge(batch, status, given.context)
        except BaseException:
            self._give_back(given)
            raise
        finally:
            self._settling -= 1
            self._settled.set()
        batch.queue.last_consume_at = now = asyncio.get_running_loop().time()
        done = status in self._manner.handled
        batch.queue.stats.handled(1, now - begun, done=done)
        if done:
            self.consumed += 1
            queue = batch.queue.message_queue
            self._furthest[queue] = max(self._furthest.get(queue, 0), message.queue_offset)
        else:
            self.failed += 1
        self._trace_end(given, done=done)

    def _give_back(self, given: _Given[C]) -> None:
        """To the caller, who may acknowledge it later. An orderly queue gives it out again by itself."""
        if isinstance(given.context, ConsumeContext):
            context = self._manner.begin(given.batch)
            if context is not None:
                self._given[id(given.message)] = replace(given, context=context)

    async def let_go(self) -> None:
        """End the calls of messages that come again whatever the caller says. Not for an orderly queue: it
        comes back to this member after the caller's last word about it."""
        lost = [each for each in self._given.values() if each.is_lost]
        for each in lost:
            del self._given[id(each.message)]
        for each in lost:
            await self._end(each)

    async def _end(self, given: _Given[C]) -> None:
        self.failed += given.batch.done
        self._trace_end(given, done=False)
        await self._fail(given)
        self._settled.set()

    def _trace_end(self, given: _Given[C], *, done: bool) -> None:
        if self._traces is not None:
            code = ConsumeCode.SUCCESS if done else ConsumeCode.FAILED
            self._traces.consumed(given.trace, code, success=done)

    def _of(self, message: MessageExt) -> _Given[C]:
        given = self._given.get(id(message))
        if given is None:
            raise _unknown(message)
        return given

    def leave(self) -> None:
        """The caller asks for nothing any more: a stop waits for no acknowledgement that is not under way."""
        self._left = True
        self._settled.set()

    async def stop(self, drain_timeout_s: float) -> int:
        """Give nothing more out, and wait for the acknowledgement of what is given out.

        What is not acknowledged in time comes again: from where its queue's offset stands, or, if something
        behind it was acknowledged, by way of the retry topic, so that this does not come again too.
        """
        self._stopping = True
        self._line.clear()
        self._arrived.set()
        try:
            async with asyncio.timeout(drain_timeout_s):
                while self._settling or (self._given and not self._left):
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            pass
        left = list(self._given.values())
        self._given.clear()
        if left:
            log.info(
                "group %s: %s not acknowledged at the stop; they come again",
                self._group,
                counted(len(left), "message"),
            )
        passed_by = [each for each in left if self._is_passed_by(each)]
        await for_each(passed_by, self._fail, _SENT_BACK_AT_ONCE)
        for each in left:
            if each not in passed_by:
                each.batch.queue.dropped = True  # so it only ends the call: nothing is counted or sent back
                await self._fail(each)
        return 0

    def _is_passed_by(self, given: _Given[C]) -> bool:
        queue = given.batch.queue.message_queue
        return given.message.queue_offset < self._furthest.get(queue, -1)

    async def _fail(self, given: _Given[C]) -> None:
        await self._manner.acknowledge(given.batch, self._manner.later, given.context)


def _unknown(message: MessageExt) -> ClientStateError:
    why = (
        "it is acknowledged already, comes again since it was held too long or its queue went to another "
        "member, or is not a message that this stream gave out"
    )
    return ClientStateError(f"message {message.msg_id} cannot be acknowledged: {why}")
