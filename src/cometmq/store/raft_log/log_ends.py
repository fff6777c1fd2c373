"""Finds the end of a raft log when its member starts. A torn tail is removed; lost entries are an error.

The entries are scanned from the last committed one on, with the CRC of their bodies. If the valid part of the
log ends before an entry that was never recorded as durable, the rest is a torn tail and is removed. Otherwise
the log has lost entries that a majority may rely on, and EntriesLost is raised. A log that is known to be
suspect is scanned from its beginning and truncated at the first invalid entry, because the group has the
other entries.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from cometmq import logs
from cometmq.errors import StoreError
from cometmq.protocol.record.framing import ENTRIES, ENTRY_SIZE, EntryHead
from cometmq.protocol.record.many import RecordGroup
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk, is_numbered, opened
from cometmq.store.base.files import ReadOnlyFiles, StoreFiles
from cometmq.store.log.directories import LogDirectories
from cometmq.store.log.log_reader import LogReader
from cometmq.store.log.scan import SegmentScan
from cometmq.store.raft_log.entry_index import EntryIndex
from cometmq.store.raft_log.member_files import (
    RaftLogCheckpoint,
    is_suspect,
    read_checkpoint,
    write_checkpoint,
)
from cometmq.store.recovery.recovery import EntriesLost, list_segments
from cometmq.store.writing.log_cut import cut_segments

log = logs.logger(__name__)


@dataclass(eq=False, kw_only=True)
class LogEnds:
    """The result of a scan of the end of a raft log.

    Attributes:
        shown: The log position up to which readers have seen records, all of them committed; 0 if unknown.
        suspect: Whether the log is known to lack entries.
        first: The index of the first entry, after `find`.
        last: The index of the last entry; `first` - 1 if there is none.
        term: The term of the last entry.
        end: The log position after the last entry.
        committed: The index of the last entry that is known to be committed; -1 if there is none.
        visible: The log position after that committed entry.
        waiting: The entries after that position.
    """

    disk: Disk
    config: StoreConfig
    directories: LogDirectories
    segments: list[int]
    reader: LogReader
    index: EntryIndex
    checkpoint: RaftLogCheckpoint
    shown: int
    suspect: bool

    def __post_init__(self) -> None:
        self._size = self.config.mapped_file_size_commit_log
        self.first = self.last = self.term = self.committed = -1
        self.end = self.visible = self.segments[0] if self.segments else 0
        self.waiting: list[RecordGroup] = []
        self._torn = False
        self._holes = False  # Whether valid entries follow invalid data

    def find(self) -> None:
        """Scan the log, and remove a torn tail.

        Raises:
            EntriesLost: Entries that must exist are lost.
            StoreError: The log or its index cannot be used.
            OSError: A read or write failed.
        """
        head = self._head(self.segments[0]) if self.segments else None
        self.first = head.index if head is not None else 0
        start, index = (self.end, self.first) if self.suspect else self._start()
        self._sync(start)
        self.end, self.last = start, index - 1
        self._walk()
        if not self.suspect:
            self._check_losses()
        if self._torn:
            log.warning(
                "%s: cut off an incomplete entry at position %d", ", ".join(self.directories.all), self.end
            )
            cut_segments(self.disk, self.directories, self._size, self.end)
        self.index.cut(self.last + 1)
        self.committed = max(self.committed, min(self.checkpoint.committed, self.last))
        if self.suspect:  # Replace the checkpoint, because it may name entries that the log has lost
            known = (each if each >= self.first else -1 for each in (self.last, self.committed, self.last))
            write_checkpoint(self.disk, self.config.raft_log_dir, RaftLogCheckpoint(*known))
        location = self.index.location(self.committed)
        if location is not None:
            self.visible = location.end
        elif self.committed >= 0:
            raise StoreError(f"the index lacks entry {self.committed}", self.config.raft_log_dir)
        self.waiting = [group for group in map(self._uncommitted, self.waiting) if group is not None]

    def _uncommitted(self, group: RecordGroup) -> RecordGroup | None:
        """Return the entries of `group` that are not committed, or None if all of them are committed."""
        count = int(np.count_nonzero(group.position > self.visible))
        return group.last_ones(count) if count else None

    def _sync(self, start: int) -> None:
        """Sync the segments after `start`: the scan indexes their entries, which must be durable then."""
        for base in self.segments:
            if base + self._size > start:
                with opened(self.disk, self.directories.path_of(base)) as fd:
                    self.disk.fdatasync(fd)

    # -- the start of the scan --------------------------------------------------------------------

    def _head(self, position: int) -> EntryHead | None:
        data = self.reader.bytes_at(position, ENTRY_SIZE)
        head = EntryHead.read(data) if data is not None and len(data) == ENTRY_SIZE else None
        return head if head is not None and head.holds(position) else None

    def _start(self) -> tuple[int, int]:
        """Return position and index of the last entry known as committed and synced, else of the first."""
        index = self.checkpoint.committed
        if self.checkpoint.synced >= 0:
            index = min(index, self.checkpoint.synced)
        location = self.index.location(index) if self.index.has_files(self.first, index) else None
        if location is not None:
            head = self._head(location.position)
            if head is not None and (head.index, head.term) == (index, location.term):
                return location.position, index
        return self.end, self.first

    # -- the scan ---------------------------------------------------------------------------------

    def _walk(self) -> None:
        """Scan the log up to the end of its valid entries."""
        behind = self.segments[:]
        for base in self.segments:
            behind.remove(base)
            if base + self._size <= self.end:
                continue
            if base > self.end:  # The segment that should begin at `self.end` is missing
                self._holes = self._head(base) is not None
                break
            path = self.directories.path_of(base)
            scan = SegmentScan(self.disk, path, base, self._size, framing=ENTRIES)
            for group in scan.groups(self.end):
                if scan.damage or not self._take(group):
                    self._holes = True
                    break
            if scan.unreadable:
                raise StoreError("the device cannot read the end of the log", path)
            if self._holes or not scan.closed:
                self._torn = scan.dirty
                break
            self.end = base + self._size
        self._holes = self._holes or any(self._head(base) is not None for base in behind)
        self._torn = self._torn or self._holes

    def _take(self, group: RecordGroup) -> bool:
        """Add entries to those found so far, and to the index. Return False if they do not continue these."""
        heads = group.heads
        assert heads is not None
        index, term = heads["index"].tolist(), heads["term"].tolist()
        if index[0] != self.last + 1 or term[0] < self.term or heads["position"][0] != self.end:
            return False
        ends = group.position + group.size
        self.index.write(index[0], heads["position"].tolist(), heads["size"].tolist(), term)
        self.last, self.term, self.end = index[-1], term[-1], int(ends[-1])
        shown = int(np.searchsorted(ends, self.shown, "right"))
        if shown:
            self.committed = index[shown - 1]
        if index[-1] > self.checkpoint.committed:
            self.waiting.append(group)
        return True

    # -- missing entries --------------------------------------------------------------------------

    def _check_losses(self) -> None:
        """Raise EntriesLost if the log ends before an entry that must exist."""
        following, checkpoint = self.last + 1, self.checkpoint
        ours = checkpoint.synced >= 0
        # With ASYNC_FLUSH, or in Apache's broker, a committed entry need not be durable, so a power failure
        # may remove the newest committed entries. That is no error. But an entry must not be missing if the
        # checkpoint shows that it was synced.
        known = checkpoint.synced if ours else checkpoint.committed if self._holes else -1
        location = self.index.location(following) if ours else None
        if location is not None and location.position == self.end:
            known = max(known, following)
        if following <= known:
            path = self.directories.path_of(self.end - self.end % self._size)
            problem = f"entry {following} at position {self.end} is missing"
            raise EntriesLost(f"{problem}, although entry {known} was durable", path)
        if checkpoint.committed > self.last:
            log.warning(
                "the log ends at entry %d, although entry %d was committed", self.last, checkpoint.committed
            )


def find_log_ends(files: StoreFiles, config: StoreConfig, directories: LogDirectories, shown: int) -> LogEnds:
    """Scan the end of a member's log, and remove a torn tail. Raises the errors of `LogEnds.find`."""
    disk = files.disk
    for old in config.replace(enable_d_leger_commit_log=False).commit_log_dirs:
        if any(is_numbered(name, 20) for name in disk.listdir(old)):
            raise StoreError(
                "a raft member cannot use this log, which was written without raft: start the broker without "
                "enableDLegerCommitLog to serve the log, and the member with another storePathRootDir",
                old,
            )
    segments, notes = list_segments(disk, directories, config.mapped_file_size_commit_log)
    for note in notes:
        log.warning("%s", note)
    with ReadOnlyFiles(disk) as reading:
        ends = LogEnds(
            disk=disk, config=config, directories=directories, segments=segments,
            reader=LogReader(reading, config),
            index=EntryIndex(files, os.path.join(config.raft_log_dir, "index")),
            checkpoint=read_checkpoint(disk, config.raft_log_dir), shown=shown,
            suspect=is_suspect(disk, config.raft_log_dir),
        )  # fmt: skip
        ends.find()
    return ends
