"""Asynchronous sends of a blocking producer: the caller does not wait for their results."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from cometmq import logs
from cometmq.client.loop_thread import LoopThread
from cometmq.errors import ClientStateError, TooManySends

log = logs.logger("cometmq.client.producer")

R = TypeVar("R")

_CALLBACKS_END_S = 30.0
"""Maximum time, in seconds, that a stop waits for callbacks that are still running."""


class AsyncSends:
    """The asynchronous sends of one blocking producer, and the threads that call their callbacks.

    A send counts towards the maximum until its callback has returned, so that a slow callback limits the
    number of sends. The futures of these sends are kept in sets: a signal handler may raise an exception at
    any point of a call, so a future may be removed twice, and the second removal from a set has no effect.
    """

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        # A thread that cancels a future also runs the future's callbacks, so the lock must be reentrant.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._sends: set[Future[Any]] = set()
        self._callbacks: set[Future[Any]] = set()  # ended sends whose callback has not returned yet
        self._finished = False
        self._threads: ThreadPoolExecutor | None = None
        self._calling = threading.local()

    def begin(
        self,
        thread: LoopThread,
        send: Callable[[], Coroutine[Any, Any, R]],
        callback: Callable[[Future[R]], object] | None,
    ) -> Future[R]:
        """Begin a send on the loop. Wait first while the maximum number of sends is in progress.

        `callback` is called in a thread with the future, once it is done. Raises ClientStateError after
        `finish`, and on the loop, which the wait would block, TooManySends in a callback while twice the
        maximum of sends are in progress.
        """
        thread.check_caller()
        future: Future[R] = Future()
        future.add_done_callback(partial(self._ended, callback))
        try:
            self._take_slot(future)
            thread.submit(send(), future)
        # A signal handler may raise any exception at any point, so remove the send after every exception.
        except BaseException:
            with self._lock:
                self._sends.discard(future)
            future.cancel()
            raise
        return future

    def _take_slot(self, future: Future[Any]) -> None:
        """Wait until fewer than the maximum number of sends are in progress. Raises the errors of `begin`.

        A callback does not wait, because its own send is in progress until the callback returns. Instead, a
        callback may exceed the maximum, up to twice the maximum.
        """
        called_back = self._called_back
        limit = self._max_in_flight * (2 if called_back else 1)

        def may_go_on() -> bool:
            return self._finished or len(self._sends) + len(self._callbacks) < limit

        with self._lock:
            if called_back and not may_go_on():
                raise TooManySends(limit)
            self._changed.wait_for(may_go_on)
            if self._finished:
                raise ClientStateError(
                    "this producer is stopping or stopped and cannot be used again; create a new one"
                )
            self._sends.add(future)

    @property
    def _called_back(self) -> bool:
        """Return whether the current thread is running a callback of this producer."""
        return bool(getattr(self._calling, "here", False))

    def _ended(self, callback: Callable[[Future[R]], object] | None, future: Future[R]) -> None:
        with self._lock:
            if callback is not None and future in self._sends:
                self._callbacks.add(future)
                try:
                    if self._threads is None:
                        self._threads = ThreadPoolExecutor(os.cpu_count(), "cometmq-callback")
                    self._threads.submit(self._call, callback, future)
                # No thread can be started, for example because the interpreter is shutting down.
                except RuntimeError as error:
                    self._callbacks.discard(future)
                    log.error("the callback of an asynchronous send could not be called: %s", error)
            self._sends.discard(future)
            self._changed.notify_all()

    def _call(self, callback: Callable[[Future[R]], object], future: Future[R]) -> None:
        self._calling.here = True
        try:
            callback(future)
        # Log SystemExit, too: otherwise sys.exit() in a callback would have no visible effect.
        except BaseException as error:
            log.error("the callback of an asynchronous send failed", exc_info=error)
        finally:
            self._calling.here = False
            with self._lock:
                self._callbacks.discard(future)
                self._changed.notify_all()

    def finish(self) -> None:
        """Refuse further sends. Wait for those in progress and, outside of callbacks, for their callbacks."""
        with self._lock:
            self._finished = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._sends)
            if not self._called_back and not self._changed.wait_for(
                lambda: not self._callbacks, _CALLBACKS_END_S
            ):
                log.warning("%d callbacks of asynchronous sends are still running", len(self._callbacks))
            if self._threads is not None:
                self._threads.shutdown(wait=False)
