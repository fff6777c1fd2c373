"""One event loop in a background thread, on which the blocking faces run their asyncio twins."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from cometmq.errors import ClientStateError
from cometmq.remoting.loop import new_event_loop

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """Shared by all blocking clients of a process; lives while at least one of them does.

    A forked child must make its own clients: the thread does not exist there, and using it raises
    ClientStateError.
    """

    _shared: LoopThread | None = None
    _guards: ClassVar[dict[int, threading.Lock]] = {}
    """Process id -> what guards `_shared` there: a fork may leave that of the parent locked in the child."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users = 0
        self._calls = threading.Lock()  # of this thread alone: a fork may leave it locked in the child
        self._ended = False
        self.loop = new_event_loop()
        started = threading.Event()
        self.loop.call_soon(started.set)
        self._thread = threading.Thread(target=self._serve, name="cometmq-loop", daemon=True)
        self._thread.start()
        started.wait()

    @classmethod
    def _guard(cls) -> threading.Lock:
        return cls._guards.setdefault(os.getpid(), threading.Lock())

    @classmethod
    def acquire(cls) -> LoopThread:
        with cls._guard():
            if cls._shared is None or cls._shared.pid != os.getpid():
                cls._shared = cls()
            cls._shared.users += 1
            return cls._shared

    def release(self) -> None:
        """The last user's release stops the thread."""
        with LoopThread._guard():
            self.users -= 1
            if self.users > 0 or self.pid != os.getpid():
                return
            if LoopThread._shared is self:
                LoopThread._shared = None
        with self._calls:
            self._ended = True
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for it; an interrupt (Ctrl-C) of the wait cancels it."""
        if self.pid != os.getpid():
            work.close()
            raise ClientStateError("this client was made before a fork; make a new one in the child process")
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientStateError(
                "a blocking client was called on its own loop; use the asyncio class there"
            )
        with self._calls:  # either it is begun before the loop is told to stop, or it is refused
            if self._ended:
                work.close()
                raise ClientStateError("this client was stopped: that is final, make a new one")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except (KeyboardInterrupt, SystemExit, concurrent.futures.TimeoutError):
            future.cancel()
            raise
        except concurrent.futures.CancelledError:
            if not self._ended:
                raise
            raise ClientStateError("this client was stopped while a call of it was under way") from None

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
