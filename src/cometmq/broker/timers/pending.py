"""The timer messages that are not delivered yet, and the progress of their delivery. This module does no I/O.

An absolute delivery time is compared with the wall clock (SteadyTime). A delay is measured with a monotonic
clock that also counts the time of a suspended machine, so setting the wall clock does not change the delay.

A message is done when it was delivered, recalled, or moved (copied to the end of the log). The progress is
saved as a few numbers, the high-water mark; everything else is in the queue of the timer topic. After a
start, a message counts as done in three cases:

- Its queue offset is below `queue_offset`, and its TIMER_OUT_MS is at most `delivered_ms`.
- Its log position is below `first_position`.
- A record at or after the log position `log_position` refers to it, for instance its copy (links.py).

The value of `log_position` must not advance while there are done messages to which only the third case
applies. One example is a message that arrived after a change of the clock with an early delivery time.
Another one is a message that was moved out of a segment in which another message still waits.
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
_MAX_DONE = 1 << 20  # see `_still_open`
# The size, in bytes, of the parts of the log whose messages are moved together. The messages of a part are
# moved in the order of their delivery times.
_MOVED_TOGETHER = 16 << 20


class Times(NamedTuple):
    """The wall-clock time and the monotonic time of the same moment, in ms."""

    wall_ms: int
    monotonic_ms: int

    @property
    def ahead_ms(self) -> int:
        return self.monotonic_ms - self.wall_ms


class _Hashes(NamedTuple):
    """The hashes of the recalls of one minute: a sorted array, and a set of those added after sorting."""

    ascending: Ints
    since: set[int]


class Pending:
    """All waiting timer messages of a broker.

    Attributes:
        followed: The queue offset up to which messages have been read.
        followed_position: The log position of the last message that has been read.
    """

    def __init__(self) -> None:
        self.followed, self.followed_position = 0, -1
        self._by_wall, self._by_delay = Wheel(), Wheel()
        # The recalls, grouped by the minute of their TIMER_OUT_MS. The buckets' two columns for message times
        # have another use here. The column of delivery times contains the hash of the recall's key. The
        # column of TIMER_OUT_MS contains 1 if the recall has reduced the number of waiting messages, else 0.
        self._recalls = Buckets(_MINUTE)
        self._tables = (*self._by_wall.tables, *self._by_delay.tables, self._recalls)
        self._recalled: OrderedDict[int, tuple[_Hashes, _Hashes]] = OrderedDict()
        """For each recently used minute of TIMER_OUT_MS: the hashes of all recalls, and of counted ones."""
        self._log_position = 0  # `log_position` of the last high-water mark
        # TIMER_OUT_MS and log position of each delivered, moved or recalled message that no high-water mark
        # covers.
        self._done_outs, self._done_positions = array("q"), array("q")
        # The highest TIMER_OUT_MS and the highest log position of the messages that a high-water mark has
        # covered as done. A message that arrives later with lower values would wrongly be covered, too.
        self._covered_out = self._covered_position = -1
        # All messages selected for moving so far were stored before this log position.
        self._moving_before = 0
        self._last_copy = -1  # log position of the newest copy of a moved message; -1 if there is none
        # The buckets that contain messages to be moved, which are stored before `_moving_before`. Each pair
        # is a table and the keys of the buckets in it.
        self._places: list[tuple[Buckets, list[int]]] = []
        # The messages that `before` last returned. Each tuple is a table, the key of a bucket in it, and how
        # many messages of this bucket were returned.
        self._moving: list[tuple[Buckets, int, int]] = []
        self._taken_from = self._by_wall
        self._taken: list[Waiting] = []
        self._delays_first = False
        self._listed_ahead_ms = 0  # Monotonic minus wall-clock time (ms), kept equal for all pages of a list

    def __len__(self) -> int:
        """Return the number of waiting messages and recalls."""
        return len(self._by_wall) + len(self._by_delay) + len(self._recalls)

    @property
    def recalls(self) -> int:
        """The number of recalls whose messages may still be waiting."""
        return len(self._recalls)

    def begin(self, mark: TimerTable) -> None:
        """Continue from a saved high-water mark. The caller then adds the messages that still wait."""
        self._log_position = mark.log_position
        self._covered_out = mark.delivered_ms
        self._covered_position = max(mark.counted_position, mark.log_position)

    # -- additions

    def add(self, position: int, code: TimerCode, ahead_ms: int) -> None:
        """Add a message. `ahead_ms` is `Times.ahead_ms` at the time when the message was stored."""
        if code.delayed:
            self._by_delay.add(code.due_ms + ahead_ms + STEP_MS, position, code.out_ms)
        else:
            self._by_wall.add(code.due_ms, position, code.out_ms)

    def add_due(self, position: int, due_ms: int, out_ms: int) -> None:
        """Add a message by its delivery time on the monotonic clock."""
        self._by_delay.add(due_ms, position, out_ms)

    def recall(self, position: int, out_ms: int, key: bytes, *, counted: bool = False) -> None:
        """Record the recall of the message with this key (see `delete_keys`) and this TIMER_OUT_MS.

        A `counted` recall has reduced the number of waiting messages of its topic.
        """
        hashed = hash((key, out_ms))
        self._recalls.add(out_ms, hashed, position, int(counted))
        if known := self._recalled.get(out_ms // _MINUTE):
            for hashes in known if counted else known[:1]:
                hashes.since.add(hashed)
            if len(known[0].since) > _MAX_SINCE:
                del self._recalled[out_ms // _MINUTE]

    def is_recalled(self, out_ms: int, topic: bytes, unique_key: bytes, *, counted: bool = False) -> bool:
        """Return whether a message was recalled. With `counted`, consider only counted recalls."""
        minute = out_ms // _MINUTE
        bucket = self._recalls.get(minute)
        if bucket is None or not unique_key:
            return False
        if minute not in self._recalled:
            # Sort the hashes instead of building a set: for a million hashes, 15 ms instead of 150 ms.
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
        """Return at most `most` due messages. Until `done` is called, each call returns the same messages.

        Messages with absolute times and with delays alternate, so that many messages of one kind do not delay
        those of the other kind.
        """
        wheels = [(self._by_wall, now.wall_ms), (self._by_delay, now.monotonic_ms)]
        for wheel, now_ms in reversed(wheels) if self._delays_first else wheels:
            taken = wheel.take(now_ms, most)
            if taken:
                self._taken_from, self._taken = wheel, taken
                return taken
        return []

    def done(self, count: int) -> None:
        """Remove the first `count` messages that `due` last returned: they are done or undeliverable."""
        for each in self._taken[:count]:
            self.note_done(each.position, each.out_ms)
        self._taken_from.drop(count)
        self._taken = []
        self._delays_first = self._taken_from is self._by_wall

    def note_done(self, position: int, out_ms: int) -> None:
        """Record that a message was delivered, moved or recalled. A record in the log must prove this."""
        self._done_outs.append(out_ms)
        self._done_positions.append(position)

    def read_ms(self, now: Times) -> int:
        """Return a time (ms) such that all messages whose TIMER_OUT_MS is before it are delivered."""
        return min(self._first_out(), now.wall_ms)

    def _first_out(self) -> int:
        return min(table.first_out() for wheel in (self._by_wall, self._by_delay) for table in wheel.tables)

    def _first_position(self) -> int:
        return min(table.first_position() for table in self._tables)

    def wait_ms(self, now: Times) -> int:
        """Return the time until the next message is due, in ms, or NEVER. It assumes that no clock is set."""
        waits = ((self._by_wall.next_ms(), now.wall_ms), (self._by_delay.next_ms(), now.monotonic_ms))
        return min(max(next_ms - now_ms, 0) if next_ms < NEVER else NEVER for next_ms, now_ms in waits)

    # -- moving to the end of the log

    def before(self, position: int, most: int) -> list[tuple[int, int | None]]:
        """Return up to `most` waiting messages that were stored before the log position `position`.

        Each is returned as its log position and its delivery time (ms) on the monotonic clock, or None if it
        is delivered by the wall clock.
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
            # If the result is full, keep the bucket's key: the bucket may contain further messages to move.
            if len(found) < most:
                keys.pop()
        return found

    def moved(self, count: int, last_copy: int) -> None:
        """Remove the first `count` messages that `before` last returned: each was copied, or cannot be.

        `last_copy` is the log position of the last copy, or -1 if there is none.
        """
        self._last_copy = max(self._last_copy, last_copy)
        for table, key, some in self._moving:
            table.drop(key, min(some, count))
            count -= min(some, count)
        self._moving = []

    # -- saving and listing

    def mark(self, log_end: int) -> TimerTable | None:
        """Return the current high-water mark, or None while copies of moved messages are still unread.

        A mark that was saved before a copy has been read from the queue would cover the recall of the copied
        message. After a restart, the recall would not apply to the copy, and the message would be delivered.
        `log_end` is the end of the log before deliveries or moves that are not recorded as done yet.
        """
        if self.followed_position < self._last_copy:
            return None
        first_out = self._first_out()
        first = min(log_end, self._first_position())
        if first_out <= self._covered_out and first <= self._covered_position:
            # The clock was set back, so the last high-water mark covers messages that still wait. Now only
            # the copies in the log show which messages are done. So `log_position`, from which a start
            # searches the log for copies, must not advance past these copies.
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
        """Remove the done messages that a high-water mark of these values covers. Return if any are left."""
        outs, positions = np.array(self._done_outs, np.int64), np.array(self._done_positions, np.int64)
        still = (outs >= first_out) & (positions >= first_position)
        self._covered_out = max(self._covered_out, int(outs[~still].max(initial=-1)))
        self._covered_position = max(self._covered_position, int(positions[~still].max(initial=-1)))
        outs, positions = outs[still], positions[still]
        # If there are too many messages, replace them with a single pair of values: the highest TIMER_OUT_MS
        # and the highest log position. A high-water mark that covers this pair covers each of the messages.
        if len(outs) > _MAX_DONE:
            outs, positions = outs.max(keepdims=True), positions.max(keepdims=True)
        self._done_outs, self._done_positions = array("q"), array("q")
        self._done_outs.frombytes(outs.tobytes())
        self._done_positions.frombytes(positions.tobytes())
        return len(outs) > 0

    def forget_recalls(self, now: Times) -> None:
        """Remove the recalls whose messages, if they existed, would have been delivered by now.

        The timer topic's queue must have been read to its end: an unread copy may still need its recall.
        """
        before_ms = now.wall_ms - PRECISION_MS
        # Usually, no recall is old enough to be removed, so return early.
        if self._recalls.first_key * _MINUTE + _MINUTE > before_ms:
            return
        before_ms = min(before_ms, self._first_out())
        while (self._recalls.first_key + 1) * _MINUTE <= before_ms:
            self._recalled.pop(self._recalls.first_key, None)
            self._recalls.pop(self._recalls.first_key)

    def page(self, after: tuple[int, int], most: int, now: Times) -> list[Waiting]:
        """Return waiting messages, also recalled ones, by delivery time on the wall clock and log position.

        The result begins after the pair `after` (delivery time in ms, log position).
        """
        # All pages of a list need the same difference between the two clocks. The measured difference varies
        # by about 1 ms, because the clocks are read one after the other. So ignore small changes.
        if abs(now.ahead_ms - self._listed_ahead_ms) > _JITTER_MS:
            self._listed_ahead_ms = now.ahead_ms
        ahead_ms = self._listed_ahead_ms
        found = self._by_wall.page(after, most)
        for due_ms, position, out_ms in self._by_delay.page((after[0] + ahead_ms, after[1]), most):
            found.append(Waiting(due_ms - ahead_ms, position, out_ms))
        return sorted(found)[:most]
