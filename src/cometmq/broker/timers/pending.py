"""The timer messages that are not delivered yet, and the progress of the delivery. It does no I/O.

Absolute times wait by the wall clock (SteadyTime), delays by the monotonic clock, which counts sleep. So
setting the wall clock does not change a delay.

The progress is saved in few numbers (the high-water marks), because the queue of the timer topic contains
everything else. Done are the messages before `queue_offset` whose TIMER_OUT_MS is at most `delivered_ms`, all
messages before `first_position`, and each message whose position a record after `log_position` contains
(links.py). The last number stays behind while a message is done that the others do not cover: one that
arrived although an earlier one waits, as after a change of the clock, and one that was moved out of a segment
in which another still waits.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from cometmq.broker.base.delay_levels import STEP_MS
from cometmq.broker.timers.wheel import NEVER, Buckets, Ints, Waiting, Wheel
from cometmq.protocol.timers import PRECISION_MS, TimerCode, delete_keys
from cometmq.store import TimerTable

_JITTER_MS, _MINUTE = 50, 60_000
_MAX_RECALLED, _MAX_SINCE = 8, 1 << 16
_MAX_DONE = 1 << 20  # that no high-water mark covers; above it one mark covers them all
# Messages are moved in parts of the log of this many bytes, each in the order of time.
_MOVED_TOGETHER = 16 << 20


class Times(NamedTuple):
    """The wall and the monotonic time of one moment, in ms."""

    wall_ms: int
    monotonic_ms: int

    @property
    def ahead_ms(self) -> int:
        """The lead of the monotonic clock."""
        return self.monotonic_ms - self.wall_ms


class Listed(NamedTuple):
    """A waiting message, with its delivery time by the wall clock."""

    due_ms: int
    position: int
    out_ms: int


class _Hashes(NamedTuple):
    """The hashes of one minute's recalls: sorted ones, and those that arrived since."""

    ascending: Ints
    since: set[int]


