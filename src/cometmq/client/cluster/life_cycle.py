"""The life cycle of client instances, producers, consumers and Admin."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future
from contextvars import Context

from cometmq.errors import ClientStateError
from cometmq.periodic import Running


class LifeCycle(Running):
    """An object with the states `new`, `starting`, `running`, `stopping` and `stopped`. A stop is final.

    A start that fails or is cancelled stops what it has begun. Subclasses implement `_begin` and `_end`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = "new"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Lock()  # held during a start or stop, so that only one of them runs
        self._stopped = asyncio.Event()
        self._pid = os.getpid()

    @property
    def state(self) -> str:
        """The state: `new`, `starting`, `running`, `stopping` or `stopped`. A stop is final."""
        return self._state

    async def start(self) -> None:
        """Start the client.

        Raises:
            ClientStateError: The client was started before.
        """
        if self._state != "new":
            way = "" if self._state in ("starting", "running") else "; create a new one"
            raise ClientStateError(f"{self._name} is {self._state} and cannot be started again{way}")
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._state = "starting"
        async with self._turn:
            try:
                await self._begin()
            except BaseException:
                try:
                    await self._end(drain=False)
                finally:
                    self._has_stopped()
                raise
            self._state = "running"

    async def stop(self) -> None:
        """Stop the client. If a start or another stop is in progress, wait for its end first.

        Does nothing before the start.
        """
        if self._state in ("new", "stopped"):
            return
        self._check_loop()
        async with self._turn:
            if self._state == "running":
                self._state = "stopping"
                try:
                    await self._end(drain=True)
                finally:
                    self._has_stopped()

    def stop_soon(self) -> Future[None]:
        """Begin a stop from any thread or from a signal handler, without waiting for it.

        Returns:
            A future that is done when the client is stopped. It holds the exception if the stop raised one.
        """
        if self._loop is None or self._state == "stopped":
            done: Future[None] = Future()
            done.set_result(None)
            return done
        # Run the stop in a new context. A signal handler may call this method while a listener runs, and with
        # the context variables of that listener call, the stop would be mistaken for one by the listener.
        return Context().run(asyncio.run_coroutine_threadsafe, self.stop(), self._loop)

    def _has_stopped(self) -> None:
        self._state = "stopped"
        self._stopped.set()

    async def wait_stopped(self) -> None:
        """Wait until the client is stopped, whichever task, thread or signal handler stops it.

        Raises:
            ClientStateError: The client was not started.
        """
        if self._state == "new":
            raise self._not_running()
        self._check_loop()
        await self._stopped.wait()

    async def _begin(self) -> None:
        raise NotImplementedError

    async def _end(self, *, drain: bool) -> None:
        """Release all resources. With `drain` (not after a failed start), wait for the work in progress."""
        raise NotImplementedError

    def _check_running(self) -> None:
        """Raise ClientStateError with a hint unless the client is running in the event loop of the caller."""
        if self._state != "running":
            raise self._not_running()
        self._check_loop()

    def _not_running(self) -> ClientStateError:
        return not_running(self._name, self._state)

    def _check_loop(self) -> None:
        if self._pid != os.getpid():
            raise ClientStateError(
                f"{self._name} was started before a fork; create a new one in the child process"
            )
        loop = self._loop
        try:
            if loop is asyncio.get_running_loop():
                return
        except RuntimeError:
            pass  # no event loop runs in this thread
        over = ", which is closed" if loop is not None and loop.is_closed() else ""
        raise ClientStateError(
            f"{self._name} was started in another event loop{over}: start and use it within one "
            "asyncio.run(), or use the blocking classes"
        )


def not_running(name: str, state: str) -> ClientStateError:
    """Return the error for a client that is not running, with a hint that depends on its state."""
    way = {
        "new": "start() it, or use it in `async with` (the blocking classes in `with`)",
        "starting": "wait for its start()",
    }.get(state, "this is final, create a new one")
    return ClientStateError(f"{name} is {state}: {way}")
