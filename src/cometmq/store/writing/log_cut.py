"""The truncation of a log: a slave or raft member removes records that its master or leader does not have.

Several files change, so the intended end of the log is first recorded in a file of its own, which is synced.
If the process crashes before that, nothing has changed. If it crashes later, the next start completes the
truncation: all steps can be repeated. The checkpoint is lowered before the log is truncated. Recovery treats
the last stop as unclean and truncates the queues and the index.
"""

from __future__ import annotations

import os

from cometmq import logs
from cometmq.store.base.checkpoint import Checkpoint
from cometmq.store.base.disk import Disk, is_numbered, opened, unlink_any, zero_out
from cometmq.store.base.guards import AbortFile
from cometmq.store.log.directories import LogDirectories
from cometmq.store.tables.clean_stop import CleanEnds
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.tables.table_checks import CUT, TIMERS, LogCutTable

log = logs.logger(__name__)


class LogCutFile:
    """The file `config/logCut.json`, which exists while the log is being truncated.

    A damaged file does not show the intended end of the log. So it is ignored and stays, for `verify` to
    report.
    """

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._table = JsonTable(os.path.join(root, "config", CUT), disk)

    def read(self) -> LogCutTable | None:
        """Return the recorded truncation, or None if none is recorded. Raises OSError."""
        found = LogCutTable.from_plain(self._table.load_or_empty(backup=False))
        return found if found.log_end >= 0 else None

    def write(self, log_end: int, stored_ms: int) -> None:
        """Record durably that the log is to end at `log_end`, with the latest store time (or 0) before it."""
        self._table.save({"logEnd": log_end, "storedMs": stored_ms})

    def remove(self) -> None:
        """Remove `config/logCut.json`, because the log has been truncated. Raises OSError."""
        self._forget(self._table.path)

    def forget_timers(self) -> None:
        """Remove the file with the progress of timer messages, and its `.bak`, durably. Raises OSError.

        It may refer to messages that the log no longer has. Without it, the broker reads the log.
        """
        path = os.path.join(os.path.dirname(self._table.path), TIMERS)
        self._forget(path, path + ".bak")

    def _forget(self, *paths: str) -> None:
        for path in paths:
            unlink_any(self._disk, path)
        self._disk.fsync_dir(os.path.dirname(self._table.path))


def finish_cut(
    disk: Disk, note: LogCutFile, directories: LogDirectories, segment_size: int, abort: AbortFile,
    checkpoint: Checkpoint, ends: CleanEnds, deleted: DeletedTopics,
) -> None:  # fmt: skip
    """Truncate the log if a truncation is recorded. Must be called before recovery. Raises OSError."""
    cut = note.read()
    if cut is None:
        return
    log.warning("truncating the log at position %d, as requested", cut.log_end)
    abort.set()
    checkpoint.lower(cut.stored_ms)
    ends.forget()
    deleted.lower(cut.log_end)
    note.forget_timers()
    cut_segments(disk, directories, segment_size, cut.log_end)
    note.remove()


def cut_segments(disk: Disk, directories: LogDirectories, segment_size: int, log_end: int) -> None:
    """Overwrite the log with zeros from `log_end` on, and delete the segments after it. Raises OSError.

    The first segment is never deleted, because its name shows where an empty log begins.
    """
    bases = sorted(int(name) for _, name in directories.files() if is_numbered(name, 20))
    for base in reversed(bases[1:]):
        if base >= log_end:
            disk.unlink(directories.path_of(base))
            directories.forget(base)
    for directory in directories.all:
        disk.fsync_dir(directory)
    for base in bases:
        if base <= log_end < base + segment_size and (base < log_end or base == bases[0]):
            with opened(disk, directories.path_of(base)) as fd:
                zero_out(disk, fd, log_end - base, segment_size)
                disk.fdatasync(fd)
