"""The tick: work at the end of a loop iteration, done once for all connections.

Every connection that has handled frames or has bytes to send requests a tick, which runs after the reads of
this loop iteration. First, it runs the registered callbacks: with one of them, the broker writes its records
to disk and responds. Then every connection with queued responses sends them in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from cometmq import logs

log = logs.logger(__name__)

SCRATCH_SIZE = 256 * 1024


class Link(Protocol):
    """The methods of a connection that `Tick`, `PartialFrames` and `ConnectionTable` call."""

    def check(self, now: float) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def cut(self, why: str) -> None: ...


class PartialFrames:
    """Limits the total size of the incomplete frames, or the unsent responses, of all connections of a loop.

    A connection may keep the beginning of a frame for a while, but thousands of connections must not fill the
    memory in this way. Above the limit, the connection that has kept its bytes for the longest time is
    aborted: a correct peer completes its frame, or receives its responses, within seconds.

    Log lines call the bytes `what`, for instance "half-sent frames".
    """

    __slots__ = ("_kept", "_what", "total")

    def __init__(self, what: str = "half-sent frames") -> None:
        self._kept: dict[Link, int] = {}
        self._what = what
        self.total = 0

    def keep(self, connection: Link, size: int, most: int, fresh: bool) -> None:
        """Record that `connection` now keeps `size` bytes. Abort the oldest while the sum exceeds `most`.

        `fresh` tells that they belong to a new frame: the time for which it keeps them begins now.
        """
        kept = self._kept
        self.total += size - (kept.pop(connection, 0) if fresh else kept.get(connection, 0))
        kept[connection] = size
        while self.total > most:
            oldest = next(iter(kept))
            self.drop(oldest)
            oldest.cut(f"{self._what} of all connections take more than {most} bytes")

    def drop(self, connection: Link) -> None:
        """Record that `connection` keeps no bytes. An unknown connection is ignored."""
        self.total -= self._kept.pop(connection, 0)


class Tick:
    """Runs callbacks and flushes connections at the end of loop iterations.

    All servers of one broker share one `Tick`.

    Attributes:
        scratch: The buffer into which all connections read. They can share it, because the bytes that were
            read from one connection are handled before the loop reads from the next.
        partial: Limits the memory for incomplete frames, summed over all connections.
        unsent: Limits the memory for unsent responses, summed over all connections.
        scheduled: Whether `run_now` is already scheduled.
    """

    __slots__ = ("_callbacks", "_dirty", "_loop", "partial", "scheduled", "scratch", "unsent")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop if loop is not None else asyncio.get_running_loop()
        self._callbacks: list[Callable[[], None]] = []
        self._dirty: list[Link] = []
        self.scheduled = False
        self.scratch = memoryview(bytearray(SCRATCH_SIZE))
        self.partial = PartialFrames()
        self.unsent = PartialFrames("unsent answers")

    def at_end(self, callback: Callable[[], None]) -> None:
        """Register a callback for `run_now`. They run in this order, before responses are sent."""
        self._callbacks.append(callback)

    def remove(self, callback: Callable[[], None]) -> None:
        """Remove a registered callback. An unknown callback is ignored."""
        self._callbacks = [known for known in self._callbacks if known != callback]

    def schedule(self) -> None:
        """Schedule `run_now` for the end of the current loop iteration, after its reads."""
        # asyncio and uvloop run a call_soon callback only after all I/O callbacks of the current iteration.
        # So `run_now` runs after the reads.
        if not self.scheduled:
            self.scheduled = True
            self._loop.call_soon(self.run_now)

    def mark_dirty(self, connection: Link) -> None:
        """Send the queued bytes of `connection` at the end of the current loop iteration."""
        self._dirty.append(connection)
        if not self.scheduled:
            self.schedule()

    def run_now(self) -> None:
        """Run the registered callbacks, then write the queued bytes of all connections."""
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                log.exception("a callback at the end of an event-loop iteration failed")
        dirty = self._dirty
        self._dirty = []
        try:
            for connection in dirty:
                connection.flush()
        except BaseException:
            # A flush has failed, and it is unknown how many bytes were sent, so the connections are aborted.
            # A peer whose connection is lost repeats its requests.
            for connection in dirty:
                connection.abort()
            raise
        finally:
            self.scheduled = False
            if self._dirty:  # `flush` can queue more bytes, for instance in a close callback
                self.schedule()
