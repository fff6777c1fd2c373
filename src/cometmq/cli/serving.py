"""Runs a server in the foreground: start, print the ready line, wait for a signal, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import click

from cometmq import logs, remoting
from cometmq.cli.running import RunFile
from cometmq.command_options import F, opt

# By default, numpy starts a thread per core for linear algebra (OpenBLAS), which no server uses.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

GC_THRESHOLD = 700  # the garbage-collection threshold of running servers, equal to Python's default
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Server(Protocol):
    """Interface of the servers that `serve` runs: NameServer, Broker, Standalone cluster."""

    async def start(self) -> Any: ...

    async def stop(self) -> None: ...


S = TypeVar("S", bound=Server)


def log_format_option(command: F) -> F:
    """Add `--log-format`, the log format of this process and its child processes, and set up logging."""

    def use(_context: click.Context, _parameter: click.Parameter, form: str | None) -> None:
        if form is not None:
            os.environ[logs.FORMAT] = form
        logs.set_up()

    return opt(
        "--log-format",
        type=click.Choice(logs.FORMATS),
        show_default=f"{logs.FORMAT}, else text",
        callback=use,
        expose_value=False,
        help="Format of log lines on standard error: text, or a JSON object per line.",
    )(command)


def serve(kind: str, make: Callable[[], S], announce: Callable[[S], str]) -> None:
    """Run a server until SIGINT, SIGTERM or SIGHUP. A second signal ends the process immediately.

    Args:
        kind: Kind under which the process is registered for `mqshutdown`.
        make: Creates the server, inside the loop.
        announce: Returns the ready line, which is printed once the ports listen.
    """
    remoting.run(_serve(kind, make, announce))


async def _serve(kind: str, make: Callable[[], S], announce: Callable[[S], str]) -> None:
    loop = asyncio.get_running_loop()
    stop_requested = asyncio.Event()

    def ask(signum: int) -> None:
        if stop_requested.is_set():
            os._exit(128 + signum)
        stop_requested.set()

    for signum in STOP_SIGNALS:
        if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
            continue  # under nohup the server keeps running when its terminal is closed
        loop.add_signal_handler(signum, ask, signum)
    server = make()
    starting = asyncio.ensure_future(server.start())
    stopping = asyncio.ensure_future(stop_requested.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            # The signal arrived before the ready line, for example during a long recovery, so the start is
            # cancelled.
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            return
        await starting
        # The objects of the start live as long as the server, so no later collection needs to traverse them.
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        with RunFile(kind):
            click.echo(announce(server))
            sys.stdout.flush()
            await stopping
    finally:
        stopping.cancel()
        await server.stop()
