"""Prefetching of assigned queues for `PullConsumer.poll` and for `async for` over a PullConsumer.

One task per message queue pulls with long polling. The batches of all message queues wait in one common line.
Callers receive them in order of arrival, so that no message queue starves another message queue. While
`_BATCHES_AHEAD` batches of a message queue are waiting, the queue is not pulled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cometmq import logs
from cometmq.client.cluster.workers import again_if_cancelled
from cometmq.client.consumer import queue_puller
from cometmq.client.consumer.queue_puller import IDLE_S, FlowControl, unanswered
from cometmq.client.group.health import QueueHealth
from cometmq.client.group.offsets import warn_of_moved_offset
from cometmq.errors import CometError
from cometmq.message import MessageExt, MessageQueue, PullResult, PullStatus
from cometmq.periodic import Backoff

log = logs.logger("cometmq.client.consumer")

_BATCHES_AHEAD = 2
_ERROR_DELAY_S = 1.0
_MOVED_AGAIN_S = 5.0
"""Maximum seconds before the next pull while a broker refuses even the offsets that it has suggested."""

PullAt = Callable[[MessageQueue, int], Awaitable[PullResult]]


@dataclass(slots=True)
class Fetched:
    """The result of one pull of a queue."""

    queue: MessageQueue
    messages: list[MessageExt]
    next_offset: int
    """The offset after the messages of this pull, and after the filtered-out messages that follow them."""
    counted: bool = False
    """Whether the messages of this pull count as consumed."""


@dataclass(slots=True, eq=False)
class _Reader:
    """Prefetches one queue until a seek or a new assignment of the queue replaces this reader."""

    queue: MessageQueue
    start: int
    offset: int
    paused: bool
    ahead: int = 0
    last: Fetched | None = None
    """The newest batch of this reader."""
    room: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    pulled_at: float = 0.0
    given_at: float = 0.0
    """The time at which a caller last received a batch of the queue, at first that of the assignment."""
    requested_at: float | None = None
    """The time at which the pull in progress began."""
    flow_control: FlowControl = field(default_factory=FlowControl)
    moved: Backoff = field(default_factory=lambda: Backoff(IDLE_S, _MOVED_AGAIN_S))
    """The increasing pauses between pulls while the broker answers that it does not have the offset."""


class Fetcher:
    """The readers of the assigned queues, one for each queue, and their batches in order of arrival."""

    def __init__(self, pull: PullAt, passed: Callable[[MessageQueue, int], None]) -> None:
        """Create the fetcher.

        `passed` is called with a queue and an offset if all messages below the offset are consumed or
        filtered out.
        """
        self._pull = pull
        self._passed = passed
        self._readers: dict[MessageQueue, _Reader] = {}
        self._line: deque[tuple[_Reader, Fetched]] = deque()
        self._arrived = asyncio.Event()
        self.closed = False
        self.problems: dict[MessageQueue, str] = {}

    @property
    def queues(self) -> tuple[MessageQueue, ...]:
        return tuple(sorted(self._readers))

    def read(self, queue: MessageQueue, offset: int) -> None:
        """Start to prefetch a queue from `offset`, and drop its prefetched batches. Not after `close`."""
        if self.closed:
            return
        paused, now = self.drop(queue), asyncio.get_running_loop().time()
        reader = self._readers[queue] = _Reader(queue, offset, offset, paused, pulled_at=now, given_at=now)
        self._begin(reader)

    def _begin(self, reader: _Reader) -> None:
        """Start the reader's task unless the reader was replaced."""
        queue = reader.queue
        if self._readers.get(queue) is not reader or self.closed:
            return
        reader.task = asyncio.get_running_loop().create_task(
            self._run(reader), name=f"cometmq-fetch-{queue.topic}-{queue.broker_name}-{queue.queue_id}"
        )
        again_if_cancelled(reader.task, lambda: self._begin(reader))

    def drop(self, queue: MessageQueue) -> bool:
        """Stop reading a queue, and return whether the queue was paused."""
        reader = self._readers.pop(queue, None)
        self.problems.pop(queue, None)
        if reader is None:
            return False
        assert reader.task is not None
        reader.task.cancel()
        self._line = deque(entry for entry in self._line if entry[0] is not reader)
        return reader.paused

    def pause(self, queue: MessageQueue) -> None:
        """Stop pulling from a queue. Batches that were pulled before are still returned."""
        reader = self._readers.get(queue)
        if reader is not None:
            reader.paused = True

    def resume(self, queue: MessageQueue) -> None:
        reader = self._readers.get(queue)
        if reader is not None:
            reader.paused = False
            reader.room.set()

    async def next_batch(self, timeout_s: float | None) -> Fetched | None:
        """Return the next batch in order of arrival. Return None after the timeout or after `close`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._line:
                    if self.closed:
                        return None
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return None
        reader, fetched = self._line.popleft()
        reader.given_at = asyncio.get_running_loop().time()
        reader.ahead -= 1
        reader.room.set()
        return fetched

    def health(
        self,
        committed: Callable[[MessageQueue], int | None],
        given: Mapping[MessageQueue, Sequence[MessageExt]],
    ) -> Iterator[QueueHealth]:
        """Yield the progress of each queue.

        `committed` returns the offset to store, `given` are the messages that were returned and are not
        consumed yet.
        """
        now = asyncio.get_running_loop().time()
        ahead: dict[MessageQueue, list[MessageExt]] = {queue: list(some) for queue, some in given.items()}
        for reader, fetched in self._line:
            ahead.setdefault(reader.queue, []).extend(fetched.messages)
        for queue, reader in sorted(self._readers.items()):
            held = ahead.get(queue, [])
            waiting = "paused" if reader.paused else None
            if waiting is None and reader.ahead >= _BATCHES_AHEAD:
                waiting = f"{reader.ahead} batches are prefetched"
            done = committed(queue)
            yield QueueHealth(
                queue=queue,
                next_offset=reader.offset,
                committed_offset=done,
                done_offset=reader.start if done is None else done,
                held_count=len(held),
                held_bytes=sum(len(message.body) for message in held),
                since_pull_s=now - reader.pulled_at,
                since_consume_s=now - reader.given_at,
                waiting=waiting,
                problem=self.problems.get(queue) or unanswered(now, reader.requested_at),
            )

    async def close(self) -> None:
        """Stop all readers. A call that waits in `next_batch` returns None."""
        self.closed = True
        self._arrived.set()
        tasks = [reader.task for reader in self._readers.values() if reader.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._readers.clear()
        self._line.clear()

    async def _run(self, reader: _Reader) -> None:
        queue = reader.queue
        while True:
            if reader.paused or reader.ahead >= _BATCHES_AHEAD:
                reader.room.clear()
                await reader.room.wait()
                continue
            loop = asyncio.get_running_loop()
            reader.requested_at = loop.time()
            try:
                # Each request has its own timeout. This longer timeout ends the wait if the client itself
                # lost an answer.
                async with asyncio.timeout(queue_puller.PULL_MAX_IDLE_S):
                    result = await self._pull(queue, reader.offset)
            except Exception as error:
                reader.requested_at = None
                delay_s = self._failed(reader, error)
                await asyncio.sleep(delay_s)
                continue
            held_s = loop.time() - reader.requested_at
            reader.requested_at, reader.pulled_at = None, loop.time()
            reader.flow_control.since = None
            self.problems.pop(queue, None)
            pause_s = self._took(reader, result) - held_s
            if pause_s > 0:
                await asyncio.sleep(pause_s)

    def _failed(self, reader: _Reader, error: Exception) -> float:
        """Log the error unless it equals the previous error. Return the seconds until the next pull."""
        queue = reader.queue
        refused = reader.flow_control.refused(error, asyncio.get_running_loop().time())
        if refused is not None:
            delay_s, text = refused
            if text is None:
                return delay_s
        else:
            delay_s, text = _ERROR_DELAY_S, str(error) if isinstance(error, CometError) else repr(error)
        if self.problems.get(queue) != text:
            # An exception that is no CometError is a bug or a lack of memory. Log its traceback and continue.
            expected = isinstance(error, CometError)
            log.warning("%s: pull failed: %s", queue, text, exc_info=None if expected else error)
        self.problems[queue] = text
        return delay_s

    def _took(self, reader: _Reader, result: PullResult) -> float:
        """Store the result of a pull, and return the minimum interval to the next pull in seconds.

        It limits the rate of pulls to a broker that answers without messages immediately, instead of waiting
        for some.
        """
        queue, before = reader.queue, reader.offset
        reader.offset = result.next_begin_offset
        if result.status is PullStatus.OFFSET_ILLEGAL:
            warn_of_moved_offset(queue, before, result)
            return reader.moved.next_s()
        reader.moved.reset()
        if result.messages:
            reader.ahead += 1
            reader.last = Fetched(queue, result.messages, result.next_begin_offset)
            self._line.append((reader, reader.last))
            self._arrived.set()
        elif result.next_begin_offset > before:
            self._pass_over(reader, result.next_begin_offset)
        return 0.0 if result.next_begin_offset > before else IDLE_S

    def _pass_over(self, reader: _Reader, offset: int) -> None:
        """Skip the filtered-out messages below `offset`, so that they do not count as lag."""
        if reader.last is not None and not reader.last.counted:
            reader.last.next_offset = offset
        else:
            self._passed(reader.queue, offset)
