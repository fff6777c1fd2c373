"""Truncation of the log of a store that is not in use, together with its queues and index.

It is meant for a slave whose log contains messages that its master does not have. After the truncation, the
slave receives the messages of its master instead.
"""

from __future__ import annotations

from typing import Unpack

import msgspec
import numpy as np
from numpy.typing import NDArray

from cometmq.errors import StoreError
from cometmq.protocol.record.many import RecordGroup
from cometmq.store.base.disk import Disk
from cometmq.store.log.scan import SegmentScan
from cometmq.store.message_store import MessageStore
from cometmq.store.recovery.store_layout import Look, StoreLayout, locked_layout
from cometmq.store.writing.log_cut import LogCutFile


class QueueCut(msgspec.Struct):
    """The messages that a truncation removes from a queue: those from `first_offset` on."""

    topic: str
    queue_id: int
    first_offset: int
    messages: int


class TruncateReport(msgspec.Struct):
    """The result of a truncation of the log from `end` to `position`, or, if not `done`, of a dry run.

    The other fields tell what is removed; `segments` are paths.
    """

    root: str
    position: int
    end: int
    records: int
    bytes: int
    segments: list[str]
    queues: list[QueueCut]
    done: bool


def truncate_log(
    root: str, position: int, *, dry_run: bool = False, disk: Disk | None = None, **look: Unpack[Look]
) -> TruncateReport:
    """Truncate the log of the store in `root` at `position`, where a record must end. A dry run only reports.

    Raises:
        StoreError: There is no store, it is in use, or no record ends at `position`. Nothing has changed.
        OSError: A read or write failed. If the truncation had begun, the next start completes it.
    """
    disk = disk or Disk()
    with locked_layout(disk, root, **look) as layout:
        if layout.config.enable_d_leger_commit_log:
            raise StoreError("the log of a raft member can only be truncated by its group", layout.root)
        report, stored_ms = _plan(disk, layout, position)
        if dry_run:
            return report
        LogCutFile(disk, layout.root).write(position, stored_ms)
    MessageStore.open(layout.config, disk).close()
    report.done = True
    return report


def _plan(disk: Disk, layout: StoreLayout, position: int) -> tuple[TruncateReport, int]:
    """Return what a truncation would remove, and the latest store time (ms) of the records that remain."""
    size = layout.config.mapped_file_size_commit_log
    report = TruncateReport(layout.root, position, layout.log_min, 0, 0, [], [], False)
    queues: dict[tuple[str, int], QueueCut] = {}
    before, behind, stored_ms = layout.log_min, -1, 0
    at_boundary = position == layout.log_min
    for file in layout.segments:
        # The scan finds the records next to `position`, and the latest store time of the records that remain.
        # Store times ascend unless the clock is set back, so a record near the end has that time. Therefore
        # the scan begins with the last segment that remains whole, and skips older segments.
        if file.base + 2 * size <= position:
            continue
        scan = SegmentScan(disk, file.path, file.base, size)
        for group in scan.groups(file.base):
            ends = group.position + group.size
            at_boundary |= bool(np.any(ends == position) | np.any(group.position == position))
            stays = ends <= position
            if stays.any():
                stored_ms = max(stored_ms, int(group.store_ms[stays].max()))
                before = int(ends[stays].max())
            if behind < 0 and not stays.all():
                behind = int(ends[~stays].min())
            _count(group, ~stays, queues, report)
        at_boundary |= scan.closed and scan.end == position
        if behind < 0 and scan.closed and scan.end > position:
            behind = scan.end
        report.end = max(report.end, scan.end)
        if file.base >= position and file.base > layout.log_min:
            report.segments.append(file.path)
    if not layout.log_min <= position <= report.end:
        extent = f"which ranges from {layout.log_min} to {report.end}"
        raise StoreError(f"position {position} is outside the log, {extent}", layout.root)
    if not at_boundary:
        nearest = f"{before} or {behind}" if behind >= 0 else f"{before}"
        raise StoreError(f"no record ends at {position}; the nearest ends are {nearest}", layout.root)
    report.bytes = report.end - position
    report.queues = sorted(queues.values(), key=lambda each: (each.topic, each.queue_id))
    return report, stored_ms


def _count(
    group: RecordGroup,
    goes: NDArray[np.bool_],
    queues: dict[tuple[str, int], QueueCut],
    report: TruncateReport,
) -> None:
    """Add the records of `group` that the truncation removes (`goes`) to `report` and `queues`."""
    rows = np.flatnonzero(goes)
    report.records += len(rows)
    for facts in group.facts(rows):
        if facts.queued:
            key = facts.topic, facts.queue_id
            queue = queues.setdefault(key, QueueCut(*key, facts.queue_offset, 0))
            queue.first_offset = min(queue.first_offset, facts.queue_offset)
            queue.messages += 1
