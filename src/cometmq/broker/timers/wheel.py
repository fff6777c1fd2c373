"""Waiting messages, sorted by delivery time. This module does no I/O.

A message is three numbers: its delivery time on the wheel's clock, the log position of its record, and its
TIMER_OUT_MS. These numbers take 24 bytes, so a million messages take about 30 MB. A bucket holds the messages
of five minutes. The next bucket to become due, and each bucket with many messages, is divided into buckets of
one second. Messages of the same second are delivered in the order in which they were added. This is the order
of the log, so the messages before a given log position are the first ones in each bucket.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SECOND, _STRETCH = 1_000, 300_000
# A five-minute bucket is divided into buckets of one second when it has this many messages. Dividing so many
# messages blocks the event loop for some ms.
_MANY = 1 << 14
NEVER = sys.maxsize

Ints = NDArray[np.int64]


class Waiting(NamedTuple):
    """A waiting message: delivery time (by wall clock or monotonic clock), log position, TIMER_OUT_MS."""

    due_ms: int
    position: int
    out_ms: int


class Bucket:
    """The waiting messages of one period. They are added, and kept, in the order of their log positions."""

    __slots__ = (
        "_dues", "_head", "_outs", "_positions", "first_due", "first_out", "first_position", "last_due",
    )  # fmt: skip

    def __init__(self) -> None:
        self._dues, self._positions, self._outs = array("q"), array("q"), array("q")
        self._head = 0  # number of removed messages that are still at the start of the three arrays
        self.first_position = NEVER
        # The latest delivery time, the earliest delivery time, and the lowest TIMER_OUT_MS of all messages
        # that the bucket has ever contained, including removed ones.
        self.last_due, self.first_due, self.first_out = 0, NEVER, NEVER

    def __len__(self) -> int:
        return len(self._dues) - self._head

    def add(self, due_ms: int, position: int, out_ms: int) -> None:
        if not len(self):
            self.first_position = position
        self._dues.append(due_ms)
        self._positions.append(position)
        self._outs.append(out_ms)
        self.last_due = max(self.last_due, due_ms)
        self.first_due = min(self.first_due, due_ms)
        self.first_out = min(self.first_out, out_ms)

    def _views(self) -> list[Ints]:
        """Return the three columns of `columns` as views. No message can be added while a view exists."""
        columns = (self._dues, self._positions, self._outs)
        return [np.frombuffer(each, np.int64)[self._head :] for each in columns]

    def columns(self) -> Ints:
        """Return a copy of the remaining messages' delivery times, log positions and TIMER_OUT_MS."""
        return np.stack(self._views())

    @classmethod
    def of(cls, columns: Ints) -> Bucket:
        """Create a bucket from the result of another bucket's method `columns`, which must not be empty."""
        bucket = cls()
        for store, column in zip((bucket._dues, bucket._positions, bucket._outs), columns, strict=True):
            store.frombytes(column.tobytes())
        dues, positions, outs = columns
        bucket.first_position = int(positions[0])
        bucket.last_due, bucket.first_due = int(dues.max()), int(dues.min())
        bucket.first_out = int(outs.min())
        return bucket

    def first(self, most: int, before: int = NEVER) -> list[Waiting]:
        """Return at most `most` messages from the start of the bucket, with log positions below `before`."""
        head = self._head
        stop = bisect_left(self._positions, before, head, min(head + most, len(self._positions)))
        return list(map(Waiting, self._dues[head:stop], self._positions[head:stop], self._outs[head:stop]))

    def drop(self, count: int) -> None:
        self._head += count
        if self._head > len(self):
            for column in (self._dues, self._positions, self._outs):
                del column[: self._head]
            self._head = 0
        self.first_position = self._positions[self._head] if len(self) else NEVER

    def behind(self, after: tuple[int, int], most: int) -> list[Waiting]:
        """Return at most `most` messages that follow `after` in the order of the pairs (due_ms, position)."""
        if self.last_due < after[0]:
            return []
        dues, positions, outs = self._views()
        same = bisect_left(positions, after[1] + 1)
        # If all messages of the bucket have the same delivery time, they are sorted by position already.
        if self.first_due == self.last_due:
            begin = same if self.last_due == after[0] else 0
            rows = np.arange(begin, min(begin + most, len(dues)))
        else:
            wanted = dues > after[0]
            wanted[same:] |= dues[same:] == after[0]
            rows = np.flatnonzero(wanted)
        if len(rows) > most:
            last = np.partition(dues[rows], most - 1)[most - 1]
            sooner = rows[dues[rows] < last]
            rows = np.concatenate([sooner, rows[dues[rows] == last][: most - len(sooner)]])
        rows = rows[np.argsort(dues[rows], kind="stable")]
        return list(map(Waiting, dues[rows].tolist(), positions[rows].tolist(), outs[rows].tolist()))


