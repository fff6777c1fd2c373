"""Options and helpers that client commands share."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cometmq.number_range import FiniteRange
from cometmq.text import is_utf8

if TYPE_CHECKING:
    from cometmq.admin import Admin

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
COUNT = click.IntRange(min=1)
UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
HELP = {"help_option_names": ["-h", "--help"], "show_default": True}


def _into_environment(name: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    """Return a callback that sets an environment variable for clients while the command runs."""

    def put(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
        before = os.environ.get(name)
        if value is None or value == before:
            return
        os.environ[name] = value

        def restore() -> None:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before

        ctx.call_on_close(restore)

    return put


def _access(flag: str, env: str, metavar: str, text: str) -> Callable[[F], F]:
    return click.option(
        flag, metavar=metavar, expose_value=False, callback=_into_environment(env), help=f"{text} Else {env}."
    )


ACCESS = (
    _access("--access-key", "COMETMQ_ACCESS_KEY", "NAME", "Account that signs the requests."),
    _access(
        "--secret-key",
        "COMETMQ_SECRET_KEY",
        "SECRET",
        "Secret of the account; visible to other users in `ps`.",
    ),
    _access("--tls", "COMETMQ_TLS", "FILE", "TLS: RocketMQ's settings file, or `true`."),
)


def namesrv_option(command: F) -> F:
    """Add `-n/--namesrv`, and the options for TLS and accounts (`ACCESS`)."""
    for option in reversed(ACCESS):
        command = option(command)
    return click.option(
        "-n",
        "--namesrv",
        metavar="LIST",
        envvar="NAMESRV_ADDR",
        default="127.0.0.1:9876",
        show_default="NAMESRV_ADDR, else 127.0.0.1:9876",
        help="Name servers, separated by ';'.",
    )(command)


def with_admin(namesrv: str, work: Callable[[Admin], Awaitable[T]]) -> T:
    """Run `work` with an Admin for these name servers and return its result. The Admin is always closed."""
    from cometmq.admin import Admin

    async def run() -> T:
        async with Admin(namesrv) as admin:
            return await work(admin)

    return asyncio.run(run())


def raw_option(command: F) -> F:
    """Add `--raw`: print message text with its control characters."""
    return click.option(
        "--raw", is_flag=True, help="Print names and bodies unchanged instead of escaping control characters."
    )(command)


LISTENING = (
    click.option("-t", "--tags", default="*", metavar="EXPR", help="Only these tags: 'A || B'."),
    click.option("-c", "--count", type=COUNT, metavar="N", help="Stop after N messages."),
    click.option(
        "--timeout",
        "idle_s",
        type=FiniteRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Stop after this time without a message.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print each message as a line of JSON."),
    raw_option,
)


def listening_options(command: F) -> F:
    """Add the options for the selection, number and format of messages."""
    for option in reversed(LISTENING):
        command = option(command)
    return command


def moment(text: str, or_else: str = "") -> int:
    """Parse a time, and return it in ms since 1970. Raises click.BadParameter.

    The text is a duration before now (`10m`), a number of ms since 1970, or a local date. `or_else` lists
    other accepted values for the error text.
    """
    from cometmq.admin.commands.formats import parse_time

    if ago := re.fullmatch(r"([0-9]{1,9})([smhd])", text):
        return max(int(time.time() * 1000) - int(ago[1]) * UNIT_MS[ago[2]], 0)
    try:
        return parse_time(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a valid time. Valid forms: {or_else}10m (s, m, h, d ago), ms since "
            "1970, yyyy-MM-dd#HH:mm:ss:SSS"
        ) from None


def check_utf8(*words: str | None) -> None:
    """Raise UsageError for an argument that is not UTF-8, because some of its bytes would not be sent."""
    for word in words:
        if word is not None and not is_utf8(word):
            raise click.UsageError(f"{word!r} is not UTF-8 text")


class Stop(asyncio.Event):
    """An event that tells a command to stop, and the signal that set it."""

    signum = 0


def stop_on_signals() -> Stop:
    """Return an event that SIGINT and SIGTERM set, so that a command can finish its current work.

    A second signal of the same kind has its default effect.
    """
    loop = asyncio.get_running_loop()
    stop_event = Stop()

    def ask(signum: signal.Signals) -> None:
        stop_event.signum = stop_event.signum or int(signum)
        stop_event.set()
        loop.remove_signal_handler(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, ask, signum)
    return stop_event
