"""Links from records of the log to the older records that they replace.

When a timer message is delivered, or is stored again to wait longer, a new record replaces its old record in
the log. The new record has a link to the old one in its field preparedTransactionOffset: the position of the
old record plus 1, because 0 means that there is no link. Clients cannot write that field. So a scan of the
newest part of the log shows which records have been replaced, even if no file lists them.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from cometmq import logs
from cometmq.protocol.record.framing import Framing
from cometmq.protocol.record.layout import BLANK_SIZE, MAGIC_V1, MAGIC_V2, START
from cometmq.protocol.record.many import read_rows
from cometmq.protocol.record.one import record_facts, record_starts
from cometmq.store.base.disk import Disk, opened
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.scan import SegmentScan

log = logs.logger(__name__)

_BLOCK = 4 << 20

Ints = NDArray[np.int64]


def link_to(position: int) -> int:
    """Return the preparedTransactionOffset of a new record that replaces the old record at `position`."""
    return position + 1


async def links(
    commit_log: CommitLog, disk: Disk, executor: StoreExecutor, start: int, end: int | None = None
) -> AsyncIterator[Ints]:
    """Yield the log positions of older records that have been replaced by the records of a range, in lists.

    The range begins at log position `start`, where a record begins, and ends at `end`, by default the log's
    current end. A record in it that replaces an older record contains the position of the older one. Raises
    OSError.
    """
    size = commit_log.segment_size
    end = commit_log.end if end is None else min(end, commit_log.end)
    framing = commit_log.framing
    at = max(start - framing.gap, commit_log.min_position)
    while at < end:
        base = at - at % size
        if base not in commit_log.segments:
            at = base + size
            continue
        length = min(_BLOCK, base + size - at, end - at)
        found, at = await executor.run(_read, disk, commit_log.path_of(base), base, size, at, length, framing)
        if len(found):
            yield found


def _read(
    disk: Disk, path: str, base: int, size: int, at: int, length: int, framing: Framing
) -> tuple[Ints, int]:
    """Return the links in about `length` bytes from log position `at` on, and where the next part begins."""
    nothing, gap = np.empty(0, np.int64), framing.gap
    try:
        with opened(disk, path, write=False) as fd:
            data = _readable(disk, fd, max(length, gap + BLANK_SIZE), at - base)
            if data is None:
                return nothing, _behind(disk, path, base, size, at, framing)
            if len(data) < gap + BLANK_SIZE or framing.is_blank(data, base + size - at):
                return nothing, base + size
            needed, magic = START.unpack_from(data, gap)
            needed += gap
            if magic in (MAGIC_V1, MAGIC_V2) and len(data) < needed <= base + size - at:
                data = _readable(disk, fd, needed, at - base) or b""
                if len(data) < needed:
                    return nothing, at + needed
    except FileNotFoundError:
        return nothing, base + size
    starts, stop = record_starts(data, gap=gap)
    if starts:
        rows, good = read_rows(np.frombuffer(data, np.uint8), np.array(starts, np.int64))
        found = rows.field("prepared_transaction_offset").astype(np.int64)
        view = memoryview(data)
        for row in np.flatnonzero(good & (found > 0)).tolist():
            # A power failure may have torn this record. A torn record replaces no older record, so its link
            # is ignored.
            good[row] = record_facts(view, starts[row], at + starts[row]) is not None
        return found[good & (found > 0)] - 1, at + stop
    return nothing, _behind(disk, path, base, size, at, framing)


def _behind(disk: Disk, path: str, base: int, size: int, at: int, framing: Framing) -> int:
    """Return where the first valid record after the damage at `at` begins, at the latest the next segment."""
    for group in SegmentScan(disk, path, base, size, check_crc=False, framing=framing).groups(at):
        return max(int(group.position[0]) - framing.gap, at + 1)
    return base + size


def _readable(disk: Disk, fd: int, length: int, at: int) -> bytes | None:
    """Return `length` bytes, or fewer if a sector is unreadable; None if it is the first one."""
    while True:
        try:
            return disk.pread(fd, length, at)
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
        if length <= BLANK_SIZE:
            log.error("the disk cannot read the log at byte %d of a segment", at)
            return None
        length = max(length // 2, BLANK_SIZE)
