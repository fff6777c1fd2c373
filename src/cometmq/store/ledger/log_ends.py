"""What of a raft log is there when its member starts: torn tails are told from corruption, and cut.

Entries are walked from the last committed one on, bodies' CRC included. A log that does not go on as it should
is torn there if nobody has said that the entry behind has been on the device; then it is cut. Else entries
that a quorum may count on are lost: the member does not start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from cometmq import logs
from cometmq.errors import StoreCorrupt, StoreError
from cometmq.protocol.record.framing import ENTRIES, ENTRY_SIZE, EntryHead
from cometmq.protocol.record.many import Run
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk, opened, zero_out
from cometmq.store.ledger.entry_index import EntryIndex
from cometmq.store.ledger.member_files import LedgerMark
from cometmq.store.log.log_reader import LogReader
from cometmq.store.log.places import LogPlaces
from cometmq.store.log.scan import SegmentScan

log = logs.logger(__name__)

_BACK = 3  # segments, as DLedger goes back to find one that its index bears out


@dataclass(eq=False, kw_only=True)
class LogEnds:
    """A walk over the end of a raft log.

    shown: log position up to which the store has shown records to readers (0: unknown): they were committed.
    After `find`: `first` and `last` are indexes (-1 for none), `term` is that of the last entry, `end` the log
    position behind it; `committed` is the last entry known to be so, `visible` the position behind it.
    """

    disk: Disk
    config: StoreConfig
    places: LogPlaces
    segments: list[int]
    reader: LogReader
    index: EntryIndex
    mark: LedgerMark
    shown: int

    def __post_init__(self) -> None:
        self._size = self.config.mapped_file_size_commit_log
        self.first = self.last = self.term = self.committed = -1
        self.end = self.visible = self.segments[0] if self.segments else 0
        self._torn = False
        self._holes = False  # valid entries lie behind the place where the log does not go on

    def find(self) -> None:
        """Raises StoreCorrupt when entries are lost that must be there, StoreError, OSError."""
        if self.segments:
            self._find_first()
        start = self._start()
        if self.first >= 0:
            self._walk(start)
        self._judge()
        if self._torn:
            self._cut()
        self.index.cut(self.last + 1)
        if self.committed < 0 <= self.mark.committed:
            self.committed = min(self.mark.committed, self.last)
        self._find_visible()

    # -- where to begin ---------------------------------------------------------------------------

    def _head(self, position: int) -> EntryHead | None:
        data = self.reader.bytes_at(position, ENTRY_SIZE)
        head = EntryHead.read(data) if data is not None and len(data) == ENTRY_SIZE else None
        return head if head is not None and head.holds(position) else None

    def _find_first(self) -> None:
        head = self._head(self.segments[0])
        if head is not None:
            self.first = head.index
        elif self.mark.committed >= 0:
            path = self.places.path_of(self.segments[0])
            raise StoreCorrupt(f"the first entry of the log is no more, {self._known()}", path)

    def _start(self) -> tuple[int, int]:
        """Position and index of an entry in front of which nothing needs to be looked at."""
        if self.first < 0:
            return self.end, 0
        place = self.index.place(self.mark.committed)
        if place is not None:
            head = self._head(place.position)
            if head is not None and (head.index, head.term) == (self.mark.committed, place.term):
                return place.position, head.index
        for base in reversed(self.segments[: max(1, len(self.segments) - _BACK + 1)]):
            head = self._head(base)
            if head is not None:
                place = self.index.place(head.index)
                if place is not None and (place.position, place.term) == (base, head.term):
                    return base, head.index
        return self.segments[0], self.first

    # -- the walk ---------------------------------------------------------------------------------

    def _walk(self, start: tuple[int, int]) -> None:
        self.end, following = start
        self.last = following - 1
        following = self.segments[0]
        for base in self.segments:
            if base + self._size <= self.end:
                continue
            if base > self.end:
                break  # a segment is gone
            path = self.places.path_of(base)
            scan = SegmentScan(self.disk, path, base, self._size, framing=ENTRIES)
            for run in scan.runs(max(self.end, base)):
                if scan.damage or not self._take(run):
                    self._torn = self._holes = True
                    return
            if not scan.closed:
                self._torn = scan.dirt
                following = base + self._size
                break
            self.end = base + self._size
            following = self.end
        for base in self.segments:
            if base >= following and self._head(base) is not None:
                self._torn = self._holes = True

    def _take(self, run: Run) -> bool:
        """Add entries to the log; False if they do not go on from its end."""
        heads = run.heads
        assert heads is not None
        index, term = heads["index"].tolist(), heads["term"].tolist()
        if index[0] != self.last + 1 or term[0] < self.term or heads["position"][0] != self.end:
            return False
        ends = run.position + run.size
        self.index.write(index[0], heads["position"].tolist(), heads["size"].tolist(), term)
        self.last, self.term, self.end = index[-1], term[-1], int(ends[-1])
        shown = int(np.searchsorted(ends, self.shown, "right"))
        if shown:
            self.committed = index[shown - 1]
        return True

    # -- what is missing --------------------------------------------------------------------------

    def _known(self) -> str:
        return f"although entry {max(self.mark.committed, self.mark.synced)} has been there"

    def _judge(self) -> None:
        """Raises StoreCorrupt when the log ends before an entry that must be there."""
        following = self.last + 1
        ours = self.mark.synced >= 0
        known = max(self.mark.committed, self.mark.synced) if ours or self._holes else -1
        place = self.index.place(following) if ours else None
        if following <= known or (place is not None and place.position == self.end):
            path = self.places.path_of(self.end - self.end % self._size)
            problem = f"the log does not go on with entry {following} at position {self.end}"
            cure = "the member can join its group again with an empty directory"
            raise StoreCorrupt(f"{problem}, {self._known()}; {cure}", path)
        if self.mark.committed > self.last:
            log.warning("the log ends with entry %d, %s", self.last, self._known())

    def _cut(self) -> None:
        """What lies behind the end becomes zeros, from the last segment to the first."""
        log.warning("%s: torn tail cut from position %d on", ", ".join(self.places.all), self.end)
        cut_log(self.disk, self.places, self.segments, self._size, self.end)

    def _find_visible(self) -> None:
        """The position behind the last committed entry."""
        if self.committed < 0:
            return
        place = self.index.place(self.committed)
        if place is None:
            raise StoreError(f"the index does not know entry {self.committed}", os.path.dirname(self._path()))
        self.visible = place.end

    def _path(self) -> str:
        return self.places.path_of(self.segments[0] if self.segments else 0)


def cut_log(disk: Disk, places: LogPlaces, segments: list[int], segment_size: int, end: int) -> None:
    """Make zeros of everything behind `end`, durably; `segments` loses those that begin there or later. Should
    it be interrupted, what is left is a torn tail. Raises OSError."""
    while segments and segments[-1] >= end:
        path = places.path_of(segments[-1])
        disk.unlink(path)
        places.forget(segments.pop())
        disk.fsync_dir(os.path.dirname(path))
    if segments and end < segments[-1] + segment_size:
        with opened(disk, places.path_of(segments[-1])) as fd:
            if zero_out(disk, fd, end - segments[-1], segment_size):
                disk.fdatasync(fd)
