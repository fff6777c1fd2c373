"""The event loop the servers run on (uvloop where it is installed, asyncio's own elsewhere), and how a child
process learns on it that its parent is gone."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

# How long a thread waits before it asks the loop to let go of the interpreter, in seconds (Python's own:
# 5 ms). Threads here do little but wait for the device; they should not wait for a busy loop as well, before
# and after that.
SWITCH_INTERVAL_S = 0.0005


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A fresh loop: uvloop's if it can be imported."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """`asyncio.run` on such a loop, for a process that is a server and nothing else."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(debug=debug, loop_factory=new_event_loop) as runner:
        return runner.run(main)


def stop_accepting(listener: asyncio.Server) -> None:
    """Close a server that listens. asyncio leaves open for ever what is accepted in the turn of that, so it
    accepts nothing more at once, and is closed with the next turn."""
    loop = listener.get_loop()
    for listening in listener.sockets:
        with suppress(NotImplementedError):
            loop.remove_reader(listening)
    loop.call_soon(listener.close)


class Run(Protocol):
    """Runs a coroutine on a loop of another thread and waits for its result."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


@contextmanager
def loop_in_thread(name: str, timeout_s: float = 30.0) -> Iterator[Run]:
    """A loop in a thread of its own while the block runs. Each wait for it ends after `timeout_s`."""
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
    """Have the event set when the standard input ends: the parent has closed its end, or lives no more."""
    await asyncio.get_running_loop().connect_read_pipe(lambda: _EndOfInput(event), sys.stdin)
