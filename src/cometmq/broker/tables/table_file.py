"""The file of one table: one write at a time, repeated until it succeeds.

The loop converts the table to text, so that it is consistent, and a thread writes it. Newer content waits for
the current write. If a write fails (the disk may be full), it is repeated, and earlier if the table changes
again. Requests that promise a durable change wait for their write and receive its failure.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from cometmq import logs
from cometmq.periodic import Backoff
from cometmq.store import Disk, JsonTable

log = logs.logger(__name__)

# The delay before a failed write is repeated. It doubles each time.
RETRY_S = 1.0
MAX_RETRY_INTERVAL_S = 30.0


@dataclass(eq=False)
class TableFile:
    """Writes a table to its file. All methods must be called on the loop.

    Args:
        content: Returns the table as plain values.
        flush_first: Awaited after `content` and before the write. Raises OSError on failure.
    """

    disk: Disk
    path: str
    content: Callable[[], dict[str, Any]]
    flush_first: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._file = JsonTable(self.path, self.disk)
        self._task: asyncio.Task[None] | None = None
        self._asked = 0  # number of changes so far
        self._saved = 0  # number of changes that are on the device
        self._changed = asyncio.Event()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._ending = False

    def load(self) -> dict[str, Any]:
        """Return what was last written, or an empty table without a file. Raises StoreCorrupt, OSError."""
        return self._file.load()

    def load_or_empty(self) -> dict[str, Any]:
        """Return the result of `load`, or an empty table for an unreadable file that can be recomputed."""
        return self._file.load_or_empty()

    def save(self) -> None:
        """Schedule a write of the table after a change."""
        self._asked += 1
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def saved(self) -> None:
        """Wait until all changes so far are on the device.

        Raises:
            OSError: The write failed. It is repeated nevertheless.
        """
        if self._saved < self._asked:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((self._asked, waiter))
            await waiter

    async def save_now(self) -> None:
        """Schedule a write and wait for it."""
        self.save()
        await self.saved()

    async def finish(self) -> None:
        """Write the table a last time. A failure is final."""
        self._ending = True
        self.save()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        await asyncio.sleep(0)  # all changes of one tick are written together
        retry = Backoff(RETRY_S, MAX_RETRY_INTERVAL_S)
        while self._saved < self._asked:
            asked = self._asked
            self._changed.clear()
            error = await self._write()
            self._end_waits(asked, error)
            if error is None:
                self._saved = asked
                if retry.failures:
                    log.warning("%s can be written again", self._file.path)
                retry.reset()
                continue
            if self._ending:
                log.error("%s could not be written: %s", self._file.path, error)
                self._end_waits(self._asked, error)
                return
            log.error("%s could not be written, trying again: %s", self._file.path, error)
            try:
                await asyncio.wait_for(self._changed.wait(), retry.next_s())
            except TimeoutError:
                pass

    async def _write(self) -> OSError | None:
        try:
            content = self.content()
            if self.flush_first is not None:
                await self.flush_first()
            await asyncio.to_thread(self._file.save, content)
        except OSError as error:
            return error
        except Exception as error:  # the waiters must receive the error, and later changes must be written
            log.exception("%s", self._file.path)
            return OSError(errno.EIO, repr(error))
        return None

    def _end_waits(self, asked: int, error: OSError | None) -> None:
        """Complete the waiters whose change was part of this write."""
        waiting, self._waiters = self._waiters, []
        for number, waiter in waiting:
            if number > asked:
                self._waiters.append((number, waiter))
            elif not waiter.done():
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)
