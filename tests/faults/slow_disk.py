"""Run one of our commands like tests/interop/attached.py, with a disk that can be slowed down.

While a file `slow` exists in the working directory, each sync takes `SLOW_S` longer and appends a byte to the
file `slowed`.
"""

from __future__ import annotations

import os
import time

from tests.interop import attached

from cometmq.broker import server
from cometmq.store import Disk

SLOW_S = 0.4


class SlowDisk(Disk):
    """The system's disk, slow while the file `slow` exists."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.lends_descriptors = False  # every sync must use this class

    def fdatasync(self, fd: int) -> None:
        if os.path.exists("slow"):
            with open("slowed", "ab") as counted:
                counted.write(b".")
            time.sleep(SLOW_S)
        super().fdatasync(fd)


if __name__ == "__main__":
    server.Disk = SlowDisk  # type: ignore[misc]
    attached.main()
