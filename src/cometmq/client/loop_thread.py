"""One event loop in a background thread, on which the blocking faces run their asyncio twins."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import threading
from collections import deque
from collections.abc import Coroutine
from typing import Any, ClassVar, Generic, TypeVar

from cometmq import logs
from cometmq.client.cluster.workers import cancel_all
from cometmq.errors import ClientStateError
from cometmq.remoting.loop import new_event_loop

__all__ = ["LoopThread"]

log = logs.logger("cometmq.client")

T = TypeVar("T")

_SIGNALS_S = 0.5
"""A signal that comes just before the main thread waits for a lock is not handled before that wait ends."""


class _Call(Generic[T]):
    """A coroutine that a thread waits for, in the thread's context.

    A lock passes the result on: asyncio.run_coroutine_threadsafe takes two futures and a condition for that.
    """

    __slots__ = ("_context", "_work", "task", "under_way")
    task: asyncio.Task[T]

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._context = contextvars.copy_context()
        self.under_way = threading.Lock()
        self.under_way.acquire()

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self.task = loop.create_task(self._work, context=self._context)
        self.task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Its caller is gone, perhaps before it was given to the loop."""
        if hasattr(self, "task"):
            self.task.cancel()
        else:
            self._work.close()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # seen: its caller may have given up
        self.under_way.release()


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
        self._new: deque[_Call[Any]] = deque()
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
        call = _Call(work)
        try:
            with self._calls:  # either it is begun before the loop is told to stop, or it is refused
                if self._ended:
                    work.close()
                    raise ClientStateError("this client was stopped: that is final, make a new one")
                self._new.append(call)
                if len(self._new) == 1:  # the loop takes all that have come by then
                    self.loop.call_soon_threadsafe(self._begin)
            if timeout_s is None:
                while not call.under_way.acquire(timeout=_SIGNALS_S):
                    pass
            elif not call.under_way.acquire(timeout=timeout_s):
                raise TimeoutError
        except BaseException:  # a handler of a signal may raise anything, anywhere
            with self._calls:
                if not self._ended:
                    self.loop.call_soon_threadsafe(self._give_up, call)
            raise
        try:
            return call.task.result()
        except asyncio.CancelledError:
            if not self._ended:
                raise concurrent.futures.CancelledError from None
            raise ClientStateError("this client was stopped while a call of it was under way") from None
        finally:
            del call, work  # an error holds this frame, and its task the error: gone at once, without the gc

    def _begin(self) -> None:
        while self._new:
            self._new.popleft().begin(self.loop)

    def _give_up(self, call: _Call[Any]) -> None:
        self._begin()  # the caller may have been interrupted before it asked for that, and others rely on it
        call.cancel()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ended:
            try:
                self.loop.run_forever()
            except BaseException as error:
                # A sys.exit() of some listener or hook: it ended its task, and the others need the loop.
                log.error("%r on the loop of the blocking clients ends nothing but its task", error)
        self.loop.run_until_complete(cancel_all(asyncio.all_tasks(self.loop), "the blocking clients"))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
