"""Messages that wait, by the time when they are due. No I/O in here.

A message is three numbers: when it is due by the wheel's clock, the log position of its record, and its
TIMER_OUT_MS; 24 bytes, so that a million cost some 30 MB. They lie in buckets of a minute each. The minute
that comes next is divided into buckets of a second; nothing is sorted. Messages of one second come in the
order in which they were added.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SECOND, _MINUTE = 1_000, 60_000
NEVER = sys.maxsize

Ints = NDArray[np.int64]


class Waiting(NamedTuple):
    """One message that waits. due_ms: by the clock of its wheel."""

    due_ms: int
    position: int
    out_ms: int


class Bucket:
    """Messages of one stretch of time, in the order in which they were added."""

    __slots__ = ("_dues", "_head", "_outs", "_positions", "first_out", "first_position", "last_due")

    def __init__(self) -> None:
        self._dues, self._positions, self._outs = array("q"), array("q"), array("q")
        self._head = 0  # those before it are gone
        # The last or least of all that was ever in it.
        self.last_due, self.first_out, self.first_position = 0, NEVER, NEVER

    def __len__(self) -> int:
        return len(self._dues) - self._head

    def add(self, due_ms: int, position: int, out_ms: int) -> None:
        self._dues.append(due_ms)
        self._positions.append(position)
        self._outs.append(out_ms)
        self._include(due_ms, position, out_ms)

    def _include(self, last_due: int, first_position: int, first_out: int) -> None:
        self.last_due = max(self.last_due, last_due)
        self.first_position = min(self.first_position, first_position)
        self.first_out = min(self.first_out, first_out)

    def columns(self) -> Ints:
        """What is left: dues, positions and outs, one row each."""
        columns = [np.frombuffer(each, np.int64) for each in (self._dues, self._positions, self._outs)]
        return np.stack(columns)[:, self._head :]

    @classmethod
    def of(cls, columns: Ints) -> Bucket:
        """A bucket of these columns, of one message at least."""
        bucket = cls()
        for store, column in zip((bucket._dues, bucket._positions, bucket._outs), columns, strict=True):
            store.frombytes(column.tobytes())
        dues, positions, outs = columns
        bucket._include(int(dues.max()), int(positions.min()), int(outs.min()))
        return bucket

    def first(self, most: int) -> list[Waiting]:
        """The next messages, up to so many."""
        head, stop = self._head, self._head + most
        columns = self._dues[head:stop], self._positions[head:stop], self._outs[head:stop]
        return list(map(Waiting, *columns))

    def drop(self, count: int) -> None:
        """The next so many are gone."""
        self._head += count


class Wheel:
    """What waits by one clock. `now` is a time of that clock; it may step, the messages wait accordingly."""

    def __init__(self) -> None:
        self._minutes: dict[int, Bucket] = {}
        self._order: list[int] = []  # a heap of their keys
        self._divided = -1  # the minute that `_seconds` is of
        self._seconds: dict[int, Bucket] = {}
        self._taken = -1  # the second that `take` looked at
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, due_ms: int, position: int, out_ms: int) -> None:
        """One more message waits."""
        self._count += 1
        minute = due_ms // _MINUTE
        if minute == self._divided:
            bucket = self._seconds.get(due_ms // _SECOND)
            if bucket is None:
                bucket = self._seconds[due_ms // _SECOND] = Bucket()
        else:
            bucket = self._minutes.get(minute)
            if bucket is None:
                bucket = self._put(minute, Bucket())
        bucket.add(due_ms, position, out_ms)

    def _put(self, minute: int, bucket: Bucket) -> Bucket:
        self._minutes[minute] = bucket
        heapq.heappush(self._order, minute)
        return bucket

    def take(self, now_ms: int, most: int) -> list[Waiting]:
        """Messages that are due, up to so many; they wait until `drop`."""
        if self._minute_is_next() and self._order[0] * _MINUTE <= now_ms:
            self._divide()
        if not self._seconds:
            return []
        second = min(self._seconds)
        bucket = self._seconds[second]
        if bucket.last_due > now_ms:
            return []
        self._taken = second
        return bucket.first(most)

    def drop(self, count: int) -> None:
        """So many of those that `take` gave last are gone."""
        bucket = self._seconds[self._taken]
        bucket.drop(count)
        self._count -= count
        if not len(bucket):
            del self._seconds[self._taken]

    def next_ms(self) -> int:
        """When to `take` again at the latest; NEVER if nothing waits."""
        if self._minute_is_next():
            return self._order[0] * _MINUTE
        return self._seconds[min(self._seconds)].last_due if self._seconds else NEVER

    def _minute_is_next(self) -> bool:
        """Whether a whole minute comes before what is divided: that is used up, or something earlier was
        added."""
        return bool(self._order) and (not self._seconds or self._order[0] < self._divided)

    def _divide(self) -> None:
        minute = heapq.heappop(self._order)
        columns = self._minutes.pop(minute).columns()
        if self._seconds:
            whole = np.concatenate([bucket.columns() for bucket in self._seconds.values()], axis=1)
            self._put(self._divided, Bucket.of(whole))
            self._seconds.clear()
        self._divided = minute
        seconds = columns[0] // _SECOND
        for second in np.unique(seconds).tolist():
            self._seconds[second] = Bucket.of(columns[:, seconds == second])

    def _buckets(self) -> Iterator[Bucket]:
        yield from self._seconds.values()
        yield from self._minutes.values()

    def first_out(self) -> int:
        """The least TIMER_OUT_MS of all that waits, or one of its second or minute that is gone already."""
        return min((bucket.first_out for bucket in self._buckets()), default=NEVER)

    def first_position(self) -> int:
        """The least log position, in the same way."""
        return min((bucket.first_position for bucket in self._buckets()), default=NEVER)

    def before(self, position: int) -> Ints:
        """Columns of all whose records lie before a log position."""
        found = [np.empty((3, 0), np.int64)]
        for bucket in self._buckets():
            if bucket.first_position < position:
                columns = bucket.columns()
                found.append(columns[:, columns[1] < position])
        return np.concatenate(found, axis=1)

    def drop_before(self, position: int) -> None:
        """Forget all whose records lie before a log position."""
        for buckets in (self._seconds, self._minutes):
            for key, bucket in list(buckets.items()):
                if bucket.first_position < position:
                    columns = bucket.columns()
                    kept = columns[:, columns[1] >= position]
                    self._count -= len(columns[0]) - len(kept[0])
                    if len(kept[0]):
                        buckets[key] = Bucket.of(kept)
                    else:
                        del buckets[key]
        self._order = list(self._minutes)
        heapq.heapify(self._order)

    def page(self, after: tuple[int, int], most: int) -> list[Waiting]:
        """The next `most` messages behind (due, position) in the order of these two."""
        tables = {_SECOND: self._seconds, _MINUTE: self._minutes}
        heap = [
            (key * length, key, length)
            for length, table in tables.items()
            for key in table
            if key >= after[0] // length
        ]
        heapq.heapify(heap)
        found: list[Waiting] = []
        while heap and len(found) < most:
            _, key, length = heapq.heappop(heap)
            found += _first_of(tables[length][key].columns(), after, most - len(found))
        return found


def _first_of(columns: Ints, after: tuple[int, int], most: int) -> list[Waiting]:
    """Those of a bucket's messages behind (due, position) that come first by these two."""
    dues, positions, _ = columns
    columns = columns[:, (dues > after[0]) | ((dues == after[0]) & (positions > after[1]))]
    for row in (0, 1):  # only those up to the last due that counts, then only the first positions of that
        if len(columns[0]) <= most:
            break
        last = np.partition(columns[0], most - 1)[most - 1]
        sooner = columns[0] < last
        if row == 0:
            columns = columns[:, columns[0] <= last]
        else:
            room = most - int(sooner.sum())
            bound = np.partition(columns[1][~sooner], room - 1)[room - 1]
            columns = columns[:, sooner | (columns[1] <= bound)]
    order = np.lexsort((columns[1], columns[0]))[:most]
    return list(map(Waiting, *columns[:, order].tolist()))
