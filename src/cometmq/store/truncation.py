"""`truncate_log`: the log of a store that no broker is using ends earlier, and queues and index with it.

For a slave that holds messages which its master does not have: it gets the master's in their place.
"""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from cometmq.errors import StoreError
from cometmq.protocol.record.many import Run
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk, OsDisk
from cometmq.store.base.guards import StoreLock
from cometmq.store.log.scan import SegmentScan
from cometmq.store.message_store import MessageStore
from cometmq.store.recovery.store_layout import StoreLayout, read_layout
from cometmq.store.writing.log_cut import CutNote


class QueueCut(msgspec.Struct):
    """What a queue loses: its messages from `first_offset` on."""

    topic: str
    queue_id: int
    first_offset: int
    messages: int


class TruncateReport(msgspec.Struct):
    """What goes, or has gone: `records` and `bytes` of the log behind `position`, `segments` as paths.
    `end`: that of the log before. `done`: it was not a dry run."""

    root: str
    position: int
    end: int
    records: int
    bytes: int
    segments: list[str]
    queues: list[QueueCut]
    done: bool


def truncate_log(
    root: str,
    position: int,
    *,
    dry_run: bool = False,
    disk: Disk | None = None,
    config: StoreConfig | None = None,
    commit_log_dir: str = "",
) -> TruncateReport:
    """Cut the log of the store in `root` at `position`, where a record must end.

    Raises StoreError when there is no store, somebody holds it, or the position is no end of a record; then
    nothing has changed. Raises OSError; what was begun is then ended by the next start."""
    disk = disk or OsDisk()
    look = partial(read_layout, disk, root, config=config, commit_log_dir=commit_log_dir)
    found = look()
    root = found.root
    try:
        lock = StoreLock(disk, found.config)
    except StoreError as held:
        raise StoreError("a broker is using this store; stop it first", held.path or root) from None
    try:
        layout = look()
        if layout.config.enable_d_leger_commit_log:
            raise StoreError("the log of a raft member is cut by its group alone", root)
        report, stored_ms = _plan(disk, layout, position)
        if dry_run:
            return report
        CutNote(disk, root).write(position, stored_ms)
    finally:
        lock.release()
    MessageStore.open(layout.config, disk).close()
    report.done = True
    return report


def _plan(disk: Disk, layout: StoreLayout, position: int) -> tuple[TruncateReport, int]:
    """What goes, and until when what stays was stored (ms)."""
    size = layout.config.mapped_file_size_commit_log
    report = TruncateReport(layout.root, position, layout.log_min, 0, 0, [], [], False)
    queues: dict[tuple[str, int], QueueCut] = {}
    before, behind, stored_ms = layout.log_min, -1, 0
    at_boundary = position == layout.log_min
    for file in layout.segments:
        # Of the segments in front one is enough: its records tell until when the log was stored.
        if file.base + 2 * size <= position:
            continue
        scan = SegmentScan(disk, file.path, file.base, size)
        for run in scan.runs(file.base):
            ends = run.position + run.size
            at_boundary |= bool(np.any(ends == position) | np.any(run.position == position))
            stays = ends <= position
            if stays.any():
                stored_ms = max(stored_ms, int(run.store_ms[stays].max()))
                before = int(ends[stays].max())
            if behind < 0 and not stays.all():
                behind = int(ends[~stays].min())
            _count(run, ~stays, queues, report)
        at_boundary |= scan.closed and scan.end == position
        if behind < 0 and scan.closed and scan.end > position:
            behind = scan.end
        report.end = max(report.end, scan.end)
        if file.base >= position and file.base > layout.log_min:
            report.segments.append(file.path)
    if not layout.log_min <= position <= report.end:
        raise StoreError(
            f"the log goes from {layout.log_min} to {report.end}, {position} lies outside", layout.root
        )
    if not at_boundary:
        nearest = f"{before} or {behind}" if behind >= 0 else f"{before}"
        raise StoreError(f"no record ends at {position}; the nearest ends are {nearest}", layout.root)
    report.bytes = report.end - position
    report.queues = sorted(queues.values(), key=lambda each: (each.topic, each.queue_id))
    return report, stored_ms


def _count(
    run: Run, goes: NDArray[np.bool_], queues: dict[tuple[str, int], QueueCut], report: TruncateReport
) -> None:
    """Add the records of a run that go to the report."""
    rows = np.flatnonzero(goes)
    report.records += len(rows)
    for facts in run.facts(rows):
        if facts.queued:
            key = facts.topic, facts.queue_id
            queue = queues.setdefault(key, QueueCut(*key, facts.queue_offset, 0))
            queue.first_offset = min(queue.first_offset, facts.queue_offset)
            queue.messages += 1
