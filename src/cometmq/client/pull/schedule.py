"""The scheduler of a pull consumer: it calls a user's function for each queue again and again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from cometmq import logs
from cometmq.client.cluster.workers import again_if_cancelled, call_on_loop, cancel_all
from cometmq.client.group.health import QueueHealth
from cometmq.client.group.offsets import OffsetStore
from cometmq.errors import ConfigError, shown
from cometmq.message import MessageQueue
from cometmq.text import printable

log = logs.logger("cometmq.client.consumer")

_AT_ONCE = 20
NEXT_DELAY_S, _AFTER_FAILURE_S = 0.2, 1.0  # Java's delays (docs/reference/client.md, Scheduled pulls)
_DRAIN_S = 30.0


class Turn(Protocol):
    """The attribute of PullTurn that the scheduler reads: the delay before the next call."""

    next_delay_s: float


@dataclass(slots=True, eq=False)
class _Loop:
    called_at: float
    ended_at: float
    """The time at which the last call ended, in monotonic seconds, at first that of the assignment."""
    calling: bool = False
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Schedule:
    """The repeated calls of scheduled functions: a loop per queue, and at most 20 calls at the same time."""

    def __init__(self, offsets: OffsetStore, turn: Callable[[], Turn]) -> None:
        self._offsets = offsets
        self._turn = turn
        self.functions: dict[str, Callable[[MessageQueue, Any], Awaitable[None]]] = {}
        """The scheduled functions by topic."""
        self._loops: dict[MessageQueue, _Loop] = {}
        self._ending: dict[MessageQueue, _Loop] = {}
        """The call loops of revoked queues, until the last call has ended and the offset is stored."""
        self._room = asyncio.Semaphore(_AT_ONCE)
        self.problems: dict[MessageQueue, str] = {}

    @property
    def queues(self) -> tuple[MessageQueue, ...]:
        return tuple(self._loops)

    def is_ending(self, queue: MessageQueue) -> bool:
        """Return whether the last call for a revoked queue is running, or its offset is being stored."""
        return queue in self._ending

    def start(self, queue: MessageQueue) -> None:
        now = asyncio.get_running_loop().time()
        loop = self._loops[queue] = _Loop(now, now)
        self._begin(queue, loop)

    def _begin(self, queue: MessageQueue, loop: _Loop) -> None:
        """Start the task that calls the scheduled function for a queue, if the queue was not revoked."""
        if self._loops.get(queue) is loop:
            loop.calling = False
            loop.task = asyncio.get_running_loop().create_task(
                self._run(queue, loop), name=f"cometmq-schedule-{queue}"
            )
            again_if_cancelled(loop.task, lambda: self._begin(queue, loop))

    def health(self, committed: Callable[[MessageQueue], int | None]) -> Iterator[QueueHealth]:
        """Yield the progress of each queue. The messages that a call has pulled are not counted."""
        now = asyncio.get_running_loop().time()
        for queue, loop in sorted(self._loops.items()):
            yield QueueHealth(
                queue=queue,
                next_offset=committed(queue) or 0,
                committed_offset=committed(queue),
                done_offset=committed(queue),
                held_count=0,
                held_bytes=0,
                since_pull_s=now - loop.called_at,
                since_consume_s=now - loop.ended_at,
                waiting=f"{_AT_ONCE} calls run already" if self._room.locked() and not loop.calling else None,
                problem=self.problems.get(queue),
                call_s=now - loop.called_at if loop.calling else None,
            )

    def stop(self, queue: MessageQueue) -> None:
        """Stop calling the function for a queue. After a call in progress, the queue's offset is stored."""
        loop = self._loops.pop(queue, None)
        if loop is not None:
            self._ending[queue] = loop
            loop.stopped.set()

    async def close(self) -> None:
        """Stop all loops and wait up to 30 s for running calls."""
        for queue in self.queues:
            self.stop(queue)
        tasks = [loop.task for loop in self._ending.values() if loop.task is not None]
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=_DRAIN_S)
            await cancel_all(pending, "scheduled functions")

    async def _run(self, queue: MessageQueue, loop: _Loop) -> None:
        stopped = loop.stopped
        try:
            while not stopped.is_set():
                turn = self._turn()
                async with self._room:
                    if not stopped.is_set():
                        loop.calling, loop.called_at = True, asyncio.get_running_loop().time()
                        await self._call(queue, turn)
                        loop.calling, loop.ended_at = False, asyncio.get_running_loop().time()
                try:
                    async with asyncio.timeout(turn.next_delay_s):
                        await stopped.wait()
                except TimeoutError:
                    pass
            await self._offsets.release([queue])
        finally:
            self.problems.pop(queue, None)
            self._ending.pop(queue, None)

    async def _call(self, queue: MessageQueue, turn: Turn) -> None:
        try:
            await call_on_loop(self.functions[queue.topic], queue, turn)
            delay_s: object = turn.next_delay_s
            if not isinstance(delay_s, int | float) or not math.isfinite(delay_s) or delay_s < 0:
                raise ConfigError("next_delay_s", shown(delay_s), "a number of seconds, 0 or more")
        except Exception as error:
            text = printable(repr(error))
            if self.problems.get(queue) != text:
                log.warning("%s: the scheduled function failed: %s", queue, text, exc_info=error)
            self.problems[queue] = text
            turn.next_delay_s = _AFTER_FAILURE_S
        else:
            self.problems.pop(queue, None)