class Pending:
    """All waiting timer messages of a broker.

    Attributes:
        followed: The queue offset up to which messages were read.
        followed_position: The log position of the last message read.
    """

    def __init__(self) -> None:
        self.followed, self.followed_position = 0, -1
        self._by_wall, self._by_delay = Wheel(), Wheel()
        # For recalls, the delivery time is the hash of the key, and TIMER_OUT_MS is whether the recall was
        # counted.
        self._recalls = Buckets(_MINUTE)
        self._tables = (*self._by_wall.tables, *self._by_delay.tables, self._recalls)
        self._recalled: OrderedDict[int, tuple[_Hashes, _Hashes]] = OrderedDict()
        """The hashes of the minutes requested last: all recalls, and the counted ones."""
        self._log_position = 0  # of the last high-water mark
        self._done_outs, self._done_positions = array("q"), array("q")  # not covered by a mark yet
        # The highest values that marks have covered: a message that arrives later may be due before them.
        self._covered_out = self._covered_position = -1
        self._moving_before = 0  # no message after this position was moved
        self._last_copy = -1  # the last copy of a moved message
        self._places: list[tuple[Buckets, list[int]]] = []  # buckets with messages before it
        self._moving: list[tuple[Buckets, int, int]] = []  # last returned by `before`
        self._taken_from = self._by_wall
        self._taken: list[Waiting] = []
        self._delays_first = False
        self._listed_ahead_ms = 0  # see `page`

    def __len__(self) -> int:
        """Return the number of waiting messages and recalls."""
        return len(self._by_wall) + len(self._by_delay) + len(self._recalls)

    @property
    def recalls(self) -> int:
        """The number of waiting recalls."""
        return len(self._recalls)

    def begin(self, mark: TimerTable) -> None:
        """Continue from a high-water mark; messages that still wait must be added."""
        self._log_position = mark.log_position
        self._covered_out = mark.delivered_ms
        self._covered_position = max(mark.counted_position, mark.log_position)

    # -- additions

    def add(self, position: int, code: TimerCode, ahead_ms: int) -> None:
        """Add a message. `ahead_ms` is the lead of the monotonic clock when the message was stored."""
        if code.delayed:
            self._by_delay.add(code.due_ms + ahead_ms + STEP_MS, position, code.out_ms)
        else:
            self._by_wall.add(code.due_ms, position, code.out_ms)

    def add_due(self, position: int, due_ms: int, out_ms: int) -> None:
        """Add a message with a delivery time of the monotonic clock."""
        self._by_delay.add(due_ms, position, out_ms)

    def recall(self, position: int, out_ms: int, key: bytes, *, counted: bool = False) -> None:
        """Record a recall of the message with this `delete_keys` value and this TIMER_OUT_MS.

        `counted` marks a message that is no longer counted as waiting for its topic.
        """
        hashed = hash((key, out_ms))
        self._recalls.add(out_ms, hashed, position, int(counted))
        if known := self._recalled.get(out_ms // _MINUTE):
            for hashes in known if counted else known[:1]:
                hashes.since.add(hashed)
            if len(known[0].since) > _MAX_SINCE:
                del self._recalled[out_ms // _MINUTE]

    def is_recalled(self, out_ms: int, topic: bytes, unique_key: bytes, *, counted: bool = False) -> bool:
        """Return whether a message was recalled; with `counted`, whether by a counted recall."""
        minute = out_ms // _MINUTE
        bucket = self._recalls.get(minute)
        if bucket is None or not unique_key:
            return False
        if minute not in self._recalled:
            # Sorting a million takes 15 ms; putting them into a set takes 150 ms.
            hashes, _, were_counted = bucket.columns()
            those = hashes[were_counted > 0]
            self._recalled[minute] = _Hashes(np.sort(hashes), set()), _Hashes(np.sort(those), set())
            if len(self._recalled) > _MAX_RECALLED:
                self._recalled.popitem(last=False)
        ascending, since = self._recalled[minute][counted]
        asked = [hash((key, out_ms)) for key in delete_keys(topic, unique_key)]
        begins, ends = (np.searchsorted(ascending, asked, side) for side in ("left", "right"))
        return not since.isdisjoint(asked) or bool((begins < ends).any())

    # -- deliveries

    def due(self, now: Times, most: int) -> list[Waiting]:
        """Return at most `most` due messages; the same again until `done`.

        Absolute times and delays alternate, so that many of one kind do not delay the others.
        """
        wheels = [(self._by_wall, now.wall_ms), (self._by_delay, now.monotonic_ms)]
        for wheel, now_ms in reversed(wheels) if self._delays_first else wheels:
            taken = wheel.take(now_ms, most)
            if taken:
                self._taken_from, self._taken = wheel, taken
                return taken
        return []

    def done(self, count: int) -> None:
        """Remove the first `count` messages last returned by `due`: they are delivered, or never will be."""
        for each in self._taken[:count]:
            self.note_done(each.position, each.out_ms)
        self._taken_from.drop(count)
        self._taken = []
        self._delays_first = self._taken_from is self._by_wall

    def note_done(self, position: int, out_ms: int) -> None:
        """Record that a message is delivered, as a record of the log shows."""
        self._done_outs.append(out_ms)
        self._done_positions.append(position)

    def read_ms(self, now: Times) -> int:
        """Return the TIMER_OUT_MS below which all messages are delivered."""
        return min(self._first_out(), now.wall_ms)

    def _first_out(self) -> int:
        return min(table.first_out() for wheel in (self._by_wall, self._by_delay) for table in wheel.tables)

    def _first_position(self) -> int:
        return min(table.first_position() for table in self._tables)

    def wait_ms(self, now: Times) -> int:
        """Return the time until a message is due if no clock is set, or NEVER if none waits."""
        waits = (
            (self._by_wall.next_ms(), now.wall_ms),
            (self._by_delay.next_ms(), now.monotonic_ms),
        )
        return min(max(next_ms - now_ms, 0) if next_ms < NEVER else NEVER for next_ms, now_ms in waits)

    # -- moving to the end of the log

    def before(self, position: int, most: int) -> list[tuple[int, int | None]]:
        """Return some messages before a log position that must be moved; none if all are.

        Each is its position and its delivery time by the monotonic clock, or None if it waits by the wall
        clock.
        """
        while not (found := self._some_to_move(most)):
            first = self._first_position()
            if first >= position:
                break
            self._moving_before = max(self._moving_before, min(position, first + _MOVED_TOGETHER))
            self._places = [(table, table.before(self._moving_before)) for table in self._tables]
        return found

    def _some_to_move(self, most: int) -> list[tuple[int, int | None]]:
        found: list[tuple[int, int | None]] = []
        self._moving = []
        while self._places and len(found) < most:
            table, keys = self._places[-1]
            if not keys:
                self._places.pop()
                continue
            bucket = table.get(keys[-1])
            waiting = bucket.first(most - len(found), self._moving_before) if bucket is not None else []
            delays = table in self._by_delay.tables
            found += [(each.position, each.due_ms if delays else None) for each in waiting]
            self._moving.append((table, keys[-1], len(waiting)))
            if len(found) < most:  # otherwise the bucket may contain more
                keys.pop()
        return found

    def moved(self, count: int, last_copy: int) -> None:
        """Remove the first `count` messages last returned by `before`: copies replace them, or nothing can.

        `last_copy` is the log position of the last copy, or -1.
        """
        self._last_copy = max(self._last_copy, last_copy)
        for table, key, some in self._moving:
            table.drop(key, min(some, count))
            count -= min(some, count)
        self._moving = []

    # -- saving and listing

    def mark(self, log_end: int) -> TimerTable | None:
        """Return the current high-water mark, or None while copies were not read.

        Without the copies, recalls of the messages in them would seem to be done. `log_end` is the end of the
        log, or its end at the beginning of work that `done` or `moved` does not include yet.
        """
        if self.followed_position < self._last_copy:
            return None
        first_out = self._first_out()
        first = min(log_end, self._first_position())
        if first_out <= self._covered_out and first <= self._covered_position:
            # The clock was set back. What was covered is not covered any more; only the log shows it.
            self._log_position = min(self._log_position, first)
            self.note_done(self._covered_position, self._covered_out)
            self._covered_out = self._covered_position = -1
        if not self._still_open(first_out, first) and first >= self._moving_before:
            self._log_position = log_end
        return TimerTable(
            queue_offset=self.followed,
            delivered_ms=first_out - 1,
            first_position=first,
            log_position=self._log_position,
        )

    def _still_open(self, first_out: int, first_position: int) -> bool:
        """Return whether a done message is not covered by these two values; remove the covered ones."""
        outs, positions = np.array(self._done_outs, np.int64), np.array(self._done_positions, np.int64)
        still = (outs >= first_out) & (positions >= first_position)
        self._covered_out = max(self._covered_out, int(outs[~still].max(initial=-1)))
        self._covered_position = max(self._covered_position, int(positions[~still].max(initial=-1)))
        outs, positions = outs[still], positions[still]
        if len(outs) > _MAX_DONE:  # days of them after a change of the clock: covered when the last one is
            outs, positions = outs.max(keepdims=True), positions.max(keepdims=True)
        self._done_outs, self._done_positions = array("q"), array("q")
        self._done_outs.frombytes(outs.tobytes())
        self._done_positions.frombytes(positions.tobytes())
        return len(outs) > 0

    def forget_recalls(self, now: Times) -> None:
        """Remove recalls whose messages, if any, would have been delivered.

        This is only possible when all units were read: a moved message may be due and recalled.
        """
        before_ms = now.wall_ms - PRECISION_MS
        if self._recalls.first_key * _MINUTE + _MINUTE > before_ms:  # the most frequent case
            return
        before_ms = min(before_ms, self._first_out())
        while (self._recalls.first_key + 1) * _MINUTE <= before_ms:
            self._recalled.pop(self._recalls.first_key, None)
            self._recalls.pop(self._recalls.first_key)

    def page(self, after: tuple[int, int], most: int, now: Times) -> list[Listed]:
        """Return the next `most` messages after (due, position), by their delivery times on the wall clock.

        Recalled messages are included.
        """
        # The two clocks are read one after the other, so their difference varies by a millisecond. A list of
        # several pages needs a constant difference.
        if abs(now.ahead_ms - self._listed_ahead_ms) > _JITTER_MS:
            self._listed_ahead_ms = now.ahead_ms
        ahead_ms = self._listed_ahead_ms
        found = [Listed(*each) for each in self._by_wall.page(after, most)]
        for due_ms, position, out_ms in self._by_delay.page((after[0] + ahead_ms, after[1]), most):
            found.append(Listed(due_ms - ahead_ms, position, out_ms))
        return sorted(found)[:most]
