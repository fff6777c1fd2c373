"""The servers' event loop: uvloop where it is installed, asyncio's own elsewhere."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

# The time, in seconds, after which a thread that waits for the interpreter's lock forces the event loop to
# release it (Python's default: 5 ms). It is short, because these threads mostly wait for disks, and a busy
# event loop should not delay them further.
SWITCH_INTERVAL_S = 0.0005


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop, uvloop's if it can be imported."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a coroutine as `asyncio.run` does, but on a loop of `new_event_loop`. Server processes use this."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(debug=debug, loop_factory=new_event_loop) as runner:
        return runner.run(main)


def stop_accepting(listener: asyncio.Server) -> None:
    """Close a listening server in two steps.

    If asyncio accepts a connection in the loop iteration in which its server is closed, it never closes that
    connection. So the server stops accepting in this call, and is closed in the next iteration.
    """
    loop = listener.get_loop()
    for listening in listener.sockets:
        with suppress(NotImplementedError):
            loop.remove_reader(listening)
    loop.call_soon(listener.close)


class Run(Protocol):
    """A function that runs a coroutine on the loop of another thread and returns its result."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


@contextmanager
def loop_in_thread(name: str, timeout_s: float = 30.0) -> Iterator[Run]:
    """Run a loop in a separate thread during a `with` block. Each call waits at most `timeout_s` seconds."""
    loop = new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=name, daemon=True)
    thread.start()

    def run_there(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(timeout_s)

    try:
        yield run_there
    finally:
        run_there(loop.shutdown_asyncgens())
        run_there(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout_s)
        loop.close()


class _EndOfInput(asyncio.Protocol):
    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._event.set()


async def end_of_input(event: asyncio.Event) -> None:
    """Set the event when the standard input ends, because the parent process has closed it or has ended."""
    await asyncio.get_running_loop().connect_read_pipe(lambda: _EndOfInput(event), sys.stdin)
