"""The file of one table: one write at a time, which is repeated until it succeeds.

The event loop converts the table to plain values, so that they are consistent; a thread writes them. A change
during a write causes another write afterwards. A failed write (the disk may be full) is repeated after a
delay, or at once if the table changes again. A request that promises durability waits for its write and
receives its error.
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

# The delay, in seconds, before a failed write is repeated. It doubles after each failure.
RETRY_S = 1.0
MAX_RETRY_INTERVAL_S = 30.0


@dataclass(eq=False)
class TableFile:
    """Writes a table to its file. All methods must be called in the event loop's thread.

    Args:
        content: Returns the table as plain values.
        flush_first: Is awaited after `content` and before the write. Raises OSError on failure.
    """

    disk: Disk
    path: str
    content: Callable[[], dict[str, Any]]
    flush_first: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._file = JsonTable(self.path, self.disk)
        self._task: asyncio.Task[None] | None = None
        self._asked = 0  # number of changes of the table so far
        self._saved = 0  # number of changes that the file contains
        self._changed = asyncio.Event()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._ending = False

    def load(self) -> dict[str, Any]:
        """Return the table in the file, or an empty one without a file. Raises StoreCorrupt or OSError."""
        return self._file.load()

    def load_or_empty(self) -> dict[str, Any]:
        """Like `load`, but for a table that can be recomputed: return an empty one for an unreadable file."""
        return self._file.load_or_empty()

    def save(self) -> None:
        """Start to write the table, because it has changed."""
        self._asked += 1
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def saved(self) -> None:
        """Wait until all changes so far are on the disk.

        Raises:
            OSError: The write failed. The write is repeated nevertheless.
        """
        if self._saved < self._asked:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((self._asked, waiter))
            await waiter

    async def save_now(self) -> None:
        """Start to write the table, and wait until it is on the disk. Raises OSError like `saved`."""
        self.save()
        await self.saved()

    async def finish(self) -> None:
        """Write the table for the last time. A failed write is not repeated."""
        self._ending = True
        self.save()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        await asyncio.sleep(0)  # lets the tick end, so that one write contains all its changes
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
        except Exception as error:  # an unexpected error ends the waits, and later changes are still written
            log.exception("%s", self._file.path)
            return OSError(errno.EIO, repr(error))
        return None

    def _end_waits(self, asked: int, error: OSError | None) -> None:
        """End the waits for the first `asked` changes. If `error` is not None, each wait raises it."""
        waiting, self._waiters = self._waiters, []
        for number, waiter in waiting:
            if number > asked:
                self._waiters.append((number, waiter))
            elif not waiter.done():
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)
