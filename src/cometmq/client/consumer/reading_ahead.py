"""Reading assigned queues ahead of the caller, for PullConsumer.poll and its iteration.

One task per queue pulls with long polling; what it got waits in one line for all queues, so that a caller
gets batches in order of arrival and no queue starves another. A queue pulls on only after its batches were
given out.
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

__all__ = ["Fetched", "Fetcher"]

log = logs.logger("cometmq.client.consumer")

_BATCHES_AHEAD = 2
_ERROR_DELAY_S = 1.0
_MOVED_AGAIN_S = 5.0
"""The longest wait to the next pull while a broker has none of the offsets that it names itself."""

PullAt = Callable[[MessageQueue, int], Awaitable[PullResult]]


@dataclass(slots=True)
class Fetched:
    """What one pull of a queue brought."""

    queue: MessageQueue
    messages: list[MessageExt]
    next_offset: int
    """Where reading goes on after these messages, and after what followed and was not wanted."""
    counted: bool = False
    """Whether these messages count as consumed."""


@dataclass(slots=True, eq=False)
class _Reader:
    """One queue being read. A reader that was replaced (seek, new assignment) adds nothing any more."""

    queue: MessageQueue
    start: int
    offset: int
    paused: bool
    ahead: int = 0
    last: Fetched | None = None
    """The newest batch."""
    room: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    pulled_at: float = 0.0
    given_at: float = 0.0
    """Monotonic seconds of the last answer, and of the last batch that the caller took."""
    asked_at: float | None = None
    """When the pull that is under way began."""
    flow_control: FlowControl = field(default_factory=FlowControl)
    moved: int = 0
    """How often in a row the broker did not have the offset."""


class Fetcher:
    """One reader for each assigned queue, and one line for what they bring."""

    def __init__(self, pull: PullAt, passed: Callable[[MessageQueue, int], None]) -> None:
        """passed: told of an offset below which all of a queue counts as consumed, since nothing that came
        after what was consumed is wanted."""
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
        """Read `queue` from `offset`, forgetting what was read ahead of it before. Nothing once closed."""
        if self.closed:
            return
        paused, now = self.drop(queue), asyncio.get_running_loop().time()
        reader = self._readers[queue] = _Reader(queue, offset, offset, paused, pulled_at=now, given_at=now)
        self._begin(reader)

    def _begin(self, reader: _Reader) -> None:
        """Read, unless the reader was replaced."""
        queue = reader.queue
        if self._readers.get(queue) is not reader or self.closed:
            return
        reader.task = asyncio.get_running_loop().create_task(
            self._run(reader), name=f"cometmq-fetch-{queue.topic}-{queue.broker_name}-{queue.queue_id}"
        )
        again_if_cancelled(reader.task, lambda: self._begin(reader))

    def drop(self, queue: MessageQueue) -> bool:
        """Stop reading a queue; whether it was paused."""
        reader = self._readers.pop(queue, None)
        self.problems.pop(queue, None)
        if reader is None:
            return False
        assert reader.task is not None
        reader.task.cancel()
        self._line = deque(entry for entry in self._line if entry[0] is not reader)
        return reader.paused

    def pause(self, queue: MessageQueue) -> None:
        """Read no further; what was read ahead is still given out."""
        reader = self._readers.get(queue)
        if reader is not None:
            reader.paused = True

    def resume(self, queue: MessageQueue) -> None:
        reader = self._readers.get(queue)
        if reader is not None:
            reader.paused = False
            reader.room.set()

    async def next_batch(self, timeout_s: float | None) -> Fetched | None:
        """The next batch in order of arrival, None when none came in time or will ever come."""
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
        """How far each queue is; committed: the offset that this client will store; given: messages that were
        given out and are not consumed yet."""
        now = asyncio.get_running_loop().time()
        ahead: dict[MessageQueue, list[MessageExt]] = {queue: list(some) for queue, some in given.items()}
        for reader, fetched in self._line:
            ahead.setdefault(reader.queue, []).extend(fetched.messages)
        for queue, reader in sorted(self._readers.items()):
            held = ahead.get(queue, [])
            waiting = "paused" if reader.paused else None
            if waiting is None and reader.ahead >= _BATCHES_AHEAD:
                waiting = f"{reader.ahead} batches are read ahead"
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
                problem=self.problems.get(queue) or unanswered(now, reader.asked_at),
            )

    async def close(self) -> None:
        """Read nothing more; whoever waits for a batch gets none."""
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
            reader.asked_at = loop.time()
            try:
                # Every request has a limit of its own; this one is for an answer that got lost inside.
                async with asyncio.timeout(queue_puller.PULL_MAX_IDLE_S):
                    result = await self._pull(queue, reader.offset)
            except Exception as error:
                reader.asked_at = None
                delay_s = self._failed(reader, error)
                await asyncio.sleep(delay_s)
                continue
            held_s = loop.time() - reader.asked_at
            reader.asked_at, reader.pulled_at = None, loop.time()
            reader.flow_control.since = None
            self.problems.pop(queue, None)
            pause_s = self._took(reader, result) - held_s
            if pause_s > 0:
                await asyncio.sleep(pause_s)

    def _failed(self, reader: _Reader, error: Exception) -> float:
        """Say so, once for each kind; seconds to the next pull."""
        queue = reader.queue
        refused = reader.flow_control.refused(error, asyncio.get_running_loop().time())
        if refused is not None:
            delay_s, text = refused
            if text is None:
                return delay_s
        else:
            delay_s, text = _ERROR_DELAY_S, str(error) if isinstance(error, CometError) else repr(error)
        if self.problems.get(queue) != text:
            # Anything but a CometError is a lack of memory or a bug of ours: said, and no reason to stop.
            expected = isinstance(error, CometError)
            log.warning("%s: pull failed: %s", queue, text, exc_info=None if expected else error)
        self.problems[queue] = text
        return delay_s

    def _took(self, reader: _Reader, result: PullResult) -> float:
        """Keep what a pull brought. The least time from its beginning to the next: a broker holds a pull that
        finds nothing, and one that does not is not asked as fast as it answers."""
        queue, before = reader.queue, reader.offset
        reader.offset = result.next_begin_offset
        if result.status is PullStatus.OFFSET_ILLEGAL:
            warn_of_moved_offset(queue, before, result)
            reader.moved += 1
            return min(IDLE_S * 2.0 ** min(reader.moved - 1, 10), _MOVED_AGAIN_S)
        reader.moved = 0
        if result.messages:
            reader.ahead += 1
            reader.last = Fetched(queue, result.messages, result.next_begin_offset)
            self._line.append((reader, reader.last))
            self._arrived.set()
        elif result.next_begin_offset > before:
            self._pass_over(reader, result.next_begin_offset)
        return 0.0 if result.next_begin_offset > before else IDLE_S

    def _pass_over(self, reader: _Reader, offset: int) -> None:
        """Nothing up to `offset` is wanted: a group's lag must not grow because of a filter."""
        if reader.last is not None and not reader.last.counted:
            reader.last.next_offset = offset
        else:
            self._passed(reader.queue, offset)
