"""The timer messages that are not delivered yet, and the progress of the delivery. It does no I/O.

An absolute delivery time is compared with the wall clock (SteadyTime), a delay with a monotonic clock that
includes the time of a suspended machine. So setting the wall clock does not change a delay.

The progress is saved in few numbers (the high-water marks), because the queue of the timer topic contains all
other data. Three kinds of messages count as done: those before `queue_offset` whose TIMER_OUT_MS is at most
`delivered_ms`, all messages before `first_position`, and each message whose position a record after
`log_position` contains (links.py). `log_position` does not advance while a done message is not covered by the
other numbers: for example a message with an early delivery time that arrived after the clock was changed, or
a message that was moved out of a segment in which another one still waits.
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
_MAX_DONE = 1 << 20  # maximum done messages without a high-water mark; above it one mark covers them all
# The size in bytes of the parts of the log that are moved one by one, each in the order of delivery time.
_MOVED_TOGETHER = 16 << 20


class Times(NamedTuple):
    """The wall and the monotonic time of one moment, in ms."""

    wall_ms: int
    monotonic_ms: int

    @property
    def ahead_ms(self) -> int:
        """The lead, in ms, of the monotonic clock over the wall clock."""
        return self.monotonic_ms - self.wall_ms


class Listed(NamedTuple):
    """A waiting message, with its delivery time by the wall clock."""

    due_ms: int
    position: int
    out_ms: int


class _Hashes(NamedTuple):
    """The hashes of one minute's recalls: the sorted ones, and those that arrived later."""

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
        # In this wheel, the delivery time of an entry is the hash of a recall's key, and its TIMER_OUT_MS
        # shows whether the recall was counted.
        self._recalls = Buckets(_MINUTE)
        self._tables = (*self._by_wall.tables, *self._by_delay.tables, self._recalls)
        self._recalled: OrderedDict[int, tuple[_Hashes, _Hashes]] = OrderedDict()
        """The hashes of recalls for the minutes requested last: of all recalls, and of the counted ones."""
        self._log_position = 0  # log position of the last high-water mark
        self._done_outs, self._done_positions = array("q"), array("q")  # messages that no mark covers yet
        # The highest values that marks have covered: a message that arrives later may be due before them.
        self._covered_out = self._covered_position = -1
        self._moving_before = 0  # no message after this position was moved
        self._last_copy = -1  # the position of the last copy of a moved message
        self._places: list[tuple[Buckets, list[int]]] = []  # the buckets with messages before that position
        self._moving: list[tuple[Buckets, int, int]] = []  # the messages last returned by `before`
        self._taken_from = self._by_wall
        self._taken: list[Waiting] = []
        self._delays_first = False
        self._listed_ahead_ms = 0  # a constant lead for all calls of `page`

    def __len__(self) -> int:
        """Return the number of waiting messages and recalls."""
        return len(self._by_wall) + len(self._by_delay) + len(self._recalls)

    @property
    def recalls(self) -> int:
        """The number of waiting recalls."""
        return len(self._recalls)

    def begin(self, mark: TimerTable) -> None:
        """Continue from a high-water mark. The caller must add the messages that still wait."""
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
        """Add a message whose delivery time is by the monotonic clock."""
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
        """Return at most `most` due messages. Each call returns the same ones until `done`.

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
        """Remove the first `count` messages last returned by `due`: they are, or never will be, delivered."""
        for each in self._taken[:count]:
            self.note_done(each.position, each.out_ms)
        self._taken_from.drop(count)
        self._taken = []
        self._delays_first = self._taken_from is self._by_wall

    def note_done(self, position: int, out_ms: int) -> None:
        """Record that a message was delivered, because a record of the log shows it."""
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
        """Return the time until the next message is due if no clock is set, or NEVER if no message waits."""
        waits = (
            (self._by_wall.next_ms(), now.wall_ms),
            (self._by_delay.next_ms(), now.monotonic_ms),
        )
        return min(max(next_ms - now_ms, 0) if next_ms < NEVER else NEVER for next_ms, now_ms in waits)

    # -- moving to the end of the log

    def before(self, position: int, most: int) -> list[tuple[int, int | None]]:
        """Return some messages before a log position that must be moved; none if all were moved.

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
            if len(found) < most:  # a full result may leave other messages in the bucket
                keys.pop()
        return found

    def moved(self, count: int, last_copy: int) -> None:
        """Remove the first `count` messages last returned by `before`: they were copied, or never can be.

        `last_copy` is the log position of the last copy, or -1.
        """
        self._last_copy = max(self._last_copy, last_copy)
        for table, key, some in self._moving:
            table.drop(key, min(some, count))
            count -= min(some, count)
        self._moving = []

    # -- saving and listing

    def mark(self, log_end: int) -> TimerTable | None:
        """Return the current high-water mark, or None while copies in the queue were not read.

        Without the copies, recalls of the messages in them would seem to be done. `log_end` is the present
        end of the log, or its end before work that `done` and `moved` do not include yet.
        """
        if self.followed_position < self._last_copy:
            return None
        first_out = self._first_out()
        first = min(log_end, self._first_position())
        if first_out <= self._covered_out and first <= self._covered_position:
            # The clock was set back, so the former mark covers too much. Only the log shows which messages
            # are done.
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
        """Return whether these two values do not cover some done message; remove the covered ones."""
        outs, positions = np.array(self._done_outs, np.int64), np.array(self._done_positions, np.int64)
        still = (outs >= first_out) & (positions >= first_position)
        self._covered_out = max(self._covered_out, int(outs[~still].max(initial=-1)))
        self._covered_position = max(self._covered_position, int(positions[~still].max(initial=-1)))
        outs, positions = outs[still], positions[still]
        if len(outs) > _MAX_DONE:  # after a clock change, days of messages: the last one decides
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
        if self._recalls.first_key * _MINUTE + _MINUTE > before_ms:  # most often, none is due
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
