"""The file of one table. One write runs at a time, and a failed write is repeated until it succeeds.

The event loop converts the table to plain values, usually in one step, so that all values belong to the same
moment. Then a thread writes these values. If the table changes during a write, another write follows. A
failed write (the disk may be full) is repeated after a delay, or at once if the table changes again. A
request that promises durability waits for the write that contains its change. If this write fails, the
request receives the error.
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

    `content` returns plain values, or an awaitable. Then `flush_first` is awaited, which may raise OSError.
    """

    disk: Disk
    path: str
    content: Callable[[], dict[str, Any] | Awaitable[dict[str, Any]]]
    flush_first: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._file = JsonTable(self.path, self.disk)
        self._task: asyncio.Task[None] | None = None
        self._asked = 0  # number of changes of the table so far
        self._saved = 0  # number of changes of the table that were made before the file was last written
        self._changed = asyncio.Event()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._ending = False

    def load(self) -> dict[str, Any]:
        """Return the file's table, or an empty table if there is no file. Raises StoreCorrupt or OSError."""
        return self._file.load()

    def load_or_empty(self) -> dict[str, Any]:
        """Return the file's table or, if it cannot be read, an empty one, which the caller recomputes."""
        return self._file.load_or_empty()

    def clear(self) -> None:
        """Empty the file if there is one. Must run in a thread, before `save`. Raises OSError."""
        if self._file.load_or_empty():
            self._file.save({})

    def save(self) -> None:
        """Start to write the table to its file, because the table has changed."""
        self._asked += 1
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def saved(self) -> None:
        """Wait until all changes so far are on the disk. Raises OSError if the write fails."""
        if self._saved < self._asked:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((self._asked, waiter))
            await waiter

    async def save_now(self) -> None:
        """Start to write the table, and wait until it is on the disk. Raises OSError if the write fails."""
        self.save()
        await self.saved()

    async def finish(self) -> None:
        """Write the table to its file for the last time. A failed write is not repeated."""
        self._ending = True
        self.save()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        # Let the event-loop iteration end, so that one write contains all changes of this iteration.
        await asyncio.sleep(0)
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
            made = self.content()
            content = made if isinstance(made, dict) else await made
            if self.flush_first is not None:
                await self.flush_first()
            await asyncio.to_thread(self._file.save, content)
        except OSError as error:
            return error
        # An unexpected error ends the waits for this write, but must not prevent later writes.
        except Exception as error:
            log.exception("%s", self._file.path)
            return OSError(errno.EIO, repr(error))
        return None

    def _end_waits(self, asked: int, error: OSError | None) -> None:
        """End the waits in `saved` for the first `asked` changes, with the error if there is one."""
        waiting, self._waiters = self._waiters, []
        for number, waiter in waiting:
            if number > asked:
                self._waiters.append((number, waiter))
            elif not waiter.done():
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)
