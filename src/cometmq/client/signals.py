"""Stopping clients when the process is told to end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType

from cometmq.client.cluster.life_cycle import LifeCycle
from cometmq.errors import ClientStateError

__all__ = ["stop_on_signal"]


@asynccontextmanager
async def stop_on_signal(*clients: LifeCycle) -> AsyncIterator[None]:
    """SIGTERM and Ctrl-C stop these clients: listeners that run may end, their offsets are stored, the group
    is left, and nothing that was done comes again.

        async with PushConsumer("billing", on_messages, "orders") as consumer, stop_on_signal(consumer):
            await consumer.wait_stopped()

    A second signal does what it did before. Raises ClientStateError outside the main thread, to which Python
    brings signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ClientStateError("stop_on_signal belongs into the main thread, to which Python brings signals")
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
        await asyncio.gather(*stops)
