"""A disk whose reads tests can delay, to check which tasks wait for them."""

from __future__ import annotations

import threading

from tests.kit.faulty_disk import FaultyDisk

from cometmq.store.base.disk import Buffer


class ColdDisk(FaultyDisk):
    """A disk with an empty page cache that only blocking reads fill.

    Blocking reads wait for `go_on`; those in the event loop's thread are counted.
    """

    def __init__(self) -> None:
        super().__init__(really_sync=False)
        self.cold = False
        self.go_on = threading.Event()
        self.go_on.set()
        self.waiting = threading.Event()
        self.warm: list[tuple[str, int, int]] = []
        self.in_the_loop = 0
        self.loop_thread = threading.get_ident()

    def pread_cached(self, fd: int, length: int, offset: int) -> Buffer | None:
        path = self._paths[fd]
        if self.cold and not any(
            path == known and begin <= offset and offset + length <= end for known, begin, end in self.warm
        ):
            return None
        return super().pread_cached(fd, length, offset)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        if self.cold:
            self.in_the_loop += threading.get_ident() == self.loop_thread
            self.waiting.set()
            assert self.go_on.wait(20)
        data = super().pread(fd, length, offset)
        if self.cold:
            self.warm.append((self._paths[fd], offset, offset + length))
        return data
