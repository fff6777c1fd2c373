"""Delays sends that exceed a rate limit, and refuses sends that would have to wait too long.

Most clients do not slow down by themselves. Java producers of 4.9 try a synchronous send three times without
a pause if it is refused with SERVICE_NOT_AVAILABLE. They do not retry asynchronous sends, nor after
SYSTEM_BUSY, and older Go producers do not retry after any response (docs/reference/client.md, Sends and
retries). So the broker holds a send until there are tokens for it, in the order of arrival for each topic and
account. A send that would be held for more than MAX_WAIT_MS is refused. The refusal is delayed as well, so
that retries do not fail within milliseconds, and a producer that does not slow down costs little.

Sends to retry topics, dead-letter topics and system topics are exempt: a refused send-back would block a
consumer, and traces and events report what has already happened. For the same reason, ends of transactions
and acks have no limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from heapq import heappop, heappush
from itertools import count

from cometmq.broker.base.deadlines import DeadlineTimer
from cometmq.broker.rates.rate_limits import Amount, RateLimit, RateLimits, count_one, longest_wait
from cometmq.errors import CommandError
from cometmq.protocol.batch import count_items
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection

MAX_WAIT_MS = 2_000
"""The maximum time, in ms, for which a send is held. Java's clients wait 3 s for a response."""
REFUSAL_DELAY_S = 0.5
"""The delay of a refusal, in seconds."""
MAX_HELD_BYTES = 64 << 20
"""The maximum total size of held sends, in bytes. The size of a send is its body plus FRAME_BYTES."""
MAX_REFUSALS = 10_000
"""The maximum number of delayed refusals. Further refusals are sent at once."""
FRAME_BYTES = 1024

Lane = tuple[str, str]
"""The topic and the account of a send. Sends of one lane are stored in the order of their arrival."""


class SendThrottle:
    """Holds and refuses sends that exceed a rate limit. Must be created in a running event loop."""

    def __init__(self, limits: RateLimits) -> None:
        self.limits = limits
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._loop, self._release)
        self._heap: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._lanes: dict[Lane, list[int]] = {}  # the number of held sends, and the latest release time
        self._held_bytes = 0
        self._refusals = 0

    def delay(
        self,
        connection: Connection,
        frame: Frame,
        topic: str,
        account: str,
        limits: Sequence[RateLimit],
        batch: bool,
    ) -> Awaitable[None] | None:
        """Apply the limits to a send. Return None if it may be stored now, otherwise an awaitable.

        The awaitable ends when the send may be stored. It raises CommandError if the send is refused.
        """
        size = len(frame.body)
        amount = Amount(count_items(frame.body) if batch else 1, size)
        now_ms = self.limits.now_ms()
        wait_ms, worst = longest_wait(limits, amount, now_ms)
        lane = self._lanes.get((topic, account)) if self._lanes else None
        if wait_ms or lane is not None:
            late = wait_ms > MAX_WAIT_MS
            if late or self._held_bytes + size + FRAME_BYTES > MAX_HELD_BYTES:
                count_one(self.limits.refused_sends, topic, worst)
                why = worst.exceeded(amount, now_ms)
                if late:
                    return self._refuse(connection, frame, f"{why}, retry after {wait_ms - MAX_WAIT_MS} ms")
                return self._refuse(connection, frame, f"{why}, and {MAX_HELD_BYTES} bytes are held already")
            count_one(self.limits.delayed_sends, topic, worst)
        for limit in limits:
            limit.take(amount, now_ms)
        return self._hold((topic, account), wait_ms, size + FRAME_BYTES) if wait_ms or lane else None

    def _hold(self, key: Lane, wait_ms: int, size: int) -> Awaitable[None]:
        lane = self._lanes.setdefault(key, [0, 0])
        due_ms = max(self._timer.now_ms() + wait_ms, lane[1])
        lane[:] = lane[0] + 1, due_ms
        self._held_bytes += size
        released: asyncio.Future[None] = self._loop.create_future()
        heappush(self._heap, (due_ms, next(self._numbers), released))
        self._timer.arm(due_ms)

        async def wait() -> None:
            try:
                await released
            finally:
                self._held_bytes -= size
                lane[0] -= 1
                if not lane[0]:
                    del self._lanes[key]

        return wait()

    async def _refuse_later(self, error: CommandError) -> None:
        self._refusals += 1
        try:
            await asyncio.sleep(REFUSAL_DELAY_S)
        finally:
            self._refusals -= 1
        raise error

    def _refuse(self, connection: Connection, frame: Frame, why: str) -> Awaitable[None]:
        """Refuse a send with the code after which its client retries.

        gRPC clients receive TOO_MANY_REQUESTS for SYSTEM_BUSY, and wait before they retry.
        """
        busy = connection.partner is not None
        code = ResponseCode.SYSTEM_BUSY if busy else ResponseCode.SERVICE_NOT_AVAILABLE
        error = CommandError(code, why)
        if self._refusals >= MAX_REFUSALS:
            raise error
        frame.body = b""  # frees memory: the refusal does not need the body
        return self._refuse_later(error)

    def _release(self, now_ms: int) -> int | None:
        heap = self._heap
        while heap and heap[0][0] <= now_ms:
            _, _, released = heappop(heap)
            if not released.done():
                released.set_result(None)
        return heap[0][0] if heap else None

    def stop(self) -> None:
        """Release all held sends, so that they are stored before the broker stops."""
        self._timer.cancel()
        for _, _, released in sorted(self._heap):
            if not released.done():
                released.set_result(None)
        self._heap.clear()
