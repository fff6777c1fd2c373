"""The timer messages that are not delivered yet, and how far that is done. No I/O in here.

Times given as such wait by the wall clock (SteadyTime), delays by the monotonic one, which counts sleep. So a
delay is what it is whatever is done to the wall clock.

What is done is kept in few numbers, the mark, since the queue of the timer topic holds everything else: of
the messages before `queue_offset` those are done whose TIMER_OUT_MS is at most `delivered_ms`, and all before
`first_position`; and so is each whose position a record behind `log_position` names (links.py). That last
number stays behind while something is done that the others do not cover: what came although something waits
that was to come before it, as after a step of the clock; and what was moved on of a segment in which
something still waits.
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
_MOST_RECALLED, _MOST_SINCE = 8, 1 << 16
_MOST_DONE = 1 << 20  # that no mark covers: beyond it one stands for them all
# Messages are moved on by such stretches of the log (bytes), each in the order of time.
_MOVED_TOGETHER = 16 << 20


class Times(NamedTuple):
    """Wall and monotonic time of one moment, in ms."""

    wall_ms: int
    monotonic_ms: int

    @property
    def ahead_ms(self) -> int:
        """By how much the monotonic clock is ahead."""
        return self.monotonic_ms - self.wall_ms


class Listed(NamedTuple):
    """A message that waits, by the wall time at which it will come."""

    due_ms: int
    position: int
    out_ms: int


class _Hashes(NamedTuple):
    """Of recalls of one minute: those of a moment, ascending, and those that came since."""

    ascending: Ints
    since: set[int]


class Pending:
    """All timer messages of a broker that wait. `followed`: the queue offset up to which they are known,
    `followed_position` the log position of the last one of these."""

    def __init__(self) -> None:
        self.followed, self.followed_position = 0, -1
        self._by_wall, self._by_delay = Wheel(), Wheel()
        # In place of the due time the hash of the key, in place of TIMER_OUT_MS whether it was counted.
        self._recalls = Buckets(_MINUTE)
        self._tables = (*self._by_wall.tables, *self._by_delay.tables, self._recalls)
        self._recalled: OrderedDict[int, tuple[_Hashes, _Hashes]] = OrderedDict()
        """Those of the minutes asked for last: all, and those counted."""
        self._log_position = 0  # of the last mark
        self._done_outs, self._done_positions = array("q"), array("q")  # what marks do not cover yet
        # The greatest of what marks have covered: a message that comes then may be to come before it.
        self._covered_out = self._covered_position = -1
        self._moving_before = 0  # nothing behind it was moved on
        self._last_copy = -1  # of what was moved on
        self._places: list[tuple[Buckets, list[int]]] = []  # keys of what holds something before that
        self._moving: list[tuple[Buckets, int, int]] = []  # the same of what `before` gave last: how many
        self._taken_from = self._by_wall
        self._taken: list[Waiting] = []
        self._delays_first = False
        self._listed_ahead_ms = 0  # see page

    def __len__(self) -> int:
        """What waits, and what takes something of it back."""
        return len(self._by_wall) + len(self._by_delay) + len(self._recalls)

    @property
    def recalls(self) -> int:
        """How many of these take something back."""
        return len(self._recalls)

    def begin(self, mark: TimerTable) -> None:
        """Go on where a mark says; what still waits is to be added."""
        self._log_position = mark.log_position
        self._covered_out = mark.delivered_ms
        self._covered_position = max(mark.counted_position, mark.log_position)

    # -- what comes

    def add(self, position: int, code: TimerCode, ahead_ms: int) -> None:
        """A message waits. ahead_ms: by how much the monotonic clock was ahead of the wall clock when the
        message was stored."""
        if code.delayed:
            self._by_delay.add(code.due_ms + ahead_ms + STEP_MS, position, code.out_ms)
        else:
            self._by_wall.add(code.due_ms, position, code.out_ms)

    def add_due(self, position: int, due_ms: int, out_ms: int) -> None:
        """A message waits that is due at a time of the monotonic clock."""
        self._by_delay.add(due_ms, position, out_ms)

    def recall(self, position: int, out_ms: int, key: bytes, *, counted: bool = False) -> None:
        """The message with this one of its `delete_keys` and this TIMER_OUT_MS will not be delivered.
        counted: it is not counted any more among what waits for its topic."""
        hashed = hash((key, out_ms))
        self._recalls.add(out_ms, hashed, position, int(counted))
        if known := self._recalled.get(out_ms // _MINUTE):
            for hashes in known if counted else known[:1]:
                hashes.since.add(hashed)
            if len(known[0].since) > _MOST_SINCE:
                del self._recalled[out_ms // _MINUTE]

    def is_recalled(self, out_ms: int, topic: bytes, unique_key: bytes, *, counted: bool = False) -> bool:
        """Whether a message was taken back; with `counted` whether by a recall that was counted."""
        minute = out_ms // _MINUTE
        bucket = self._recalls.get(minute)
        if bucket is None or not unique_key:
            return False
        if minute not in self._recalled:
            # Sorted, since a million take 15 ms so, and 150 ms to be put into a set.
            hashes, _, were_counted = bucket.columns()
            those = hashes[were_counted > 0]
            self._recalled[minute] = _Hashes(np.sort(hashes), set()), _Hashes(np.sort(those), set())
            if len(self._recalled) > _MOST_RECALLED:
                self._recalled.popitem(last=False)
        ascending, since = self._recalled[minute][counted]
        asked = [hash((key, out_ms)) for key in delete_keys(topic, unique_key)]
        begins, ends = (np.searchsorted(ascending, asked, side) for side in ("left", "right"))
        return not since.isdisjoint(asked) or bool((begins < ends).any())

    # -- what goes

    def due(self, now: Times, most: int) -> list[Waiting]:
        """Messages to deliver now, up to so many; until `done` the same again. Times and delays take turns,
        so that many of one kind do not make the others late."""
        wheels = [(self._by_wall, now.wall_ms), (self._by_delay, now.monotonic_ms)]
        for wheel, now_ms in reversed(wheels) if self._delays_first else wheels:
            taken = wheel.take(now_ms, most)
            if taken:
                self._taken_from, self._taken = wheel, taken
                return taken
        return []

    def done(self, count: int) -> None:
        """The first `count` of what `due` gave last are delivered, or never will be."""
        for each in self._taken[:count]:
            self.note_done(each.position, each.out_ms)
        self._taken_from.drop(count)
        self._taken = []
        self._delays_first = self._taken_from is self._by_wall

    def note_done(self, position: int, out_ms: int) -> None:
        """A message is delivered, as a record of the log says."""
        self._done_outs.append(out_ms)
        self._done_positions.append(position)

    def read_ms(self, now: Times) -> int:
        """All with a lower TIMER_OUT_MS is delivered."""
        return min(self._first_out(), now.wall_ms)

    def _first_out(self) -> int:
        return min(table.first_out() for wheel in (self._by_wall, self._by_delay) for table in wheel.tables)

    def _first_position(self) -> int:
        return min(table.first_position() for table in self._tables)

    def wait_ms(self, now: Times) -> int:
        """How long until something is due, if no clock steps; NEVER if nothing waits."""
        waits = (
            (self._by_wall.next_ms(), now.wall_ms),
            (self._by_delay.next_ms(), now.monotonic_ms),
        )
        return min(max(next_ms - now_ms, 0) if next_ms < NEVER else NEVER for next_ms, now_ms in waits)

    # -- what is moved on

    def before(self, position: int, most: int) -> list[tuple[int, int | None]]:
        """Some of what lies before a log position and is to be moved on, nothing when all is: its position,
        and when it is due by the monotonic clock, None for what does not wait by that."""
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
            if len(found) < most:  # else there may be more in it
                keys.pop()
        return found

    def moved(self, count: int, last_copy: int) -> None:
        """The first `count` of what `before` gave last do not wait any more: others have taken their place,
        or nothing can. last_copy: the log position of the last of these others, -1 if there are none."""
        self._last_copy = max(self._last_copy, last_copy)
        for table, key, some in self._moving:
            table.drop(key, min(some, count))
            count -= min(some, count)
        self._moving = []

    # -- what is kept and shown

    def mark(self, log_end: int) -> TimerTable | None:
        """The present state; None while copies are not taken in, since the recalls of what waits there would
        pass for done. log_end: the end of the log, or where it ended when something was begun that `done` or
        `moved` has not been told yet."""
        if self.followed_position < self._last_copy:
            return None
        first_out = self._first_out()
        first = min(log_end, self._first_position())
        if first_out <= self._covered_out and first <= self._covered_position:
            # The clock stepped back. What was covered is not any more, and only the log tells of it.
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
        """Whether something is done that a mark with these two does not cover; forgets what it covers."""
        outs, positions = np.array(self._done_outs, np.int64), np.array(self._done_positions, np.int64)
        still = (outs >= first_out) & (positions >= first_position)
        self._covered_out = max(self._covered_out, int(outs[~still].max(initial=-1)))
        self._covered_position = max(self._covered_position, int(positions[~still].max(initial=-1)))
        outs, positions = outs[still], positions[still]
        if len(outs) > _MOST_DONE:  # days of them after a step of the clock: covered when the last one is
            outs, positions = outs.max(keepdims=True), positions.max(keepdims=True)
        self._done_outs, self._done_positions = array("q"), array("q")
        self._done_outs.frombytes(outs.tobytes())
        self._done_positions.frombytes(positions.tobytes())
        return len(outs) > 0

    def forget_recalls(self, now: Times) -> None:
        """Forget recalls whose messages, if there were any, have had their time. Only while all that came is
        taken in: a message that was moved on may be due, and taken back."""
        before_ms = now.wall_ms - PRECISION_MS
        if self._recalls.first_key * _MINUTE + _MINUTE > before_ms:  # most often
            return
        before_ms = min(before_ms, self._first_out())
        while (self._recalls.first_key + 1) * _MINUTE <= before_ms:
            self._recalled.pop(self._recalls.first_key, None)
            self._recalls.pop(self._recalls.first_key)

    def page(self, after: tuple[int, int], most: int, now: Times) -> list[Listed]:
        """The next `most` messages behind (due, position), by the wall times at which they will come.
        Those that were taken back are among them."""
        # Two clocks are read one after the other, so what they differ by is a millisecond more or less each
        # time. A list of several pages needs it to stand still.
        if abs(now.ahead_ms - self._listed_ahead_ms) > _JITTER_MS:
            self._listed_ahead_ms = now.ahead_ms
        ahead_ms = self._listed_ahead_ms
        found = [Listed(*each) for each in self._by_wall.page(after, most)]
        for due_ms, position, out_ms in self._by_delay.page((after[0] + ahead_ms, after[1]), most):
            found.append(Listed(due_ms - ahead_ms, position, out_ms))
        return sorted(found)[:most]
