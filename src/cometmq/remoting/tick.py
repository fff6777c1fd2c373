"""The end of a loop iteration: work that all connections have in common is done once.

Every connection that handled frames or has something to send asks for a tick. It runs after the reads of this
loop iteration: first the owner's callbacks (the broker writes its records to disk and answers them), then
every connection with queued replies sends them in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from cometmq import logs
from cometmq.remoting.partial import PartialFrames

log = logs.logger(__name__)

SCRATCH_SIZE = 256 * 1024


class Flushable(Protocol):
    """A connection, as far as the tick knows it; see there."""

    def flush(self) -> None: ...

    def abort(self) -> None: ...


class Tick:
    """Runs callbacks and flushes connections once per loop iteration; servers of one broker share one.

    `scratch` is the buffer that all its connections read into: a loop fills it for one and has that handled
    before the next; `partial` is what they keep of frames that have not come whole, `unsent` of answers that
    the peers do not take. `scheduled`: a tick will end, there is no need to ask for one.
    """

    __slots__ = ("_callbacks", "_dirty", "_loop", "partial", "scheduled", "scratch", "unsent")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop if loop is not None else asyncio.get_running_loop()
        self._callbacks: list[Callable[[], None]] = []
        self._dirty: list[Flushable] = []
        self.scheduled = False
        self.scratch = memoryview(bytearray(SCRATCH_SIZE))
        self.partial = PartialFrames()
        self.unsent = PartialFrames("unsent answers")

    def at_end(self, callback: Callable[[], None]) -> None:
        """Run `callback` at the end of every tick, in order of registration, before replies leave."""
        self._callbacks.append(callback)

    def remove(self, callback: Callable[[], None]) -> None:
        """Stop running `callback`; unknown ones are ignored."""
        self._callbacks = [known for known in self._callbacks if known != callback]

    def schedule(self) -> None:
        """Make sure that a tick ends after the current loop iteration's reads."""
        # asyncio and uvloop run a call_soon callback only after all I/O callbacks of the current iteration.
        if not self.scheduled:
            self.scheduled = True
            self._loop.call_soon(self.run_now)

    def mark_dirty(self, connection: Flushable) -> None:
        """Flush `connection` at the end of this tick."""
        self._dirty.append(connection)
        if not self.scheduled:
            self.schedule()

    def run_now(self) -> None:
        """End a tick here and now, before the loop would: callbacks run, replies leave."""
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                log.exception("a callback at the end of the tick failed")
        dirty = self._dirty
        self._dirty = []
        try:
            for connection in dirty:
                connection.flush()
        except BaseException:
            # Nobody knows how much of this was sent. A peer whose connection ends asks again at once.
            for connection in dirty:
                connection.abort()
            raise
        finally:
            self.scheduled = False
            if self._dirty:  # written while others were flushed, by a close callback for instance
                self.schedule()
