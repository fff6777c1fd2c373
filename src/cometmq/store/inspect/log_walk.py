"""A read-only scan of a commit log that a broker may be using: its records, oldest first, and its damage.

Of a raft member's log, the scan only returns entries that are known to be committed. There are three sources
for the end of the committed entries: the member's checkpoint, which holds the index of the last committed
entry; the checkpoint of the store; and the last unit of each consume queue, because a queue never has units
of uncommitted entries.

A broker may be writing the log. Its end may then contain incomplete records. So apparent damage is read a
second time before it is reported, and the end is never reported as torn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cometmq.errors import RecordError
from cometmq.protocol.record.many import RecordGroup
from cometmq.protocol.record.one import decode_record
from cometmq.store.base.checkpoint import FILE_SIZE, checkpoint_position_of
from cometmq.store.base.config import CHECKPOINT
from cometmq.store.base.disk import Disk, opened
from cometmq.store.base.files import ReadOnlyFiles, first_byte
from cometmq.store.derived.consume_queue import FILLER_SIZE, UNIT_DTYPE
from cometmq.store.inspect.findings import ERROR, NEXT_START, NOTE, NOTHING, WARNING, Findings
from cometmq.store.inspect.unit_files import UnitFiles
from cometmq.store.log.log_reader import LogReader
from cometmq.store.log.scan import Damage, SegmentScan
from cometmq.store.raft_log.entry_index import location_on_disk
from cometmq.store.raft_log.member_files import read_checkpoint
from cometmq.store.recovery.store_layout import QueueFiles, StoreFile, StoreLayout, log_files, read_layout

RECHECK_DELAY_S = 0.05  # Time, in seconds, after which data that a broker may be writing is read again
_UNITS = 4096  # Number of units read at a queue's end; if all are filler units, the queue counts as empty
_MAX_EXAMINED_BYTES = 64 << 20  # Maximum number of bytes read of an invalid record to find its defect


def no_pause(_seconds: float) -> None:
    """The `pause` for stores that no broker is writing."""


@dataclass(eq=False)
class LogWalk:
    """One scan of a log.

    Attributes:
        segments: The number of segments, after the scan.
        log_min: The first position that still existed during the scan.
        end: The position after the last record.
        last_store_ms: The latest store time of all records. (It need not be that of the last record, because
            a clock may step back.)
        damage: The parts of the log that the scan skipped, because they hold no valid record.
    """

    disk: Disk
    layout: StoreLayout
    findings: Findings
    pause: Callable[[float], None] = no_pause

    def __post_init__(self) -> None:
        self._size = self.layout.config.mapped_file_size_commit_log
        self._rechecked = -1
        # The segment that no blank record has closed: its file, the end of its last record, and whether
        # anything but zeros follows that record.
        self._open: tuple[StoreFile, int, bool] | None = None
        self.segments = 0
        self.log_min = self.layout.log_min
        self.end = self.layout.log_min
        self.last_store_ms = 0
        self.damage: list[Damage] = []
        self._gap = self.layout.config.framing.gap
        with ReadOnlyFiles(self.disk) as files:
            self._committed = committed_end(self.layout, files)

    def groups(self, start: int = 0) -> Generator[RecordGroup, None, None]:
        """Yield all valid records in groups, from the segment that contains `start` on. Raises OSError."""
        for group in self._whole(start):
            if group.end <= self._committed:
                yield group
            elif count := int(np.count_nonzero(group.position < self._committed)):
                yield group.first_ones(count)

    def _whole(self, start: int) -> Generator[RecordGroup, None, None]:
        if self.layout.live and all(file.length != self._size for file in self.layout.segments):
            return  # The broker has not finished its first segment, so the length of segments is unknown
        files = [
            file for file in log_files(self.disk, self.layout.config, []) if file.base + self._size > start
        ]
        self.segments = len(files)
        if files:
            self.log_min = self.end = files[0].base
        previous = None
        for file in files:
            if previous is not None and file.base != previous.base + self._size:
                self._missing(previous.base + self._size, file.base)
            previous = file
            if file.length != self._size:
                self._wrong_length(file)
            try:
                yield from self._segment(file)
            except FileNotFoundError:
                # The retention of a running broker has deleted the segment, so the log begins after it.
                self.log_min = max(self.log_min, file.base + self._size)
        if self._open is not None and self._open[2]:
            self._torn(self._open[0], self._open[1])

    def _segment(self, file: StoreFile) -> Iterator[RecordGroup]:
        position, known = file.base, 0
        while True:
            scan = SegmentScan(
                self.disk, file.path, file.base, min(file.length, self._size),
                framing=self.layout.config.framing,
            )  # fmt: skip
            again = False
            known = 0
            with closing(scan.groups(position)) as groups:
                for group in groups:
                    if len(scan.damage) > known:
                        damage = scan.damage[known]
                        again = self._should_recheck(damage.start)
                        if again:
                            position = damage.start
                            break
                        self._damaged(file, damage)
                        known += 1
                    if self._open is not None:
                        self._enter(file)
                    self.end = group.end
                    self.last_store_ms = max(self.last_store_ms, int(group.store_ms.max()))
                    yield group
            if not again and scan.dirty and self._should_recheck(scan.end):
                position, again = scan.end, True
            if not again:
                break
        # If a blank record closes the segment, all damage found by the scan lies before this record.
        for damage in scan.damage[known:]:
            self._damaged(file, damage)
        if scan.blank_end >= 0:
            self._check_after_blank(file, scan.blank_end)
        if scan.end > file.base or self._open is None:
            self._open = None if scan.closed else (file, scan.end, scan.dirty)
            self.end = scan.end
        elif scan.dirty:
            self._torn(file, file.base)

    def _enter(self, file: StoreFile) -> None:
        """At the first record of a segment, report damage unless the previous segment is closed or full."""
        if self._open is None or self._open[0] == file:
            return
        before, end, _ = self._open
        self._open = None
        stop = before.base + min(before.length, self._size)
        if end < stop:
            self._damaged(before, Damage(before.path, end, stop))

    def _should_recheck(self, position: int) -> bool:
        if position == self._rechecked or not self.layout.live:
            return False
        self._rechecked = position
        self.pause(RECHECK_DELAY_S)
        return True

    def _check_after_blank(self, file: StoreFile, position: int) -> None:
        with ReadOnlyFiles(self.disk) as files:
            at = first_byte(files, file.path, position - file.base, min(file.length, self._size))
        if at is not None:
            problem = "nonzero bytes after the blank record, which nothing reads"
            self.findings.add(NOTE, "unused-bytes", file.path, at, problem)

    # -- findings ---------------------------------------------------------------------------------

    def _damaged(self, file: StoreFile, damage: Damage) -> None:
        self.damage.append(damage)
        _, start, stop = damage
        why = f"valid ones follow; {why_no_record(self.disk, file, start + self._gap)}"
        problem = f"no valid record in log positions {start} to {stop} ({stop - start} bytes), {why}"
        self.findings.add(ERROR, "log-damage", file.path, start - file.base, problem, NOTHING)

    def _missing(self, start: int, stop: int) -> None:
        path = ", ".join(self.layout.config.commit_log_dirs)
        self.damage.append(Damage(path, start, stop))
        problem = f"no file holds log positions {start} to {stop}"
        self.findings.add(ERROR, "segment-missing", path, -1, problem, NOTHING)

    def _wrong_length(self, file: StoreFile) -> None:
        now = self.disk.facts(file.path)
        if self.layout.live and (now is None or now.size == self._size):
            return  # A broker is creating or deleting the segment, so its length is no error
        problem = f"{file.length} bytes instead of {self._size}"
        repair = f"{NEXT_START} restores its length; records that were cut off are lost"
        self.findings.add(ERROR, "segment-length", file.path, file.length, problem, repair)

    def _torn(self, file: StoreFile, end: int) -> None:
        if self.layout.live:
            return
        why = f"no valid record after them; {why_no_record(self.disk, file, end + self._gap)}"
        problem = f"invalid bytes after log position {end}, and {why}"
        severity = ERROR if self.layout.clean else WARNING
        repair = f"{NEXT_START} cuts them off and zeroes the space"
        self.findings.add(severity, "torn-tail", file.path, end - file.base, problem, repair)


def why_no_record(disk: Disk, file: StoreFile, position: int) -> str:
    """Return why no valid record begins at log position `position`, which is in the segment `file`."""
    at = position - file.base
    with opened(disk, file.path, write=False) as fd:
        try:
            size = int.from_bytes(disk.pread(fd, 4, at), "big", signed=True)
            data = disk.pread(fd, min(max(8, size), _MAX_EXAMINED_BYTES, max(0, file.length - at)), at)
        except OSError as failure:
            return f"it cannot be read: {failure}"
    if not data[:8].strip(b"\0"):
        return "it begins with zeros"
    try:
        found = decode_record(data, check_crc=True)
    except RecordError as problem:
        return f"{problem.field}: {problem.problem}"
    if found.physical_offset != position:
        return f"physical offset: it contains {found.physical_offset}"
    if "\ufffd" in found.topic:
        return "topic: not UTF-8"
    return "a sector of its topic or properties reads as zeros"


class MemberLog(NamedTuple):
    """The log of a raft member: the directories of its segments, and the end of the committed entries."""

    directories: tuple[str, ...]
    committed: int


def member_log(root: str) -> MemberLog | None:
    """Return the log of the raft member in `root`; None for another store. Raises StoreError, OSError."""
    layout = read_layout(Disk(), root)
    if not layout.config.enable_d_leger_commit_log:
        return None
    with ReadOnlyFiles(Disk()) as files:
        return MemberLog(layout.config.commit_log_dirs, committed_end(layout, files))


def committed_end(layout: StoreLayout, files: ReadOnlyFiles) -> int:
    """Return the end of the entries known to be committed (none without raft). Raises StoreError, OSError."""
    if not layout.config.enable_d_leger_commit_log:
        return sys.maxsize
    directory = layout.config.raft_log_dir
    place = location_on_disk(
        files, os.path.join(directory, "index"), read_checkpoint(files.disk, directory).committed
    )
    saved = checkpoint_position_of(files.read(layout.config.location(CHECKPOINT), FILE_SIZE, 0))
    ends = [_queue_end(layout, files, queue) for queue in layout.queues]
    known = place.end if place is not None else 0, saved.position if saved is not None else 0
    return max(layout.log_min, *known, *ends)


def _queue_end(layout: StoreLayout, files: ReadOnlyFiles, queue: QueueFiles) -> int:
    """Return the end of the record to which a queue's last unit (no filler) points; 0 if there is none."""
    units = UnitFiles(files, queue, layout.config.consume_queue_file_size)
    last = np.frombuffer(units.read(max(units.first, units.end - _UNITS), units.end), UNIT_DTYPE)
    last = last[last["size"] != FILLER_SIZE][-1:]
    if not len(last):
        return 0
    position, size = int(last["position"][0]), int(last["size"][0])
    facts = LogReader(files, layout.config).facts(position)
    return position + size if facts is not None and facts.size == size else 0
