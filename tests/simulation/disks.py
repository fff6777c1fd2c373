"""The disk of a simulated host: in memory, slow or failing on demand, and its state after a power failure."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter

from tests.kit.crash_images import CrashPoint
from tests.kit.recording_disk import Image, RecordingDisk

from cometmq.store import Buffer, DiskUsage

_KINDS = (0, 1, 2, 3, *range(4, 14))  # numbers of images, see CrashPoint.sampled_image


class SimulatedDisk(RecordingDisk):
    """A RecordingDisk with faults.

    Shares are shares of calls. With `full` nothing can be reserved. `sync_s` is the duration of a sync of the
    log. `seen` counts the faults by kind.
    """

    def __init__(self, chance: random.Random, seen: Counter[str], start: Image | None = None) -> None:
        super().__init__(start)
        self.chance = chance
        self.seen = seen
        self.write_errors = 0.0
        self.sync_errors = 0.0
        self.full = False
        self.sync_s = 0.0005

    def heal(self) -> None:
        """End all faults."""
        self.write_errors = self.sync_errors = 0.0
        self.full = False
        self.sync_s = 0.0005

    def after_power_loss(self) -> SimulatedDisk:
        """Return the disk after a power failure: any part of the data that was not synced may be missing."""
        point = CrashPoint(self, len(self.history))
        if point.choices:
            self.seen["volatile at power loss"] += 1
        kind = self.chance.choice(_KINDS)
        _, image = point.sampled_image(kind, f"{self.chance.random()}")
        return SimulatedDisk(self.chance, self.seen, image)

    def rot(self, within: str) -> None:
        """Damage one written byte in a file whose path contains `within`."""
        written = [
            (inode, content)
            for path, inode in sorted(self.names.items())
            if within in path and (content := self.files[inode])
        ]
        if not written:
            return
        _, content = self.chance.choice(written)
        end = len(content.rstrip(b"\0"))
        if end:
            self.seen["rot"] += 1
            content[self.chance.randrange(end)] ^= 1 << self.chance.randrange(8)

    # -- faults

    def _may_fail(self, share: float, what: str) -> None:
        if share and self.chance.random() < share:
            self.seen[what] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        if self.write_errors and self.chance.random() < self.write_errors:
            self.seen["write error"] += 1
            super().pwrite(fd, memoryview(data)[: self.chance.randint(0, len(data))], offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pwrite(fd, data, offset)

    def fdatasync(self, fd: int) -> None:
        self._may_fail(self.sync_errors, "sync error")
        super().fdatasync(fd)

    def reserve(self, fd: int, length: int) -> None:
        if self.full:
            self.seen["full"] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().reserve(fd, length)

    def usage(self, path: str) -> DiskUsage:
        return DiskUsage(100, 40, 60) if self.full else DiskUsage(100, 10, 90)