class Buckets:
    """Buckets of messages, one for each period of `length_ms` that has messages.

    The key of a bucket is the start time of its period, divided by `length_ms`.
    """

    def __init__(self, length_ms: int) -> None:
        self._length_ms = length_ms
        self._buckets: dict[int, Bucket] = {}
        self._order: list[int] = []  # the keys of `_buckets`, ascending
        self._count = 0

    def __len__(self) -> int:
        """Return the number of messages in all buckets."""
        return self._count

    @property
    def first_key(self) -> int:
        """The lowest key of a bucket, or NEVER if there are no buckets."""
        return self._order[0] if self._order else NEVER

    def get(self, key: int) -> Bucket | None:
        return self._buckets.get(key)

    def add(self, time_ms: int, due_ms: int, position: int, out_ms: int) -> Bucket:
        """Add a message to the bucket of the period that contains `time_ms`. Return the bucket."""
        key = time_ms // self._length_ms
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket()
            insort(self._order, key)
        bucket.add(due_ms, position, out_ms)
        self._count += 1
        return bucket

    def put(self, key: int, bucket: Bucket) -> None:
        """Add a bucket under `key`, under which there must not be a bucket yet."""
        self._buckets[key] = bucket
        insort(self._order, key)
        self._count += len(bucket)

    def pop(self, key: int) -> Bucket:
        del self._order[bisect_left(self._order, key)]
        bucket = self._buckets.pop(key)
        self._count -= len(bucket)
        return bucket

    def drop(self, key: int, count: int) -> None:
        """Remove the first `count` messages of a period's bucket. Remove the bucket if it becomes empty."""
        bucket = self._buckets.get(key)
        if bucket is None:
            return
        bucket.drop(count)
        self._count -= count
        if not len(bucket):
            self.pop(key)

    def stretches(self, length_ms: int) -> set[int]:
        """Return the start times of the buckets' periods, each divided by `length_ms` and rounded down."""
        return {key * self._length_ms // length_ms for key in self._order}

    def first_out(self) -> int:
        """Return the lowest TIMER_OUT_MS of all messages that were ever added to the present buckets."""
        return min(map(attrgetter("first_out"), self._buckets.values()), default=NEVER)

    def first_position(self) -> int:
        """Return the lowest log position of the messages in all buckets, or NEVER if there are none."""
        return min(map(attrgetter("first_position"), self._buckets.values()), default=NEVER)

    def before(self, position: int) -> list[int]:
        """Return the keys of all buckets that contain a message with a log position below `position`."""
        return [key for key, bucket in self._buckets.items() if bucket.first_position < position]

    def behind(self, time_ms: int) -> Iterator[tuple[int, Bucket]]:
        """Yield the start time (ms) and bucket of each period, from the period that contains `time_ms` on."""
        for at in range(bisect_left(self._order, time_ms // self._length_ms), len(self._order)):
            yield self._order[at] * self._length_ms, self._buckets[self._order[at]]


class Wheel:
    """The waiting messages whose delivery times are measured on one clock.

    The clock may be set back between two calls.
    """

    def __init__(self) -> None:
        self._stretches, self._seconds = Buckets(_STRETCH), Buckets(_SECOND)
        self.tables = (self._seconds, self._stretches)
        """The buckets of one second and of five minutes, which together contain all waiting messages."""
        self._divided: set[int] = set()  # keys of the five-minute periods whose messages are in `_seconds`
        self._taken = -1  # key of the one-second bucket from which `take` last returned messages

    def __len__(self) -> int:
        return len(self._seconds) + len(self._stretches)

    def add(self, due_ms: int, position: int, out_ms: int) -> None:
        """Add a message. If its five-minute bucket now has many, divide it into one-second buckets."""
        if due_ms // _STRETCH in self._divided:
            self._seconds.add(due_ms, due_ms, position, out_ms)
        elif len(self._stretches.add(due_ms, due_ms, position, out_ms)) >= _MANY:
            self._divide(due_ms // _STRETCH)

    def take(self, now_ms: int, most: int) -> list[Waiting]:
        """Return at most `most` due messages, without removing them: `drop` removes them later."""
        if self._stretch_is_next() and self._stretches.first_key * _STRETCH <= now_ms:
            self._divide(self._stretches.first_key)
        bucket = self._seconds.get(self._seconds.first_key)
        if bucket is None or bucket.last_due > now_ms:
            return []
        self._taken = self._seconds.first_key
        return bucket.first(most)

    def drop(self, count: int) -> None:
        """Remove the first `count` of the messages that `take` last returned."""
        self._seconds.drop(self._taken, count)

    def next_ms(self) -> int:
        """Return the time (ms) by which `take` must be called next, or NEVER if no message waits."""
        if self._stretch_is_next():
            return self._stretches.first_key * _STRETCH
        bucket = self._seconds.get(self._seconds.first_key)
        return bucket.last_due if bucket is not None else NEVER

    def _stretch_is_next(self) -> bool:
        """Return whether the next due messages are in a five-minute bucket, not in a one-second bucket."""
        return self._stretches.first_key * _STRETCH < self._seconds.first_key * _SECOND

    def _divide(self, stretch: int) -> None:
        columns = self._stretches.pop(stretch).columns()
        columns = columns[:, np.argsort(columns[0] // _SECOND, kind="stable")]
        numbers, begins = np.unique(columns[0] // _SECOND, return_index=True)
        for number, part in zip(numbers.tolist(), np.split(columns, begins[1:], axis=1), strict=True):
            self._seconds.put(number, Bucket.of(part))
        self._divided = self._seconds.stretches(_STRETCH)

    def page(self, after: tuple[int, int], most: int) -> list[Waiting]:
        """Return at most `most` messages that follow `after` in the order of the pairs (due_ms, position)."""
        found: list[Waiting] = []
        for _, bucket in heapq.merge(*(each.behind(after[0]) for each in self.tables), key=itemgetter(0)):
            found += bucket.behind(after, most - len(found))
            if len(found) == most:
                break
        return found
