"""The expiry of leases.

A message whose lease expires is copied to a retry topic or becomes a dead letter (retries.py). The lease ends
when the copy is stored, so a crash in between leads to a second delivery and never to a loss. While the store
refuses messages (its disk may be full), the leases expire again and again, in small numbers.

A client that vanishes may leave 100,000 leases, so their expiry takes as many iterations of the event loop as
necessary, and in each of them little time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from cometmq.broker.base.deadlines import DeadlineTimer
from cometmq.broker.base.times import mono_ms
from cometmq.broker.pop.leases import Lease, Leases, QueueKey
from cometmq.broker.pop.retries import Overdue, Retries
from cometmq.store import Clock

MAX_TURN_S = 0.002
"""The time in seconds after which the expiry goes on in the next event-loop iteration."""
PER_STEP = 8
"""The number of expired leases that are handled between two looks at the clock."""
MAX_COPIES = 1_024
"""The maximum number of copies that are being stored."""
REFUSED_PER_TURN = 64
"""The maximum number of expired leases that are handled every MIN_INTERVAL_MS while copies are refused."""
MIN_INTERVAL_MS = 20
MAX_INTERVAL_MS = 1_000
"""The maximum interval, in ms, between two checks for expired leases.

The timers of the event loop do not count the time for which the machine is suspended. After a suspension,
the next check is therefore at most this interval late.
"""
POSTPONED_MS = 2_000
"""The time, in ms, after which a lease expires again whose message could not be copied."""


@dataclass(eq=False)
class LeaseExpiry:
    """Handles the leases that expire. `freed` is called with each queue whose ordered leases have expired."""

    clock: Clock
    leases: Leases
    retries: Retries
    freed: Callable[[QueueKey], None]

    def __post_init__(self) -> None:
        self._timer = DeadlineTimer(asyncio.get_running_loop(), self._expire)
        self._stopped = True
        self._copies = 0  # The number of copies that are being stored
        self._refused = False  # Whether the last copy was refused

    def arm(self) -> None:
        """Start or advance the timer for the next lease that expires."""
        deadline_ms = self.leases.next_deadline_ms()
        if deadline_ms is None or self._stopped or self._copies >= MAX_COPIES:
            return
        delay_ms = deadline_ms - mono_ms(self.clock)
        if delay_ms > 0 or self._refused:
            delay_ms = min(max(delay_ms, MIN_INTERVAL_MS), MAX_INTERVAL_MS)
        self._timer.arm(self._timer.now_ms() + max(delay_ms, 0))

    def _expire(self, _now_ms: int) -> None:
        until_s = self.clock.monotonic() + MAX_TURN_S
        left = REFUSED_PER_TURN if self._refused else MAX_COPIES
        while (count := min(left, PER_STEP, MAX_COPIES - self._copies)) > 0:
            expired, freed = self.leases.expired(mono_ms(self.clock), count)
            for key in freed:
                self.freed(key)
            for lease in expired:
                self._handle(lease)
            left -= count
            if len(freed) + len(expired) < count or self.clock.monotonic() >= until_s:
                break
        self.arm()

    def _handle(self, lease: Lease) -> None:
        queue = lease.queue
        if queue is None:
            return

        def done(ok: bool) -> None:
            self._copies -= 1
            self._refused = not ok
            if ok:
                self.leases.end(lease)
            else:
                self.leases.postpone(lease, mono_ms(self.clock) + POSTPONED_MS)
            if not ok or self._copies == MAX_COPIES // 2:
                self.arm()

        self._copies += 1
        self.retries.copy(Overdue(*queue.key, lease.offset, lease.pop.pop_ms, lease.counts), done)

    def start(self) -> None:
        """Begin to handle expired leases."""
        self._stopped = False
        self.arm()

    def stop(self) -> None:
        """Handle no further leases."""
        self._stopped = True
        self._timer.cancel()
