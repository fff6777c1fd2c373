"""Cutting the log behind a record: what a slave, or a member of a group, holds that its master does not.

Several files change, so first a note of the cut is brought onto the device. From then on the cut happens, if
not now then at the next start; before, nothing has changed. The marks of what is durable come down before
the log does, and all of it can be done again. Queues and index follow in recovery, which takes the stop for
an unclean one.
"""

from __future__ import annotations

import os

from cometmq import logs
from cometmq.store.base.checkpoint import Checkpoint
from cometmq.store.base.disk import Disk, is_numbered, opened, unlink_any, zero_out
from cometmq.store.base.guards import AbortFile
from cometmq.store.log.places import LogPlaces
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.tables.table_checks import CUT, TIMERS, LogCutTable

log = logs.logger(__name__)


class CutNote:
    """`config/logCut.json`, there while a cut is under way. A damaged one counts as none, and is left for
    `verify` to name: where the log was to end, nobody knows."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._table = JsonTable(os.path.join(root, "config", CUT), disk)

    def read(self) -> LogCutTable | None:
        """Where the log is to end. Raises OSError."""
        found = LogCutTable.from_plain(self._table.load_or_empty(backup=False))
        return found if found.log_end >= 0 else None

    def write(self, log_end: int, stored_ms: int) -> None:
        """Have the log end at `log_end`. stored_ms: no record in front of it was stored later (0: unknown).
        On the device when this returns. Raises OSError."""
        self._table.save({"logEnd": log_end, "storedMs": stored_ms})

    def remove(self) -> None:
        """The cut is done. Raises OSError."""
        self._forget(self._table.path)

    def forget_timers(self) -> None:
        """Drop the mark of the timer messages, who may be others now: the log tells what is done. On the
        device when this returns. Raises OSError."""
        path = os.path.join(os.path.dirname(self._table.path), TIMERS)
        self._forget(path, path + ".bak")

    def _forget(self, *paths: str) -> None:
        for path in paths:
            unlink_any(self._disk, path)
        self._disk.fsync_dir(os.path.dirname(self._table.path))


def finish_cut(
    disk: Disk,
    note: CutNote,
    places: LogPlaces,
    segment_size: int,
    abort: AbortFile,
    checkpoint: Checkpoint,
    ends: CleanEnds,
    deleted: DeletedTopics,
) -> None:
    """Do the cut that is noted, if one is, before the store is recovered. Raises OSError."""
    cut = note.read()
    if cut is None:
        return
    log.warning("the log is cut at %d, as was asked for", cut.log_end)
    abort.set()
    checkpoint.lower(cut.stored_ms)
    ends.forget()
    deleted.lower(cut.log_end)
    note.forget_timers()
    cut_segments(disk, places, segment_size, cut.log_end)
    note.remove()


def cut_segments(disk: Disk, places: LogPlaces, segment_size: int, log_end: int) -> None:
    """Zero the log from `log_end` on and delete the segments behind, all but the first one of the log: by it
    an empty log knows where it begins. On the device when this returns. Raises OSError."""
    bases = sorted(int(name) for _, name in places.files() if is_numbered(name, 20))
    for base in reversed(bases[1:]):
        if base >= log_end:
            disk.unlink(places.path_of(base))
            places.forget(base)
    for directory in places.all:
        disk.fsync_dir(directory)
    for base in bases:
        if base <= log_end < base + segment_size and (base < log_end or base == bases[0]):
            with opened(disk, places.path_of(base)) as fd:
                zero_out(disk, fd, log_end - base, segment_size)
                disk.fdatasync(fd)
