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

__all__ = ["AsyncSends"]

log = logs.logger("cometmq.client.producer")

R = TypeVar("R")

_CALLBACKS_END_S = 30.0
"""The timeout of a stop for callbacks that are still running, in seconds."""


class AsyncSends:
    """The asynchronous sends of one blocking producer, and the threads that call their callbacks."""

    def __init__(self, max_under_way: int) -> None:
        self._max_under_way = max_under_way
        self._changed = threading.Condition(threading.RLock())  # a cancelled future calls back in its caller
        self._under_way = 0
        self._callbacks_left = 0
        self._threads: ThreadPoolExecutor | None = None
        self._calling = threading.local()

    def begin(
        self,
        thread: LoopThread,
        send: Callable[[], Coroutine[Any, Any, R]],
        callback: Callable[[Future[R]], object] | None,
    ) -> Future[R]:
        """Begin a send on the loop as soon as fewer than the maximum are in progress.

        Args:
            thread: The loop thread of the producer.
            send: Creates the coroutine of the send.
            callback: Called in a thread with the future, once the future is done.
        """
        thread.check_caller()
        with self._changed:
            self._changed.wait_for(lambda: self._under_way < self._max_under_way)
            self._under_way += 1
        try:
            future = thread.submit(send())
        except BaseException:
            self._ended(None)
            raise
        if callback is not None:
            future.add_done_callback(partial(self._submit_callback, callback))
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _future: object) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _submit_callback(self, callback: Callable[[Future[R]], object], future: Future[R]) -> None:
        with self._changed:
            self._callbacks_left += 1
            if self._threads is None:
                self._threads = ThreadPoolExecutor(os.cpu_count(), "cometmq-callback")
            self._threads.submit(self._call, callback, future)

    def _call(self, callback: Callable[[Future[R]], object], future: Future[R]) -> None:
        self._calling.here = True
        try:
            callback(future)
        except BaseException as error:  # a sys.exit() in a callback would end only its thread
            log.error("the callback of an asynchronous send failed", exc_info=error)
        finally:
            self._calling.here = False
            with self._changed:
                self._callbacks_left -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Wait for all sends and their callbacks.

        A callback that calls this method waits for the sends only.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
            if not getattr(self._calling, "here", False) and not self._changed.wait_for(
                lambda: not self._callbacks_left, _CALLBACKS_END_S
            ):
                log.warning("%d callbacks of asynchronous sends are still running", self._callbacks_left)
            if self._threads is not None:
                self._threads.shutdown(wait=False)
