"""Calls `fdatasync` for the loop, in a thread or in a separate process.

A thread needs the interpreter's lock before and after the call, and a busy loop releases the lock late. A
separate process does not need this lock: the loop only sends it a few bytes, and reads a few bytes when the
sync is done.

The process syncs through descriptors of its own. The system reports a failed write-back once for each opening
of a file. So if the process is lost during a sync, the same sync through the store's own descriptor still
reports every failure.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from cometmq import logs
from cometmq.periodic import Backoff
from cometmq.store.base.disk import Disk
from cometmq.store.log import sync_child

log = logs.logger(__name__)

Done = Callable[["OSError | None"], None]
SCRIPT = os.path.abspath(sync_child.__file__)
_EXIT_WAIT_S = 5.0
_RESTART_DELAY_S = 1.0  # Delay, in seconds, before a lost process is replaced; doubled after each loss
# Maximum restart delay, in seconds. If a process runs this long, the next delay is `_RESTART_DELAY_S`.
_MAX_RESTART_DELAY_S = 60.0


class Unsynced(NamedTuple):
    """A segment to sync: its first position, its path, and the descriptor through which it is written."""

    base: int
    fd: int
    path: str


class ThreadSyncer(msgspec.Struct, eq=False):
    """A syncer that calls `Disk.fdatasync` in a thread."""

    disk: Disk
    loop: asyncio.AbstractEventLoop
    pool: ThreadPoolExecutor

    def sync(self, segments: Sequence[Unsynced], done: Done) -> None:
        """Sync all segments, then call `done` in the loop, with the error or None."""
        self.pool.submit(self._work, segments, done)

    def _work(self, segments: Sequence[Unsynced], done: Done) -> None:
        failure: OSError | None = None
        try:
            for segment in segments:
                self.disk.fdatasync(segment.fd)
        except OSError as problem:
            failure = problem
        self.loop.call_soon_threadsafe(done, failure)


@dataclass(eq=False)
class ChildSyncer:
    """A syncer that uses a process (see sync_child.py), or a thread while the process cannot sync."""

    disk: Disk
    loop: asyncio.AbstractEventLoop
    thread: ThreadSyncer

    def __post_init__(self) -> None:
        self._held: list[int] = []  # First positions of the segments whose descriptors the sync process holds
        self._in_flight: tuple[Sequence[Unsynced], Done] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._restart_timer: asyncio.TimerHandle | None = None  # Timer that starts the next sync process
        self._delays = Backoff(_RESTART_DELAY_S, _MAX_RESTART_DELAY_S)
        self._started_at = 0.0  # Start time of the sync process, by the loop's clock
        self._start()

    def _start(self) -> None:
        self._started_at = self.loop.time()
        try:
            ours = self._start_process()
        except OSError as problem:
            text = "the sync process could not be started; a thread syncs for the next %g s: %s"
            log.warning(text, self._wait(), problem)
            return
        ours.setblocking(False)
        self._held = []  # The new sync process holds no descriptors yet
        self._socket = ours
        self.loop.add_reader(ours, self._answered)

    def _start_process(self) -> socket.socket:
        """Start the sync process, and return the broker's end of its socket. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # The sync process gets its own process group, because signals from the terminal are meant for
                # the broker. It stays in the session of the broker: with a session of its own, Linux's
                # scheduler (autogroup) would schedule it apart from the broker, and each sync would wait.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", SCRIPT], stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, cwd="/", process_group=0,
                )  # fmt: skip
            except OSError:
                ours.close()
                raise
        return ours

    def _wait(self) -> float:
        """Schedule the start of the next sync process. Return the delay in seconds."""
        if self.loop.time() - self._started_at >= _MAX_RESTART_DELAY_S:
            self._delays.reset()
        seconds = self._delays.next_s()
        self._restart_timer = self.loop.call_later(seconds, self._restart)
        return seconds

    def _restart(self) -> None:
        self._restart_timer = None
        self._start()
        if self._process is not None:
            log.info("the sync process started (process id %d)", self._process.pid)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def sync(self, segments: Sequence[Unsynced], done: Done) -> None:
        if self._socket is None or len(segments) > sync_child.MAX_DESCRIPTORS:
            self.thread.sync(segments, done)
            return
        self._in_flight = segments, done
        try:
            self._ask(self._socket, segments)
        except OSError as problem:
            self._replace_process(problem)

    def _ask(self, process: socket.socket, segments: Sequence[Unsynced]) -> None:
        bases = [segment.base for segment in segments]
        if bases == self._held:
            process.send(sync_child.SYNC)
            return
        opened: list[int] = []
        try:
            for segment in segments:
                opened += [self.disk.open(segment.path)]
            process.send(sync_child.HOLD)
            socket.send_fds(process, [sync_child.HOLD], opened)
        finally:
            for fd in opened:
                self.disk.close(fd)
        self._held = bases

    def _answered(self) -> None:
        if self._socket is None:
            return
        try:
            answer = self._socket.recv(sync_child.ANSWER.size)
        except BlockingIOError:
            return
        except OSError as problem:
            self._replace_process(problem)
            return
        if len(answer) != sync_child.ANSWER.size or self._in_flight is None:
            self._replace_process(OSError("it ended"))
            return
        (_, done), self._in_flight = self._in_flight, None
        (error,) = sync_child.ANSWER.unpack(answer)
        done(OSError(error, os.strerror(error)) if error else None)

    def _replace_process(self, problem: OSError) -> None:
        """Give up the sync process, and schedule the start of another one. Until then, a thread syncs."""
        flying, self._in_flight = self._in_flight, None
        self._end()
        log.warning("the sync process ended; a thread syncs for the next %g s: %s", self._wait(), problem)
        if flying is not None:
            self.thread.sync(*flying)

    def close(self) -> None:
        """End the sync process. The result of a sync in progress is not reported."""
        self._in_flight = None
        if self._restart_timer is not None:
            self._restart_timer.cancel()
            self._restart_timer = None
        self._end()

    def _end(self) -> None:
        if self._socket is not None:
            self.loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            try:
                process.wait(_EXIT_WAIT_S)
            except subprocess.TimeoutExpired:
                log.warning(
                    "the sync process (%d) is still waiting for the disk and will end afterwards", process.pid
                )
