"""Every record of a commit log, oldest first, and what is wrong between them; the log may be growing. Of a
raft member's log those that are known to be committed.

A walk over a log that a broker writes sees a moving tail: bytes that do not make a record yet. So what looks
like damage there is looked at a second time before it is called damage, and the end is never called torn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from cometmq.errors import RecordError
from cometmq.protocol.record.many import Run
from cometmq.protocol.record.one import Facts, decode_record
from cometmq.store.base.disk import Disk, opened
from cometmq.store.base.read_only_files import ReadOnlyFiles, first_byte
from cometmq.store.inspect.committed import committed_end
from cometmq.store.inspect.findings import ERROR, NEXT_START, NOTE, NOTHING, WARNING, Findings
from cometmq.store.log.scan import Damage, SegmentScan
from cometmq.store.recovery.store_layout import StoreFile, StoreLayout, log_files

RECHECK_DELAY_S = 0.05  # between two looks at a place that a broker may be writing
_MAX_EXAMINED_BYTES = 64 << 20  # bytes of a doubtful record that are looked at for the reason


def no_pause(_seconds: float) -> None:
    """Where nobody writes meanwhile, or it does not matter."""


@dataclass(eq=False)
class LogWalk:
    """One walk. Afterwards: `end` is the position behind the last record, `log_min` the first position that
    was still there, `damage` what was skipped, `last_store_ms` the latest store time (a clock may step back).
    """

    disk: Disk
    layout: StoreLayout
    findings: Findings
    pause: Callable[[float], None] = no_pause

    def __post_init__(self) -> None:
        self._size = self.layout.config.mapped_file_size_commit_log
        self._seen_twice = -1
        self._open: tuple[StoreFile, int, bool] | None = None  # last used segment, end in it, dirt behind
        self.segments = 0
        self.log_min = self.layout.log_min
        self.end = self.layout.log_min
        self.last_store_ms = 0
        self.damage: list[Damage] = []
        self._committed = sys.maxsize
        self._gap = self.layout.config.framing.gap
        if self.layout.config.enable_d_leger_commit_log:
            with ReadOnlyFiles(self.disk) as files:
                self._committed = committed_end(self.layout, files)

    def records(self, start: int = 0) -> Iterator[Facts]:
        """Every valid record from the segment that holds `start` on. Raises OSError."""
        for run in self.runs(start):
            yield from run.facts()

    def runs(self, start: int = 0) -> Generator[Run, None, None]:
        """The same, many at a time."""
        for run in self._whole(start):
            if run.end <= self._committed:
                yield run
            elif count := int(np.count_nonzero(run.position < self._committed)):
                yield run.first_ones(count)

    def _whole(self, start: int) -> Generator[Run, None, None]:
        if self.layout.live and all(file.length != self._size for file in self.layout.segments):
            return  # the broker was about to make its first segment: its length is not known yet
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
                # Retention of a running broker: the log begins later now.
                self.log_min = max(self.log_min, file.base + self._size)
        if self._open is not None and self._open[2]:
            self._torn(self._open[0], self._open[1])

    def _segment(self, file: StoreFile) -> Iterator[Run]:
        position, known = file.base, 0
        while True:
            scan = SegmentScan(
                self.disk, file.path, file.base, min(file.length, self._size),
                framing=self.layout.config.framing,
            )  # fmt: skip
            again = False
            known = 0
            with closing(scan.runs(position)) as runs:
                for run in runs:
                    if len(scan.damage) > known:
                        damage = scan.damage[known]
                        again = self._look_again(damage.start)
                        if again:
                            position = damage.start
                            break
                        self._damaged(file, damage)
                        known += 1
                    if self._open is not None:
                        self._enter(file)
                    self.end = run.end
                    self.last_store_ms = max(self.last_store_ms, int(run.store_ms.max()))
                    yield run
            if not again and scan.dirt and self._look_again(scan.end):
                position, again = scan.end, True
            if not again:
                break
        for damage in scan.damage[known:]:  # what lies in front of the blank record
            self._damaged(file, damage)
        if scan.blank_end >= 0:
            self._look_behind_blank(file, scan.blank_end)
        if scan.end > file.base or self._open is None:
            self._open = None if scan.closed else (file, scan.end, scan.dirt)
            self.end = scan.end
        elif scan.dirt:
            self._torn(file, file.base)

    def _enter(self, file: StoreFile) -> None:
        """A record in this segment: the one before must have been closed, or filled."""
        if self._open is None or self._open[0] == file:
            return
        before, end, _ = self._open
        self._open = None
        stop = before.base + min(before.length, self._size)
        if end < stop:
            self._damaged(before, Damage(before.path, end, stop))

    def _look_again(self, position: int) -> bool:
        """Whether to look once more at a place without a valid record: a broker may just be writing it."""
        if position == self._seen_twice or not self.layout.live:
            return False
        self._seen_twice = position
        self.pause(RECHECK_DELAY_S)
        return True

    def _look_behind_blank(self, file: StoreFile, position: int) -> None:
        with ReadOnlyFiles(self.disk) as files:
            at = first_byte(files, file.path, position - file.base, min(file.length, self._size))
        if at is not None:
            problem = "something stands behind the blank record, which may hold anything and is never read"
            self.findings.add(NOTE, "unused-bytes", file.path, at, problem)

    # -- findings ---------------------------------------------------------------------------------

    def _damaged(self, file: StoreFile, damage: Damage) -> None:
        self.damage.append(damage)
        _, start, stop = damage
        problem = (
            f"no valid record in log positions {start} to {stop} ({stop - start} bytes), valid ones follow; "
            f"{why_no_record(self.disk, file, start + self._gap)}"
        )
        self.findings.add(ERROR, "log-damage", file.path, start - file.base, problem, NOTHING)

    def _missing(self, start: int, stop: int) -> None:
        path = ", ".join(self.layout.config.commit_log_dirs)
        self.damage.append(Damage(path, start, stop))
        problem = f"no file holds log positions {start} to {stop}"
        self.findings.add(ERROR, "segment-missing", path, -1, problem, NOTHING)

    def _wrong_length(self, file: StoreFile) -> None:
        now = self.disk.facts(file.path)
        if self.layout.live and (now is None or now.size == self._size):
            return  # it was being made or removed at this moment
        problem = f"{file.length} bytes instead of {self._size}"
        repair = f"{NEXT_START} gives it its length again; records that were cut off are lost"
        self.findings.add(ERROR, "segment-length", file.path, file.length, problem, repair)

    def _torn(self, file: StoreFile, end: int) -> None:
        if self.layout.live:
            return
        problem = (
            f"bytes behind log position {end} that are no record, and no valid record behind them; "
            f"{why_no_record(self.disk, file, end + self._gap)}"
        )
        severity = ERROR if self.layout.clean else WARNING
        repair = f"{NEXT_START} cuts them off and zeroes the space"
        self.findings.add(severity, "torn-tail", file.path, end - file.base, problem, repair)


def why_no_record(disk: Disk, file: StoreFile, position: int) -> str:
    """What is wrong with the record that should begin at `position` of the log, in this segment."""
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
        return f"physical offset: it says {found.physical_offset}"
    if "\ufffd" in found.topic:
        return "topic: it is no UTF-8"
    return "a sector of its topic or properties reads as zeros"
