"""Stopping clients when the process is told to end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

from cometmq import logs
from cometmq.client.cluster.life_cycle import LifeCycle
from cometmq.errors import ClientStateError

__all__ = ["stop_on_signal"]

log = logs.logger("cometmq.client")


@asynccontextmanager
async def stop_on_signal(*clients: LifeCycle) -> AsyncIterator[None]:
    """SIGTERM and Ctrl-C stop these clients: listeners that run may end, their offsets are stored, the group
    is left, and nothing that was done comes again.

        async with PushConsumer("billing", on_messages, "orders") as consumer, stop_on_signal(consumer):
            await consumer.wait_stopped()

    A second signal does what it did before. Raises ClientStateError for a client that is not started, which
    no signal would stop, and outside the main thread, to which Python brings signals; at the end what the
    stop of a client raised, after all have stopped.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ClientStateError("stop_on_signal belongs into the main thread, to which Python brings signals")
    for client in clients:
        if client.state == "new":
            raise ClientStateError("stop_on_signal takes clients that are started, and one of these is new")
    loop = asyncio.get_running_loop()
    stops: list[asyncio.Task[None]] = []

    def stop() -> None:
        stops.extend(loop.create_task(client.stop()) for client in clients)

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        restore()
        loop.call_soon_threadsafe(stop)

    # signal.signal, since loops outside Unix have no add_signal_handler.
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    try:
        yield
    finally:
        restore()
        results = await asyncio.gather(*stops, return_exceptions=True)
        errors = [result for result in results if result is not None]
        for error in errors[1:]:
            log.error("a client did not stop as it should", exc_info=error)
        if errors:
            raise errors[0]
