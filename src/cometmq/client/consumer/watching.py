"""Noticing that a consumer stands still, how far it is behind, and that topics got other queues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from cometmq import logs
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.workers import call_user_function, for_each
from cometmq.client.group.health import QueueHealth
from cometmq.errors import CometError
from cometmq.message import MessageQueue
from cometmq.periodic import Periodic
from cometmq.text import seconds

__all__ = ["QueueWatch", "QueuesChanged", "Watchdog", "lag_of"]

log = logs.logger("cometmq.client.consumer")

_ASKED_AT_ONCE = 32
_LOOKS = 4
"""At a queue in the time after which it counts as standing still."""


async def lag_of(
    queues: Iterable[QueueHealth],
    max_offset: Callable[[MessageQueue], Awaitable[int]],
    done_offset: Callable[[MessageQueue], Awaitable[int]],
) -> dict[MessageQueue, int]:
    """How many messages of each queue are not done yet. max_offset: asks the queue's broker, or raises;
    done_offset: the same, for a queue of which this client does not know it."""

    async def behind(each: QueueHealth) -> int:
        done = each.done_offset if each.done_offset is not None else await done_offset(each.queue)
        return max(await max_offset(each.queue) - done, 0)

    queues = list(queues)
    lags = await for_each(queues, behind, _ASKED_AT_ONCE)
    return {each.queue: lag for each, lag in zip(queues, lags, strict=True)}


@dataclass(slots=True)
class _Seen:
    """How a queue stood, and since when (monotonic seconds)."""

    position: tuple[int | None, int]
    """What was committed, and the pulled ones without those held."""
    since: float


@dataclass(slots=True, eq=False)
class Watchdog:
    """Looks at a consumer's queues now and then. Those that stand still are in `problems`, and in the log
    once.

    A queue stands still if it holds messages and none was done for `_after_s`, unless it is suspended, or if
    a scheduled call runs for so long and moves no offset. (A pull that does not come back is a problem by
    itself, see QueueHealth.)
    """

    _name: str
    _after_s: float
    _look: Callable[[float], Iterable[QueueHealth]]
    """The queues' health at a time (monotonic seconds)."""
    problems: dict[MessageQueue, str] = field(default_factory=dict)
    """Queue -> how it stands still, in a sentence."""
    _seen: dict[MessageQueue, _Seen] = field(default_factory=dict)

    def periodic(self) -> Periodic:
        """What has to be started."""
        loop = asyncio.get_running_loop()
        every_s = self._after_s / _LOOKS
        return Periodic(loop, every_s, lambda: self.look(loop.time()), name=f"watchdog of {self._name}")

    def look(self, now: float) -> None:
        """Look at all queues."""
        seen, self._seen = self._seen, {}
        problems: dict[MessageQueue, str] = {}
        for each in self._look(now):
            # Pulls alone are no progress: they move next_offset and held_count by the same.
            position = (each.committed_offset, each.next_offset - each.held_count)
            before = seen.get(each.queue)
            if before is None or before.position != position:
                before = _Seen(position, now)
            self._seen[each.queue] = before
            if each.waiting in ("suspended", "paused"):
                before.since = now
            elif each.held_count and now - before.since >= self._after_s:
                problems[each.queue] = f"none of {each.held_count} messages held was done"
            elif each.call_s is not None and min(each.call_s, now - before.since) >= self._after_s:
                problems[each.queue] = "the call of the scheduled function has moved no offset"
        for queue, problem in problems.items():
            if queue not in self.problems:
                log.warning("%s: %s for %s: %s", self._name, queue, seconds(self._after_s), problem)
        for queue in self.problems.keys() - problems.keys():
            log.info("%s: %s goes on, or was given up", self._name, queue)
        self.problems = problems

    def sentences(self) -> tuple[str, ...]:
        """For ConsumerHealth.problems."""
        return tuple(
            f"{queue.topic}/{queue.broker_name}/{queue.queue_id}: {problem} for {seconds(self._after_s)}"
            for queue, problem in sorted(self.problems.items())
        )


QueuesChanged = Callable[[str, tuple[MessageQueue, ...]], Awaitable[None] | None]
"""Called with a topic and its queues, when these have changed: an async function on the loop, a plain one in
a thread."""


class QueueWatch:
    """Tells functions of the queues of topics, as often as routes are asked for."""

    def __init__(self, client: ClientInstance, name: str) -> None:
        self._client = client
        self._functions: dict[str, QueuesChanged] = {}
        self._known: dict[str, tuple[MessageQueue, ...]] = {}
        self._rounds = Periodic(
            asyncio.get_running_loop(), client.options.route_interval_s, self._look, name=f"queues of {name}"
        )

    async def add(self, topic: str, function: QueuesChanged) -> None:
        """A topic that nobody knows has no queues yet."""
        self._known[topic] = await self._queues(topic) or ()
        self._functions[topic] = function
        self._rounds.start()

    def remove(self, topic: str) -> None:
        self._functions.pop(topic, None)
        self._known.pop(topic, None)

    async def stop(self) -> None:
        self._rounds.cancel()
        await self._rounds.stop()

    async def _queues(self, topic: str) -> tuple[MessageQueue, ...] | None:
        if topic in await self._client.refresh_routes([topic]):
            return None
        return tuple(sorted(await self._client.read_queues(topic)))

    async def _look(self) -> None:
        for topic, function in list(self._functions.items()):
            try:
                queues = await self._queues(topic)
            except CometError as error:
                log.debug("the queues of %s are not known: %s", topic, error)
                continue
            if queues is None or self._functions.get(topic) is not function or queues == self._known[topic]:
                continue
            self._known[topic] = queues
            try:
                await call_user_function(None, function, topic, queues)
            except Exception:
                log.exception("what watches the queues of %s failed", topic)
