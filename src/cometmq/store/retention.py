"""Deleting what is old: by age at the hour, by fullness of the disk, on request.

The age of a segment is its file's modification time, as in Apache's broker. Deletion is paced, oldest
first, never the last segment. Queues and index follow the log: their files go when all their records are
gone, and the minimum offset of each queue moves to the first record that still exists.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from cometmq.store.flags import Flag

if TYPE_CHECKING:
    from cometmq.store.message_store import MessageStore

log = logging.getLogger(__name__)

_MANUAL_PASSES = 20


class Retention:
    """Deletion of one store's expired files. Loop thread only."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._manual = 0
        self._derived_min = store.log.min_position
        self.disk_ratio = 0.0
        self.queue_ratio = 0.0

    def delete_now(self) -> None:
        """The operator's request: the next passes delete expired files whatever the hour."""
        self._manual = _MANUAL_PASSES

    def round(self) -> list[str]:
        """One pass: measure the disk, delete what is due. Returns deleted paths."""
        self.measure()
        deleted = self.delete_segments()
        if self._store.log.min_position > self._derived_min:
            self._derived_min = self._store.log.min_position
            deleted += self.delete_derived()
        return deleted

    def _used(self, path: str) -> float:
        """Used share of a partition, its percentage rounded up; -1 if it cannot be read."""
        try:
            usage = self._store.disk.usage(path)
        except OSError:
            return -1.0
        whole = usage.used + usage.usable
        return math.ceil(100 * usage.used / whole) / 100 if whole else -1.0

    def measure(self) -> None:
        """Read the fullness of the disk, and stop or resume writing by it."""
        store, config = self._store, self._store.config
        self.disk_ratio = self._used(config.commit_log_dir)
        self.queue_ratio = self._used(config.root)
        fullest = max(self.disk_ratio, self.queue_ratio)
        limit = min(max(config.disk_space_warning_level_ratio, 35), 90) / 100
        if fullest > limit:
            if not store.flags.bits & Flag.DISK_FULL:
                log.error("disk is %d %% full, the store takes no messages", round(fullest * 100))
            store.flags.raise_flag(
                Flag.DISK_FULL, f"the disk is full, CL: {self.disk_ratio:5.2f} CQ: {self.queue_ratio:5.2f} "
                f"INDEX: {self.queue_ratio:5.2f}"
            )  # fmt: skip
        elif store.flags.bits & Flag.DISK_FULL:
            log.warning("disk is %d %% full, the store takes messages again", round(fullest * 100))
            store.flags.clear(Flag.DISK_FULL)

    def _due(self) -> bool:
        config = self._store.config
        hour = time.localtime(self._store.clock.time_ms() / 1000).tm_hour
        if any(part.strip().isdigit() and int(part) == hour for part in config.delete_when.split(";")):
            return True
        limit = min(max(config.disk_max_used_space_ratio, 10), 95) / 100
        if any(ratio < 0 or ratio > limit for ratio in (self.disk_ratio, self.queue_ratio)):
            return True
        if self._manual > 0:
            self._manual -= 1
            return True
        return False

    def delete_segments(self) -> list[str]:
        """Delete expired segments if deletion is due; any but the last when the disk is dangerously full."""
        store, config = self._store, self._store.config
        if not self._due():
            return []
        forced_at = min(max(config.disk_space_clean_forcibly_ratio, 30), 85) / 100
        forced = config.clean_file_forcibly_enable and max(self.disk_ratio, self.queue_ratio) > forced_at
        now = store.clock.time_ms()
        deleted: list[str] = []
        while len(store.log.segments) > 1 and len(deleted) < config.delete_file_batch_max:
            facts = store.disk.facts(store.log.path_of(store.log.segments[0]))
            expired = facts is None or facts.modified_ms + config.file_reserved_time * 3_600_000 < now
            if not (expired or forced):
                break
            deleted.append(store.log.delete_first())
            log.info("deleted %s (%s)", deleted[-1], "expired" if expired else "disk is full")
        return deleted

    def delete_derived(self) -> list[str]:
        """After the log's beginning has moved: queue and index files, minimum offsets."""
        store = self._store
        log_min = store.log.min_position
        deleted = store.index.delete_expired(log_min)
        for queue in store.queues:
            for path in queue.expired_files(log_min):
                queue.delete_file(path)
                deleted.append(path)
            queue.correct_min(log_min)
        return deleted
