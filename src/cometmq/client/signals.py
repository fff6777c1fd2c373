"""Stop clients when the process receives a termination signal."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from types import FrameType
from typing import Any, Protocol

from cometmq import logs
from cometmq.client.cluster.life_cycle import LifeCycle
from cometmq.errors import ClientStateError

log = logs.logger("cometmq.client")


class _Stopping(Protocol):
    """A client, asyncio or blocking, that can be stopped."""

    @property
    def state(self) -> str: ...

    def stop_soon(self) -> Future[None]: ...


class stop_on_signal:  # noqa: N801 (reads as a verb in a `with`)
    """A context manager that stops clients on SIGTERM and Ctrl-C.

    Running listeners may finish, their offsets are stored, and the clients leave their groups, so that no
    consumed message is delivered again.

            async with PushConsumer("billing", on_messages, "orders") as consumer, stop_on_signal(consumer):
                await consumer.wait_stopped()

            with SyncPushConsumer("billing", on_messages, "orders") as consumer, stop_on_signal(consumer):
                consumer.wait_stopped()

    A second signal has the effect that signals had outside this context manager.

    Args:
        clients: Started clients, asyncio or blocking ones.

    Raises:
        ClientStateError: On entry, a client is not started, or the caller is not the main thread, to which
            Python delivers signals.
        Exception: On exit, the exception of the first stop that failed, after all clients have stopped.
    """

    def __init__(self, *clients: _Stopping) -> None:
        self._clients = clients
        self._stops: list[Future[None]] = []
        self._before: dict[signal.Signals, Any] = {}

    async def __aenter__(self) -> None:
        self._begin()

    async def __aexit__(self, *raised: object) -> None:
        self._restore()
        stops = map(asyncio.wrap_future, self._stops)
        _raise_first(await asyncio.gather(*stops, return_exceptions=True))

    def __enter__(self) -> None:
        if any(isinstance(client, LifeCycle) for client in self._clients):
            raise ClientStateError("the asyncio classes need `async with stop_on_signal(...)`")
        self._begin()

    def __exit__(self, *raised: object) -> None:
        self._restore()
        _raise_first([stop.exception() for stop in self._stops])

    def _begin(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ClientStateError(
                "stop_on_signal must be used in the main thread, to which Python delivers signals"
            )
        if any(client.state == "new" for client in self._clients):
            raise ClientStateError("stop_on_signal requires started clients, but one is not started")
        # Event loops outside Unix have no add_signal_handler, so this uses signal.signal.
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._restore()
        self._stops += [client.stop_soon() for client in self._clients]

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _raise_first(results: Iterable[BaseException | None]) -> None:
    errors = [result for result in results if result is not None]
    for error in errors[1:]:
        log.error("stopping a client failed", exc_info=error)
    if errors:
        raise errors[0]
