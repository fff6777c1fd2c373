"""Cold reads: ranges that are not in memory are read by threads, each range once, few at a time.

Consumers that drain queues of one topic side by side miss the same range together: they share one read. And
however many consumers there are, only a few reads are under way: a thread that comes back asks the loop for
the interpreter, and what it has read is work for the loop, which live sends are waiting for as well.

Where memory does not keep what was read, because there is too little of it or the file system never answers
without waiting, `carry` brings the bytes themselves from the thread to the question. The loop never waits for
the device.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import TypeVar

from cometmq.store.base.disk import Disk
from cometmq.store.base.files import NotCached, StoreFiles

T = TypeVar("T")

_AT_ONCE = 2
_REACH = 128 << 10  # misses within so many bytes of a file are one


class ColdReads:
    """The reads under way in one store. Loop thread only."""

    __slots__ = ("_disk", "_places", "_under_way")

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._under_way: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def fetch(self, missing: NotCached) -> None:
        """Bring a range into memory; come back when that has been tried. Raises OSError."""
        key = (missing.path, missing.offset // _REACH)
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._fetch(missing))
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        await asyncio.shield(task)

    async def _fetch(self, missing: NotCached) -> None:
        start = missing.offset - missing.offset % _REACH
        whole = NotCached(missing.path, start, missing.offset + missing.length - start)
        async with self._places:
            await asyncio.get_running_loop().run_in_executor(None, whole.fetch, self._disk)


async def carry(files: StoreFiles, missing: NotCached, ask: Callable[[], T | NotCached]) -> T:
    """The answer to a question whose last outcome was `missing`. What it misses is kept for it alone until it
    is answered, so every try gets further than the one before; one question at a time, for the memory's
    sake. A range that the device cannot read fails where it is asked for: the question may do with less.
    Raises OSError."""
    loop = asyncio.get_running_loop()
    async with files.carrying:
        carried: dict[NotCached, bytes | OSError] = {}
        while True:
            try:
                carried[missing] = await loop.run_in_executor(None, missing.read, files.disk)
            except OSError as failure:
                if failure.errno != errno.EIO:
                    raise
                carried[missing] = failure
            files.carried = carried
            try:
                outcome = ask()
            finally:
                files.carried = {}
            if not isinstance(outcome, NotCached):
                return outcome
            missing = outcome
