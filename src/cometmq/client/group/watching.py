"""The detection of stalled consumers, the lag of queues, and notifications when a topic's queues change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cometmq import logs
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.workers import call_user_function, for_each
from cometmq.client.group.health import QueueHealth
from cometmq.errors import CometError
from cometmq.message import MessageQueue
from cometmq.periodic import Periodic
from cometmq.text import seconds

log = logs.logger("cometmq.client.consumer")

_ASKED_AT_ONCE = 32
_CHECKS_PER_STALL = 4
"""Each queue is checked this many times per `stall_after_s` (MemberOptions)."""


async def lag_of(
    done: Mapping[MessageQueue, int | None],
    max_offset: Callable[[MessageQueue], Awaitable[int]],
    done_offset: Callable[[MessageQueue], Awaitable[int]],
) -> dict[MessageQueue, int]:
    """Return the number of messages that are not consumed yet, by queue.

    `done` holds the offset below which all messages of a queue are consumed. For None, `done_offset` is
    called.
    """

    async def behind(queue: MessageQueue) -> int:
        offset = done[queue]
        begin = await done_offset(queue) if offset is None else offset
        return max(await max_offset(queue) - begin, 0)

    return dict(zip(done, await for_each(list(done), behind, _ASKED_AT_ONCE), strict=True))


@dataclass(slots=True, eq=False)
class Watchdog:
    """A periodic check of a consumer's queues. Stalled queues are in `problems` and are logged once.

    A queue is stalled if it holds messages, is not suspended, and no message was consumed for `_after_s`
    seconds. With scheduled pulls, a queue is stalled if a call has run for `_after_s` seconds and the offset
    has not changed. (A pull without an answer is a separate problem, see QueueHealth.)
    """

    _name: str
    _after_s: float
    _look: Callable[[float], Iterable[QueueHealth]]
    """Returns the health of the queues. The argument is the present time in monotonic seconds."""
    problems: dict[MessageQueue, str] = field(default_factory=dict)
    """A sentence about each queue that was stalled at the last check."""
    _seen: dict[MessageQueue, tuple[tuple[int | None, int], float]] = field(default_factory=dict)
    """The position of each queue (committed offset, next offset to consume), and since when it has it."""

    def periodic(self) -> Periodic:
        """Return the periodic check of the queues. The caller must start it."""
        loop = asyncio.get_running_loop()
        every_s = self._after_s / _CHECKS_PER_STALL
        return Periodic(
            loop, every_s, lambda: self.check_queues(loop.time()), name=f"watchdog of {self._name}"
        )

    def check_queues(self, now: float) -> None:
        seen, self._seen = self._seen, {}
        problems: dict[MessageQueue, str] = {}
        for each in self._look(now):
            # A pull alone is no progress: it increases next_offset and held_count by the same number, so
            # their difference stays the same.
            position = (each.committed_offset, each.next_offset - each.held_count)
            before, since = seen.get(each.queue, (None, now))
            if before != position or each.waiting in ("suspended", "paused"):
                since = now
            self._seen[each.queue] = position, since
            if each.held_count and now - since >= self._after_s:
                problems[each.queue] = f"no progress with {each.held_count} held messages"
            elif each.call_s is not None and min(each.call_s, now - since) >= self._after_s:
                problems[each.queue] = "the call of the scheduled function has moved no offset"
        for queue, problem in problems.items():
            if queue not in self.problems:
                log.warning(
                    "%s: queue %s is stalled: %s for %s", self._name, queue, problem, seconds(self._after_s)
                )
        for queue in self.problems.keys() - problems.keys():
            log.info("%s: queue %s makes progress again, or was revoked", self._name, queue)
        self.problems = problems

    def sentences(self) -> tuple[str, ...]:
        """Return a sentence about each stalled queue, for ConsumerHealth.problems."""
        return tuple(
            f"{queue.topic}/{queue.broker_name}/{queue.queue_id}: {problem} for {seconds(self._after_s)}"
            for queue, problem in sorted(self.problems.items())
        )


QueuesChanged = Callable[[str, tuple[MessageQueue, ...]], Awaitable[None] | None]
"""A function called with a topic and its new queues: an async one on the loop, a plain one in a thread."""


class QueueWatch:
    """Compares topics' queues at each refresh of the routes, and calls functions after a change."""

    def __init__(self, client: ClientInstance, name: str) -> None:
        self._client = client
        self._functions: dict[str, QueuesChanged] = {}
        self._known: dict[str, tuple[MessageQueue, ...]] = {}
        self._periodic = Periodic(
            asyncio.get_running_loop(), client.options.route_interval_s, self._look, name=f"queues of {name}"
        )

    async def add(self, topic: str, function: QueuesChanged) -> None:
        """Begin to watch a topic. A topic without a route counts as a topic without queues."""
        self._known[topic] = await self._queues(topic) or ()
        self._functions[topic] = function
        self._periodic.start()

    def remove(self, topic: str) -> None:
        self._functions.pop(topic, None)
        self._known.pop(topic, None)

    async def stop(self) -> None:
        await self._periodic.stop(cancel=True)

    async def _queues(self, topic: str) -> tuple[MessageQueue, ...] | None:
        if topic in await self._client.refresh_routes([topic]):
            return None
        return tuple(sorted(await self._client.read_queues(topic)))

    async def _look(self) -> None:
        for topic, function in list(self._functions.items()):
            try:
                queues = await self._queues(topic)
            except CometError as error:
                log.debug("the queues of %s are unknown: %s", topic, error)
                continue
            if queues is None or self._functions.get(topic) is not function or queues == self._known[topic]:
                continue
            self._known[topic] = queues
            try:
                await call_user_function(None, function, topic, queues)
            except Exception:
                log.exception("the function passed to watch_queues failed for topic %s", topic)
