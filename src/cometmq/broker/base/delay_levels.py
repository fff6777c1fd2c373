"""Delay levels: their configuration, and the stored form of a message that waits.

A delayed message is stored in SCHEDULE_TOPIC_XXXX, queue `level - 1`, with its destination in REAL_TOPIC and
REAL_QID. Its consume-queue entry contains the delivery time in ms instead of the tag hash
(docs/reference/storage.md, Delay levels).
"""

from __future__ import annotations

from collections import deque

import msgspec

from cometmq.store import StoreConfig

# The delay that Apache's store uses for a level that the table does not contain.
UNKNOWN_LEVEL_MS = 1_000
# Smaller changes of the wall clock against the monotonic clock are slow adjustments. For safety, messages
# wait for this much longer.
STEP_MS = 10


class DelayLevels(msgspec.Struct, frozen=True):
    """The delays of the levels, which count from 1: `delays_ms[level - 1]`."""

    delays_ms: tuple[int, ...]

    @classmethod
    def of(cls, config: StoreConfig) -> DelayLevels:
        """Return the levels of the setting `messageDelayLevel`. Raises ConfigError."""
        return cls(tuple(config.delay_levels_ms.values()))

    def delay_ms(self, level: int) -> int:
        """Return the delay of a level in ms, 1 s for an unknown level."""
        return self.delays_ms[level - 1] if 0 < level <= len(self.delays_ms) else UNKNOWN_LEVEL_MS

    def effective(self, requested: int) -> int:
        """Return the level for a requested one: 0 for none, at most the last level."""
        return min(max(requested, 0), len(self.delays_ms))


class ClockSteps:
    """The lead of the monotonic clock over the wall clock when the records of a queue were stored.

    A record contains the wall time of its storing. If the wall clock is set between storing and delivery, it
    would deliver messages early or late. So delays are measured by a monotonic clock that includes the time
    of a suspended machine. Records from before the start count as stored by the wall clock of the start. The
    leads are kept by queue offset, without I/O.
    """

    __slots__ = ("notes",)

    def __init__(self, now_ms: int, monotonic_ms: int) -> None:
        self.notes = deque([(0, monotonic_ms - now_ms)])

    def note(self, offset: int, ahead_ms: int) -> None:
        """Record the lead in ms for the record at this offset and those after it."""
        if abs(ahead_ms - self.notes[-1][1]) > STEP_MS:
            self.notes.append((offset, ahead_ms))

    def ahead_ms(self, offset: int) -> int:
        """Return the ms to add to the store time of the record at this offset to get monotonic time.

        The oldest record is the most frequent case.
        """
        found = self.notes[0][1]
        for first, ahead_ms in self.notes:
            if first > offset:
                break
            found = ahead_ms
        return found

    def passed(self, offset: int) -> None:
        """Remove the entries that concern only records before this offset."""
        while len(self.notes) > 1 and self.notes[1][0] <= offset:
            self.notes.popleft()


class DueTimes:
    """The delivery times of one level's messages, in ms of the monotonic clock. It does no I/O.

    A message stored before the start counts as stored at the start if its timestamp lies in the future.
    """

    __slots__ = ("_delay_ms", "_latest_ms", "_stored", "steps")

    def __init__(self, delay_ms: int, stored: int, now_ms: int, monotonic_ms: int) -> None:
        """Create the times of a level whose queue ended at offset `stored` at the start."""
        self._delay_ms = delay_ms
        self._stored = stored
        self._latest_ms = monotonic_ms + delay_ms  # the latest time for messages stored before the start
        self.steps = ClockSteps(now_ms, monotonic_ms)

    def due_ms(self, offset: int, store_timestamp_ms: int) -> int:
        """Return the delivery time of the message at this offset."""
        due_ms = store_timestamp_ms + self._delay_ms + self.steps.ahead_ms(offset) + STEP_MS
        return min(due_ms, self._latest_ms) if offset < self._stored else due_ms
