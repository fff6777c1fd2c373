"""The base class of the blocking clients: an asyncio client on the loop of a background thread."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, ParamSpec, Self, TypeVar

from cometmq.client.cluster.life_cycle import not_running
from cometmq.client.cluster.lookups import QueryClient
from cometmq.client.group.health import ConsumerHealth
from cometmq.client.loop_thread import LoopThread
from cometmq.errors import ClientStateError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=QueryClient)


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """Return the blocking form of a coroutine method of the asyncio class."""

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        face: BlockingClient[Any] = self
        return face._run(method(face._twin, *args, **kwargs))  # noqa: SLF001 - it is a method of the face

    functools.update_wrapper(call, method)
    return call


def on_loop(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return the blocking form of a plain method that may only be called on the loop."""

    async def awaited(twin: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(twin, *args, **kwargs)

    functools.update_wrapper(awaited, method)
    return blocking(awaited)


def blocking_health(method: Callable[[Any], ConsumerHealth]) -> Callable[[Any], ConsumerHealth]:
    """Return the blocking form of health(), which can also be called before the start and after the stop."""
    health_on_loop = on_loop(method)

    def health(self: Any, /) -> ConsumerHealth:
        face: BlockingClient[Any] = self
        if face._thread is None:  # noqa: SLF001 - it is a method of the face
            return ConsumerHealth(state=face.state, group=face._twin.group)  # noqa: SLF001
        return health_on_loop(self)

    functools.update_wrapper(health, method)
    return health


class BlockingProperty(property, Generic[R]):
    """The blocking form of a property of the asyncio class."""

    def __init__(self, source: Any) -> None:
        super().__init__(on_loop(source.fget))
        self.__doc__ = source.__doc__

    if TYPE_CHECKING:

        def __get__(self, face: Any, owner: type | None = None, /) -> R: ...  # type: ignore[override]

        def __set__(self, face: Any, value: Never, /) -> None: ...  # declares the property as read-only


class BlockingClient(Generic[C]):
    """The base class of the blocking clients: start and stop on the background loop, and `with`."""

    _has_listener = False

    def __init__(self, twin: C) -> None:
        self._twin: C = twin
        self._name = f"{type(self).__name__} of group {twin.group}"
        self._thread: LoopThread | None = None
        self._stop_ended = threading.Event()
        """An event that is set when stop() has ended."""
        self._stop_for_listener: asyncio.Task[None] | None = None  # keeps a reference to the running task

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the client on the event loop of the background thread.

        Raises:
            ClientStateError: The client was started before.
            CometError: The start failed, as the start() of the asyncio class describes.
        """
        if self._thread is not None:
            raise ClientStateError(f"{self._name} is already started")
        thread = self._thread = LoopThread.acquire()  # from now on a listener may use the client and stop it
        try:
            thread.run(self._twin.start())
        except BaseException:
            mine, self._thread = self._thread, None
            if mine is not None:  # if a concurrent stop() has taken the thread, that stop releases it
                mine.release()
            raise

    def stop(self) -> None:
        """Stop the client and wait until it has stopped.

        The stop of a process's last client also ends the background thread. Does nothing before the start.

        Raises:
            ClientStateError: The call comes from the client's own loop or after a fork. The client keeps
                running.
        """
        if self._twin.state == "new":
            return
        if self._thread is not None:
            # Refuse a call on the event loop: stop() would block the loop, and no send could end.
            self._thread.check_caller()
        # Read and clear the attribute in one step, because another thread may call stop() at the same time.
        thread, self._thread = self._thread, None
        if thread is None:
            return
        asked_by_listener = False

        async def stop() -> None:
            nonlocal asked_by_listener
            await self._twin.stop()
            if self._twin.state != "stopped":
                asked_by_listener = True
                self._stop_for_listener = asyncio.create_task(self._release_later(thread))

        try:
            self._finish_calls()
            thread.run(stop())
        finally:
            if not asked_by_listener:
                thread.release()
                self._stop_ended.set()

    def _finish_calls(self) -> None:
        """Wait for the end of the asynchronous sends that callers of this client have started."""

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        """Warn about a client that was dropped without `stop()`. Stop it unless it has a listener to call."""
        thread: LoopThread | None = getattr(self, "_thread", None)  # missing if __init__ has failed
        if thread is None:
            return
        asked = self.state in ("stopping", "stopped")
        if self._has_listener and not asked:
            if thread.pid == os.getpid():
                text = f"{self._name} was dropped without stop(), and keeps calling its listener"
                warn(text, ResourceWarning, source=self)
        elif thread.abandon(self._twin.stop) and not asked:
            warn(f"{self._name} was dropped without stop()", ResourceWarning, source=self)

    async def _release_later(self, thread: LoopThread) -> None:
        """Release the thread once the client has stopped, after the listener that called stop() returned."""
        try:
            await self._twin.wait_stopped()
        finally:
            thread.release()
            self._stop_ended.set()

    def stop_soon(self) -> Future[None]:
        """Begin a stop from any thread or from a signal handler, without waiting for it.

        Returns:
            A future that is done when the client is stopped. It holds the exception if the stop raised one.
        """
        return self._twin.stop_soon()

    def wait_stopped(self) -> None:
        """Wait until the client is stopped, whichever task, thread or signal handler stops it.

        Raises:
            ClientStateError: The client was not started.
        """
        if self._thread is None and self.state in ("running", "stopping"):
            # Another thread or a listener is stopping the client. It sets this event when the stop has ended.
            self._stop_ended.wait()
        elif self.state != "stopped":
            self._run(self._twin.wait_stopped())

    @property
    def state(self) -> str:
        """The state: `new`, `starting`, `running`, `stopping` or `stopped`. A stop is final."""
        return self._twin.state

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        try:
            thread = self._running_thread()
        except ClientStateError:
            work.close()
            raise
        return thread.run(work)

    def _running_thread(self) -> LoopThread:
        """Return the background thread. Raises ClientStateError if the client is not running."""
        thread = self._thread
        if thread is None:
            state = self._twin.state
            raise not_running(self._name, "stopping" if state == "running" else state)
        return thread

    view_message = blocking(QueryClient.view_message)
    query_messages = blocking(QueryClient.query_messages)
    min_offset = blocking(QueryClient.min_offset)
    max_offset = blocking(QueryClient.max_offset)
    offset_by_time = blocking(QueryClient.offset_by_time)
    earliest_store_time = blocking(QueryClient.earliest_store_time)
    create_topic = blocking(QueryClient.create_topic)
