"""Delay levels: their configuration, and the delivery times of messages that have one.

A message with a delay level is stored in SCHEDULE_TOPIC_XXXX, queue `level - 1`, until its delivery. Its
properties REAL_TOPIC and REAL_QID hold the destination. Its consume-queue entry contains the delivery time in
ms in place of the tag hash (docs/reference/storage.md, Delay levels).
"""

from __future__ import annotations

from collections import deque

import msgspec

from cometmq.store import StoreConfig

# The delay, in ms, of a level that `messageDelayLevel` does not define. It is the same in Apache's store.
UNKNOWN_LEVEL_MS = 1_000
# If the difference between the wall clock and a monotonic clock changes by more than STEP_MS, someone has set
# the wall clock. Smaller changes are ignored, because they are slow adjustments. Ignoring them could make a
# delivery time too early by up to STEP_MS, so STEP_MS is added to each delivery time.
STEP_MS = 10


class DelayLevels(msgspec.Struct, frozen=True):
    """The delays of all levels in ms. Levels count from 1: a level's delay is `delays_ms[level - 1]`."""

    delays_ms: tuple[int, ...]

    @classmethod
    def of(cls, config: StoreConfig) -> DelayLevels:
        """Return the delay levels of the setting `messageDelayLevel`. Raises ConfigError if it is invalid."""
        return cls(tuple(config.delay_levels_ms.values()))

    def delay_ms(self, level: int) -> int:
        """Return the delay of a level in ms. The delay of an undefined level is 1 s."""
        return self.delays_ms[level - 1] if 0 < level <= len(self.delays_ms) else UNKNOWN_LEVEL_MS

    def effective(self, requested: int) -> int:
        """Return a requested delay level, limited to the range from 0 (no delay) to the last level."""
        return min(max(requested, 0), len(self.delays_ms))


class ClockSteps:
    """For each record of a queue, the difference between monotonic and wall clock when it was stored.

    A record contains only the wall-clock time at which it was stored. If the wall clock is set before the
    record is delivered, that time no longer shows how long the record has waited. Therefore delays are
    measured with a monotonic clock, which also counts the time that the machine is suspended. A record's
    store time on this clock is its store time on the wall clock plus the difference saved here. For records
    from before the broker's start, the difference at the start is used. The differences are kept in memory,
    by queue offset.
    """

    __slots__ = ("notes",)

    def __init__(self, now_ms: int, monotonic_ms: int) -> None:
        self.notes = deque([(0, monotonic_ms - now_ms)])

    def note(self, offset: int, ahead_ms: int) -> None:
        """Save the difference, monotonic minus wall clock, from `offset` on, if it changed by > STEP_MS."""
        if abs(ahead_ms - self.notes[-1][1]) > STEP_MS:
            self.notes.append((offset, ahead_ms))

    def ahead_ms(self, offset: int) -> int:
        """Return the saved difference (monotonic minus wall clock, in ms) for the record at an offset."""
        found = self.notes[0][1]
        for first, ahead_ms in self.notes:
            if first > offset:
                break
            found = ahead_ms
        return found

    def passed(self, offset: int) -> None:
        """Remove the saved clock differences that only concern records before `offset`."""
        while len(self.notes) > 1 and self.notes[1][0] <= offset:
            self.notes.popleft()


class DueTimes:
    """The delivery times of one level's messages, in ms of the monotonic clock.

    Messages that were stored before the broker's start are due no later than the level's delay after the
    start, even if the wall clock has been set back and their store times are in the future.
    """

    __slots__ = ("_delay_ms", "_latest_ms", "_stored", "steps")

    def __init__(self, delay_ms: int, stored: int, now_ms: int, monotonic_ms: int) -> None:
        """Create the times of a level, whose queue had the end offset `stored` at the broker's start."""
        self._delay_ms = delay_ms
        self._stored = stored
        # The latest delivery time of messages that were stored before the broker's start
        self._latest_ms = monotonic_ms + delay_ms
        self.steps = ClockSteps(now_ms, monotonic_ms)

    def due_ms(self, offset: int, store_timestamp_ms: int) -> int:
        """Return the delivery time, in ms of the monotonic clock, of the message at a queue offset."""
        due_ms = store_timestamp_ms + self._delay_ms + self.steps.ahead_ms(offset) + STEP_MS
        return min(due_ms, self._latest_ms) if offset < self._stored else due_ms
