"""The delay levels: their texts, and what a message with a level becomes while it waits.

A delayed message is stored in SCHEDULE_TOPIC_XXXX, queue `level - 1`, with its destination in REAL_TOPIC and
REAL_QID; its consume-queue entry carries the delivery time in ms instead of the tag hash
(docs/reference/storage.md, Delay levels).
"""

from __future__ import annotations

from collections import deque

import msgspec

from cometmq.store import StoreConfig

# What Apache's store adds to a schedule record of a level that the table does not know.
UNKNOWN_LEVEL_MS = 1_000
# A wall clock that moves by less than this against the monotonic clock is being adjusted slowly. Messages
# wait this much longer.
STEP_MS = 10


class DelayLevels(msgspec.Struct, frozen=True):
    """Level (1-based) -> delay: `delays_ms[level - 1]`."""

    delays_ms: tuple[int, ...]

    @classmethod
    def of(cls, config: StoreConfig) -> DelayLevels:
        """The levels of the setting `messageDelayLevel`. Raises ConfigError."""
        return cls(tuple(config.delay_levels_ms.values()))

    def delay_ms(self, level: int) -> int:
        """Delay of a level in ms; 1 s for one that does not exist."""
        return self.delays_ms[level - 1] if 0 < level <= len(self.delays_ms) else UNKNOWN_LEVEL_MS

    def effective(self, requested: int) -> int:
        """The level a request for `requested` gets: 0 for none, never above the last."""
        return min(max(requested, 0), len(self.delays_ms))


class ClockSteps:
    """By how much the monotonic clock was ahead of the wall clock that stamped the records of a queue, and
    from which queue offset on. No I/O in here.

    A record bears the wall time of its storing, but a wall clock steps: what it gained or lost between
    storing and delivery would make messages early or late. So the monotonic clock measures delays, one that
    counts sleep. There is no note for records from before the start: they count as stamped by the wall clock
    of the start.
    """

    __slots__ = ("notes",)

    def __init__(self, now_ms: int, monotonic_ms: int) -> None:
        self.notes = deque([(0, monotonic_ms - now_ms)])

    def note(self, offset: int, ahead_ms: int) -> None:
        """The time stamp of the record at this offset is so far behind the monotonic clock."""
        if abs(ahead_ms - self.notes[-1][1]) > STEP_MS:
            self.notes.append((offset, ahead_ms))

    def ahead_ms(self, offset: int) -> int:
        """What to add to a time of the record at this offset for one of the monotonic clock. Mostly it is
        asked for the oldest."""
        found = self.notes[0][1]
        for first, ahead_ms in self.notes:
            if first > offset:
                break
            found = ahead_ms
        return found

    def passed(self, offset: int) -> None:
        """Nobody asks any more for what is before this offset."""
        while len(self.notes) > 1 and self.notes[1][0] <= offset:
            self.notes.popleft()


class DueTimes:
    """When the messages of one level are due, in milliseconds of the monotonic clock. No I/O in here.

    What was stored before the start counts as stored at the start if its time stamp is in the future.
    """

    __slots__ = ("_delay_ms", "_latest_ms", "_stored", "steps")

    def __init__(self, delay_ms: int, stored: int, now_ms: int, monotonic_ms: int) -> None:
        """stored: the queue's end at the start."""
        self._delay_ms = delay_ms
        self._stored = stored
        self._latest_ms = monotonic_ms + delay_ms  # of what was stored at the start
        self.steps = ClockSteps(now_ms, monotonic_ms)

    def due_ms(self, offset: int, store_timestamp_ms: int) -> int:
        """When the message at this offset is due."""
        due_ms = store_timestamp_ms + self._delay_ms + self.steps.ahead_ms(offset) + STEP_MS
        return min(due_ms, self._latest_ms) if offset < self._stored else due_ms
