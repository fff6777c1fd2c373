"""Options and helpers that the client commands share."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
HELP = {"help_option_names": ["-h", "--help"]}


def namesrv_option(command: F) -> F:
    """`-n/--namesrv`: where the routes come from."""
    return click.option(
        "-n",
        "--namesrv",
        metavar="LIST",
        envvar="NAMESRV_ADDR",
        default="127.0.0.1:9876",
        show_default="NAMESRV_ADDR, else 127.0.0.1:9876",
        help="Name servers, separated by ';'.",
    )(command)


def stop_on_signals() -> asyncio.Event:
    """An event of the running loop that SIGINT and SIGTERM set, so that a command can finish what it holds.

    A second signal of the kind has its default effect.
    """
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def ask(signum: signal.Signals) -> None:
        asked.set()
        loop.remove_signal_handler(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, ask, signum)
    return asked
