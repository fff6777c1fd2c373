"""One event loop in a background thread, on which the blocking clients run their asyncio classes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Generic, TypeVar

from cometmq import logs
from cometmq.client.cluster.workers import cancel_all
from cometmq.errors import ClientStateError
from cometmq.periodic import Tasks
from cometmq.remoting.loop import new_event_loop

log = logs.logger("cometmq.client")

T = TypeVar("T")

_SIGNALS_S = 0.5
"""Seconds after which a waiting thread wakes up: Python does not interrupt its wait for a signal."""


class _Call(Generic[T]):
    """A coroutine for whose result a thread waits. The coroutine runs in the thread's context (contextvars).

    A lock signals the result. This costs less than asyncio.run_coroutine_threadsafe, which uses two futures
    and a condition.
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
        """Cancel the coroutine, even if the loop has not started it yet."""
        if hasattr(self, "task"):
            self.task.cancel()
        else:
            self._work.close()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved, because the caller may have stopped waiting
        self.under_way.release()


class _SubmittedCall(_Call[T]):
    """A coroutine that runs on the loop. Its result or error is stored in a `concurrent.futures.Future`."""

    __slots__ = ("future",)

    def __init__(self, work: Coroutine[Any, Any, T], future: concurrent.futures.Future[T]) -> None:
        super().__init__(work)
        self.future = future

    def _ended(self, task: asyncio.Task[T]) -> None:
        future = self.future
        del self.future  # breaks a reference cycle: the future refers to this call, see LoopThread.submit
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(error)


class LoopThread:
    """The thread that all blocking clients of a process share. It ends with the last of them.

    A forked child must create its own clients: the parent's thread does not exist in the child, and using its
    clients raises ClientStateError.
    """

    _shared: LoopThread | None = None
    _guards: ClassVar[dict[int, threading.Lock]] = {}
    """The lock of `_shared` by process id: the parent's may stay locked forever in a forked child."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users = 0
        self._calls = threading.Lock()  # not acquired in a forked child, where it may stay locked forever
        self._new: deque[_Call[Any]] = deque()
        self._ended = False
        self._abandoned = Tasks()
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
        """Release the thread. The thread stops when its last user has released it."""
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

    def abandon(self, stop: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Stop a client whose blocking object was garbage-collected, by `stop`, and release the thread.

        This method takes no lock and does not wait, because the garbage collector may call it at any point of
        the program. Return False if the thread has ended or belongs to the parent process.
        """

        async def stop_and_release() -> None:
            try:
                await stop()
            finally:
                self.release()

        if self.pid != os.getpid() or self._ended:
            return False
        try:
            self.loop.call_soon_threadsafe(lambda: self._abandoned.start(stop_and_release()))
        except RuntimeError:  # the event loop was closed after the check above
            return False
        return True

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result. An interrupt (Ctrl-C) cancels it."""
        call = _Call(work)
        try:
            self._enqueue(call)
            if timeout_s is None:
                while not call.under_way.acquire(timeout=_SIGNALS_S):
                    pass
            elif not call.under_way.acquire(timeout=timeout_s):
                raise TimeoutError
        except BaseException:  # a signal handler may raise any exception at any point
            self._cancel(call)
            raise
        try:
            return call.task.result()
        except asyncio.CancelledError:
            if not self._ended:
                raise concurrent.futures.CancelledError from None
            raise ClientStateError("this client was stopped during the call") from None
        finally:
            del call, work  # breaks the cycle of error, frame and task without the garbage collector

    def submit(self, work: Coroutine[Any, Any, T], future: concurrent.futures.Future[T]) -> None:
        """Run a coroutine on the loop and store its result in a future, whose cancellation cancels it.

        As the caller creates the future, it can cancel the call even if a signal handler raises within this
        method.
        """
        call = _SubmittedCall(work, future)
        future.add_done_callback(lambda future: self._cancel(call) if future.cancelled() else None)
        self._enqueue(call)

    def check_caller(self) -> None:
        """Raise ClientStateError if a call would wait forever: on the loop itself, or after a fork."""
        if self.pid != os.getpid():
            raise ClientStateError(
                "this client was created before a fork; create a new one in the child process"
            )
        if threading.current_thread() is self._thread:
            raise ClientStateError(
                "a blocking client was called in its own event loop; use the asyncio class there"
            )

    def _enqueue(self, call: _Call[Any]) -> None:
        try:
            self.check_caller()
            with self._calls:  # a call either begins before the loop stops or is refused
                if self._ended:
                    raise ClientStateError(
                        "this client is stopped and cannot be used again; create a new one"
                    )
                self._new.append(call)
                if len(self._new) == 1:  # otherwise `_begin` is already scheduled
                    self.loop.call_soon_threadsafe(self._begin)
        except ClientStateError:
            call.cancel()
            raise

    def _cancel(self, call: _Call[Any]) -> None:
        if self.pid != os.getpid():
            return
        with self._calls:
            if not self._ended:
                self.loop.call_soon_threadsafe(self._give_up, call)

    def _begin(self) -> None:
        while self._new:
            self._new.popleft().begin(self.loop)

    def _give_up(self, call: _Call[Any]) -> None:
        self._begin()  # `_enqueue` may have been interrupted before it scheduled `_begin`
        call.cancel()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ended:
            try:
                self.loop.run_forever()
            except BaseException as error:
                # A listener or hook called sys.exit(). This ends only its own task, because other clients
                # need the loop.
                log.error(
                    "%r in the event loop of the blocking clients ends only the task that raised it", error
                )
        self.loop.run_until_complete(cancel_all(asyncio.all_tasks(self.loop), "the blocking clients"))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
