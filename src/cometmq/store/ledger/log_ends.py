"""What of a raft log is there when its member starts: torn tails are told from corruption, and cut.

Entries are walked from the last committed one on, bodies' CRC included. A log that does not go on as it
should is torn there if nobody has said that the entry behind has been on the device; then it is cut. Else
entries that a quorum may count on are lost: EntriesLost. A log that is known to be suspect is walked from its
beginning, and cut wherever it does not go on: its group has what is missing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from cometmq import logs
from cometmq.errors import StoreError
from cometmq.protocol.record.framing import ENTRIES, ENTRY_SIZE, EntryHead
from cometmq.protocol.record.many import Run
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk, is_numbered, opened
from cometmq.store.base.files import StoreFiles
from cometmq.store.base.read_only_files import ReadOnlyFiles
from cometmq.store.ledger.entry_index import EntryIndex
from cometmq.store.ledger.member_files import RaftLogCheckpoint, is_suspect, read_mark, write_mark
from cometmq.store.log.log_reader import LogReader
from cometmq.store.log.places import LogPlaces
from cometmq.store.log.scan import SegmentScan
from cometmq.store.recovery.recovery import EntriesLost, list_segments
from cometmq.store.writing.log_cut import cut_segments

log = logs.logger(__name__)


@dataclass(eq=False, kw_only=True)
class LogEnds:
    """A walk over the end of a raft log.

    shown: log position up to which the store has shown records to readers (0: unknown): they were committed.
    After `find`: `first` and `last` are indexes (`first` - 1 for none), `term` is that of the last entry,
    `end` the log position behind it; `committed` is the last entry known to be so (-1: none), `visible` the
    position behind it, `waiting` what follows there.
    """

    disk: Disk
    config: StoreConfig
    places: LogPlaces
    segments: list[int]
    reader: LogReader
    index: EntryIndex
    mark: RaftLogCheckpoint
    shown: int
    suspect: bool

    def __post_init__(self) -> None:
        self._size = self.config.mapped_file_size_commit_log
        self.first = self.last = self.term = self.committed = -1
        self.end = self.visible = self.segments[0] if self.segments else 0
        self.waiting: list[Run] = []
        self._torn = False
        self._holes = False  # valid entries lie behind the place where the log does not go on

    def find(self) -> None:
        """Raises EntriesLost when entries are lost that must be there, StoreError, OSError."""
        head = self._head(self.segments[0]) if self.segments else None
        self.first = head.index if head is not None else 0
        start, index = (self.end, self.first) if self.suspect else self._start()
        self._sync(start)
        self.end, self.last = start, index - 1
        self._walk()
        if not self.suspect:
            self._judge()
        if self._torn:
            log.warning("%s: torn tail cut from position %d on", ", ".join(self.places.all), self.end)
            cut_segments(self.disk, self.places, self._size, self.end)
        self.index.cut(self.last + 1)
        self.committed = max(self.committed, min(self.mark.committed, self.last))
        if self.suspect:  # when it is whole again the mark must be true
            known = (each if each >= self.first else -1 for each in (self.last, self.committed, self.last))
            write_mark(self.disk, self.config.ledger_dir, RaftLogCheckpoint(*known))
        place = self.index.place(self.committed)
        if place is not None:
            self.visible = place.end
        elif self.committed >= 0:
            raise StoreError(f"the index does not know entry {self.committed}", self.config.ledger_dir)
        self.waiting = [run for run in map(self._behind_visible, self.waiting) if run is not None]

    def _behind_visible(self, run: Run) -> Run | None:
        """What of a run is not committed."""
        count = int(np.count_nonzero(run.position > self.visible))
        return run.last_ones(count) if count else None

    def _sync(self, start: int) -> None:
        """Bring what will be walked over onto the device: the index may name it then."""
        for base in self.segments:
            if base + self._size > start:
                with opened(self.disk, self.places.path_of(base)) as fd:
                    self.disk.fdatasync(fd)

    # -- where to begin ---------------------------------------------------------------------------

    def _head(self, position: int) -> EntryHead | None:
        data = self.reader.bytes_at(position, ENTRY_SIZE)
        head = EntryHead.read(data) if data is not None and len(data) == ENTRY_SIZE else None
        return head if head is not None and head.holds(position) else None

    def _start(self) -> tuple[int, int]:
        """Position and index of an entry known to be committed that was on the device; of the first one if
        none is."""
        index = self.mark.committed
        if self.mark.synced >= 0:
            index = min(index, self.mark.synced)
        place = self.index.place(index) if self.index.has_files(self.first, index) else None
        if place is not None:
            head = self._head(place.position)
            if head is not None and (head.index, head.term) == (index, place.term):
                return place.position, index
        return self.end, self.first

    # -- the walk ---------------------------------------------------------------------------------

    def _walk(self) -> None:
        """Find the end of what goes on."""
        behind = self.segments[:]
        for base in self.segments:
            behind.remove(base)
            if base + self._size <= self.end:
                continue
            if base > self.end:  # a segment is gone
                self._holes = self._head(base) is not None
                break
            path = self.places.path_of(base)
            scan = SegmentScan(self.disk, path, base, self._size, framing=ENTRIES)
            for run in scan.runs(self.end):
                if scan.damage or not self._take(run):
                    self._holes = True
                    break
            if scan.unreadable:
                raise StoreError("the device cannot read the end of the log", path)
            if self._holes or not scan.closed:
                self._torn = scan.dirt
                break
            self.end = base + self._size
        self._holes = self._holes or any(self._head(base) is not None for base in behind)
        self._torn = self._torn or self._holes

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
        if index[-1] > self.mark.committed:
            self.waiting.append(run)
        return True

    # -- what is missing --------------------------------------------------------------------------

    def _judge(self) -> None:
        """Raises EntriesLost when the log ends before an entry that must be there."""
        following, mark = self.last + 1, self.mark
        ours = mark.synced >= 0
        # What is committed need not be on the device: with ASYNC_FLUSH, or in Apache's broker, the newest
        # entries go with the power.
        known = mark.synced if ours else mark.committed if self._holes else -1
        place = self.index.place(following) if ours else None
        if place is not None and place.position == self.end:
            known = max(known, following)
        if following <= known:
            path = self.places.path_of(self.end - self.end % self._size)
            raise EntriesLost(
                f"entry {following} at position {self.end} is lost, although {known} has been on the device",
                path,
            )
        if mark.committed > self.last:
            log.warning("the log ends with entry %d, although %d was committed", self.last, mark.committed)


def find_log_ends(files: StoreFiles, config: StoreConfig, places: LogPlaces, shown: int) -> LogEnds:
    """Look at the end of a member's log, and cut a torn tail. Raises as `LogEnds.find` does."""
    disk = files.disk
    for old in config.replace(enable_d_leger_commit_log=False).commit_log_dirs:
        if any(is_numbered(name, 20) for name in disk.listdir(old)):
            raise StoreError(
                "a log from before raft mode lies here, and a raft member does not take it over: start the "
                "broker without enableDLegerCommitLog to serve it, the member with another storePathRootDir",
                old,
            )
    segments, notes = list_segments(disk, places, config.mapped_file_size_commit_log)
    for note in notes:
        log.warning("%s", note)
    with ReadOnlyFiles(disk) as reading:
        ends = LogEnds(
            disk=disk, config=config, places=places, segments=segments, reader=LogReader(reading, config),
            index=EntryIndex(files, os.path.join(config.ledger_dir, "index")),
            mark=read_mark(disk, config.ledger_dir), shown=shown,
            suspect=is_suspect(disk, config.ledger_dir),
        )  # fmt: skip
        ends.find()
    return ends
