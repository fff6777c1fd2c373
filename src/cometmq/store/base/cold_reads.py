"""Cold reads: ranges that are not in memory are read by threads, each range once, few at a time.

Consumers that drain queues of one topic side by side miss the same range together: they share one read. Only
a few reads are under way at once: what a thread has read is work for the loop, and live sends wait for that
too.

Where memory does not keep what was read, or the file system never answers without waiting, the bytes go from
the thread to the question. The loop never waits for the device.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import TypeVar

from cometmq.store.base.disk import Disk
from cometmq.store.base.files import CACHED, FileRange, NotInMemory, Reads

T = TypeVar("T")

READ_AHEAD = 128 << 10
_AT_ONCE = 2


class ColdReads:
    """The reads under way in one store. Loop thread only."""

    __slots__ = ("_disk", "_handing_over", "_places", "_under_way")

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._under_way: dict[FileRange, asyncio.Task[None]] = {}
        self._handing_over = asyncio.Lock()  # held by the one question that is given bytes, for memory's sake

    async def answer(self, question: Callable[[Reads], T], missing: FileRange) -> T:
        """The answer to a question for which `missing` was not in memory. Raises OSError."""
        tried: set[FileRange] = set()
        while missing not in tried:
            tried.add(missing)
            try:
                await self.fetch(missing)
                return question(CACHED)
            except NotInMemory as miss:
                missing = miss.missing
            except OSError as failure:
                if failure.errno != errno.EIO:
                    raise
                break  # a bad sector somewhere around: what is wanted may be readable by itself
        async with self._handing_over:
            return await self._hand_over(question, missing)

    async def fetch(self, missing: FileRange) -> None:
        """Read the blocks of READ_AHEAD bytes around a range into the page cache. Raises OSError."""
        start = missing.offset - missing.offset % READ_AHEAD
        stop = missing.offset + missing.length
        whole = FileRange(missing.path, start, stop + -stop % READ_AHEAD - start)
        task = self._under_way.get(whole)
        if task is None:
            task = self._under_way[whole] = asyncio.create_task(self._fetch(whole))
            task.add_done_callback(lambda _: self._under_way.pop(whole, None))
        await asyncio.shield(task)

    async def _fetch(self, whole: FileRange) -> None:
        async with self._places:
            await self._read(whole)

    async def _hand_over(self, question: Callable[[Reads], T], missing: FileRange) -> T:
        """Keep what the question misses for it alone until it is answered, so every try gets further than the
        one before. A range that the device cannot read fails where it is asked for: the question may do
        with less."""
        fetched: dict[FileRange, bytes | OSError] = {}
        while True:
            try:
                fetched[missing] = await self._read(missing)
            except OSError as failure:
                if failure.errno != errno.EIO:
                    raise
                fetched[missing] = failure
            try:
                return question(Reads(fetched=fetched))
            except NotInMemory as miss:
                missing = miss.missing

    async def _read(self, wanted: FileRange) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(None, wanted.read, self._disk)
