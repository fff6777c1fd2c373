"""The usage of a store's disks and its consequences: warnings, early deletion, refused sends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cometmq import logs
from cometmq.store.base.config import CONSUME_QUEUES, INDEX, StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.base.refusal import Flag, RunningFlags
from cometmq.store.log.directories import LogDirectories

log = logs.logger(__name__)


@dataclass(eq=False, kw_only=True)
class Fullness:
    """The used shares (0 to 1, -1 if unknown) of the partitions with log, queues and index, as last measured.

    For the loop thread only. When settings change, `config` is replaced.
    """

    disk: Disk
    config: StoreConfig
    flags: RunningFlags
    executor: StoreExecutor
    directories: LogDirectories

    def __post_init__(self) -> None:
        self._stage = 0
        self.log_ratios: dict[str, float] = {}
        """For each directory of the log, the used share of its partition."""
        self.log_ratio = 0.0
        """The lowest used share in `log_ratios`, or -1 if one of them is unknown.

        As in Apache's broker, the log counts as full only if all its partitions are full.
        """
        self.queue_ratio = 0.0
        self.index_ratio = 0.0

    @property
    def deletes_at_any_hour(self) -> bool:
        """Whether expired segments are deleted at any hour instead of only at the hours of `deleteWhen`.

        This is so if a disk with log or queues is fuller than diskMaxUsedSpaceRatio, or its usage is unknown.
        """
        return any(ratio < 0 or ratio > self._due_above for ratio in (self.log_ratio, self.queue_ratio))

    @property
    def deletes_any_age(self) -> bool:
        """Whether the disks are so full that segments are deleted even before they expire."""
        return self.config.clean_file_forcibly_enable and self._fullest > self._forced_above

    @property
    def _fullest(self) -> float:
        return max(self.log_ratio, self.queue_ratio)

    @property
    def _due_above(self) -> float:
        return min(max(self.config.disk_max_used_space_ratio, 10), 95) / 100

    @property
    def _forced_above(self) -> float:
        return min(max(self.config.disk_space_clean_forcibly_ratio, 30), 85) / 100

    def _used(self, path: str) -> float:
        """Return the used share of the partition of `path`, rounded up to 1 %, in any thread."""
        try:
            usage = self.disk.usage(path)
        except OSError:
            return -1.0
        whole = usage.used + usage.usable
        return math.ceil(100 * usage.used / whole) / 100 if whole else -1.0

    async def read_usage(self) -> None:
        """Measure the used shares of the disks. Log, queues and index may be on separate disks."""
        run, index = self.executor.run, self.config.location(INDEX)
        used = {path: await run(self._used, path) for path in self.config.commit_log_dirs}
        self.log_ratios = used
        self.log_ratio = min(used.values())
        self.directories.full = {path for path, ratio in used.items() if ratio > self._forced_above}
        self.queue_ratio = await run(self._used, self.config.location(CONSUME_QUEUES))
        index = index if self.disk.is_dir(index) else self.config.parent_of(INDEX)
        self.index_ratio = await run(self._used, index)

    async def measure(self) -> None:
        """Measure the disks. Stop accepting messages if one is too full, and resume afterwards."""
        await self.read_usage()
        fullest = self._fullest
        self._warn(fullest)
        limit = min(max(self.config.disk_space_warning_level_ratio, 35), 90) / 100
        was_full = Flag.DISK_FULL in self.flags.reasons
        if fullest > limit:
            if not was_full:
                log.error("the disk is %d %% full: the store accepts no messages", round(fullest * 100))
            self.flags.raise_flag(
                Flag.DISK_FULL, f"the disk is full, CL: {self.log_ratio:5.2f} CQ: {self.queue_ratio:5.2f} "
                f"INDEX: {self.index_ratio:5.2f}, limit {limit:.2f} (diskSpaceWarningLevelRatio)",
            )  # fmt: skip
        elif was_full:
            log.warning("the disk is %d %% full: the store accepts messages again", round(fullest * 100))
            self.flags.clear(Flag.DISK_FULL)

    def _warn(self, fullest: float) -> None:
        """Log a warning when expired segments are now deleted at any hour, or segments of any age."""
        stage = (fullest > self._due_above) + self.deletes_any_age
        if stage > self._stage:
            log.warning(
                "the disk is %d %% full: %s", round(fullest * 100),
                "segments are deleted whatever their age" if stage == 2
                else "expired segments are deleted at any hour",
            )  # fmt: skip
        self._stage = stage
