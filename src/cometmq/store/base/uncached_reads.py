"""Reads file ranges that are not in memory, in threads: each range once, and a few at a time.

Consumers that drain queues of one topic in parallel need the same range at the same time and share one read.
The number of concurrent reads is small, because each read causes work for the event loop, and live sends must
not wait for the work of many reads.

Normally, a thread only brings a range into the page cache, and the query reads it from there. If the page
cache does not keep the range, or if the file system does not support reads without waiting, the thread passes
the bytes to the query directly. The loop never waits for the disk.
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
_MAX_PARALLEL_READS = 2


class UncachedReads:
    """The uncached reads of one store that are in progress. For the loop thread only."""

    __slots__ = ("_disk", "_passing", "_places", "_under_way")

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._places = asyncio.Semaphore(_MAX_PARALLEL_READS)
        self._under_way: dict[FileRange, asyncio.Task[None]] = {}
        self._passing = asyncio.Lock()  # Lets only one query at a time get its bytes directly from a thread

    async def answer(self, question: Callable[[Reads], T], missing: FileRange) -> T:
        """Read missing bytes from the disk, and return the result of a query that needs them.

        Args:
            question: The query. It has raised NotInMemory, and is called again after each read.
            missing: The range of bytes that the query lacked.

        Raises OSError.
        """
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
                # The bad sector may be in a part of the block that the query does not need. So below, only
                # the needed ranges are read.
                break
        async with self._passing:
            return await self._pass_ranges(question, missing)

    async def fetch(self, missing: FileRange) -> None:
        """Bring the blocks of READ_AHEAD bytes that a range touches into the page cache. Raises OSError."""
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

    async def _pass_ranges(self, question: Callable[[Reads], T], missing: FileRange) -> T:
        """Repeat a query with the bytes of each range that was not in memory, until the query completes.

        If the disk cannot read a range, the query gets the error for this range. The query may be able to do
        without the range.
        """
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
