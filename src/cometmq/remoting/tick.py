"""The end of a loop iteration: where work gathered from all connections is done once.

Every connection that handled frames or has something to send asks for a tick. It runs after the reads of this
loop iteration: first the owner's callbacks (the broker writes its records to disk and answers them), then
every connection with queued replies sends them in one write, and many connections in one system call.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Protocol

from cometmq import logs
from cometmq.remoting.partial import PartialFrames
from cometmq.remoting.ring import ENTRIES, Bytes, SendRing

log = logs.logger(__name__)

SCRATCH_SIZE = 256 * 1024
# From so many connections on, one system call for all costs less than one for each.
FEWEST_FOR_RING = 8


class Flushable(Protocol):
    """A connection, as far as the tick knows it; see there."""

    fd: int

    def flush(self) -> None: ...

    def take(self) -> Bytes | None: ...

    def send_rest(self, rest: Bytes) -> None: ...

    def abort(self) -> None: ...


class Tick:
    """Runs callbacks and flushes connections once per loop iteration; servers of one broker share one.

    `scratch` is the buffer that all its connections read into: a loop fills it for one and has that handled
    before the next; `partial` is what they keep of frames that have not come whole, `unsent` of answers that
    the peers do not take. `scheduled`: a tick will end, there is no need to ask for one.
    """

    __slots__ = (
        "_callbacks", "_dirty", "_fewest_for_ring", "_loop", "_ring", "partial", "scheduled", "scratch",
        "unsent",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop if loop is not None else asyncio.get_running_loop()
        self._callbacks: list[Callable[[], None]] = []
        self._dirty: list[Flushable] = []
        self._ring: SendRing | None = None
        self._fewest_for_ring = FEWEST_FOR_RING
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
            self._loop.call_soon(self._run)

    def mark_dirty(self, connection: Flushable) -> None:
        """Flush `connection` at the end of this tick."""
        self._dirty.append(connection)
        if not self.scheduled:
            self.scheduled = True
            self._loop.call_soon(self._run)

    def run_now(self) -> None:
        """End a tick here and now, before the loop would: callbacks run, replies leave."""
        self._run()

    def _run(self) -> None:
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                log.exception("a callback at the end of the tick failed")
        dirty = self._dirty
        self._dirty = []
        try:
            if len(dirty) < self._fewest_for_ring:
                for connection in dirty:
                    connection.flush()
            else:
                self._flush_by_ring(dirty)
        except BaseException:
            # What of all this left nobody knows. A peer whose connection ends asks again at once.
            for connection in dirty:
                connection.abort()
            raise
        finally:
            self.scheduled = False
            if self._dirty:  # written while others were flushed, by a close callback for instance
                self.schedule()

    def _flush_by_ring(self, dirty: list[Flushable]) -> None:
        try:
            ring = self._ring = self._ring or SendRing()
        except OSError as error:
            log.info("answers to many connections take a system call for each: %s", error)
            self._fewest_for_ring = sys.maxsize  # for good: nothing depends on it
            for connection in dirty:
                connection.flush()
            return
        try:
            for at in range(0, len(dirty), ENTRIES):
                _send_all(dirty[at : at + ENTRIES], ring)
        except BaseException:
            self._ring = None
            raise


def _send_all(connections: list[Flushable], ring: SendRing) -> None:
    """Send what at most ENTRIES connections have queued."""
    sent: list[Flushable] = []
    fds: list[int] = []
    lots: list[Bytes] = []
    others: list[Flushable] = []
    for connection in connections:
        lot = connection.take()
        if lot is None:
            others.append(connection)
        elif lot:  # else it was flushed before its turn
            sent.append(connection)
            fds.append(connection.fd)
            lots.append(lot)
    if lots:
        for at, taken in ring.send(fds, lots):
            sent[at].send_rest(lots[at][taken:])
    # These come last: what a flush leads to may close a connection, and its descriptor must not be ours then.
    for connection in others:
        connection.flush()
