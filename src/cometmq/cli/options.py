"""Options and helpers that commands share: name servers, accounts, times, signals, progress bars."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cometmq.command_options import F, FiniteRange, namesrv, opt, set_environment, stacked, watch_interval_s
from cometmq.text import in_color, is_utf8, printable, printable_json

if TYPE_CHECKING:
    pass

T = TypeVar("T")
COUNT = click.IntRange(min=1)
PORT = click.IntRange(0, 65535)
UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
HELP = {"help_option_names": ["-h", "--help"], "show_default": True}


def _into_environment(name: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    """Return a callback that sets an environment variable for clients while the command runs."""

    def put(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
        if value is not None:
            set_environment(ctx, name, value)

    return put


def _access(flag: str, env: str, metavar: str, text: str) -> Callable[[F], F]:
    return click.option(
        flag,
        metavar=metavar,
        expose_value=False,
        is_eager=True,
        callback=_into_environment(env),
        help=f"{text} Else {env}.",
    )


namesrv_option = stacked(
    namesrv("-n --namesrv"),
    _access("--access-key", "COMETMQ_ACCESS_KEY", "NAME", "Account that signs the requests."),
    _access(
        "--secret-key",
        "COMETMQ_SECRET_KEY",
        "SECRET",
        "Secret of the account; visible to other users in `ps`.",
    ),
    _access("--tls", "COMETMQ_TLS", "FILE", "TLS: RocketMQ's settings file, or `true`."),
)
"""Adds `-n/--namesrv`, and the options for TLS and accounts."""


def with_admin(work: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Return a function that runs `work` with an Admin for the name servers of `--namesrv`."""

    @functools.wraps(work)
    def command(namesrv: str, **options: Any) -> None:
        from cometmq.admin import Admin
        from cometmq.admin.commands.shell import show_error, wants_json
        from cometmq.admin.commands.watching import repeated

        async def run() -> None:
            async with Admin(namesrv) as admin:
                turn = functools.partial(work, admin, **options)
                as_json = options.get("as_json") or wants_json()
                await repeated(turn, watch_interval_s(), show_error, as_json=as_json)

        asyncio.run(run())

    return command


def facts_line(*facts: str, **named: object) -> str:
    """Return facts as one line, those with a name as `name=value`. Named ones that are empty are left out."""
    return " ".join([*facts, *(f"{name}={value}" for name, value in named.items() if value)])


def json_line(value: object) -> bytes:
    """Return a value as one line of JSON, without control characters and without the line's end."""
    import msgspec

    return printable_json(msgspec.json.encode(value))


listening_options = stacked(
    opt("-t --tags", default="*", metavar="EXPR", help="Only these tags: 'A || B'."),
    opt("-c --count", type=COUNT, metavar="N", help="Stop after N messages."),
    opt(
        "--timeout idle_s",
        type=FiniteRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Stop after this time without a message.",
    ),
    opt("--json as_json", is_flag=True, help="Print each message as a line of JSON."),
    opt(
        "--raw", is_flag=True, help="Print names and bodies unchanged instead of escaping control characters."
    ),
)
"""Adds the options for the selection, number and format of messages."""


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


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show a progress bar, and yield a function that updates it.

    The function receives the number of processed items and the total, or None if the total is unknown. The
    bar also shows the items per second and the elapsed time.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed
    from rich.text import Text

    class Rate(ProgressColumn):
        """A column of the progress bar: items per second, shown from the first item on."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:,.0f}/s" if speed else "", style="dim")

    shown = sys.stderr.isatty()  # also with FORCE_COLOR: a bar is no colour
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), Rate(), Elapsed())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def echo_json(value: object) -> None:
    """Print a value as JSON over several lines."""
    import msgspec

    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:  # a file name is not valid UTF-8, so its bytes are shown as escapes
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        data = re.sub("[\ud800-\udfff]", lambda found: rf"\\u{ord(found[0]):x}", text).encode()
    click.echo(printable_json(msgspec.json.format(data, indent=2)))


def print_table(
    rows: Iterable[object], columns: Mapping[str, str | Callable[[Any], object]], words: int = 1
) -> None:
    """Print a table to standard output.

    Args:
        rows: One object per row.
        columns: Maps each heading to an attribute of the rows or to a function of a row. None is shown as
            `-`.
        words: Number of text columns at the left. The other columns are numbers.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, head in enumerate(columns):
        if number < words:
            table.add_column(head, overflow="fold")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        values = [getattr(row, get) if isinstance(get, str) else get(row) for get in columns.values()]
        table.add_row(*map(_cell, values))
    colored = in_color(sys.stdout)
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False, force_terminal=colored)
    if not sys.stdout.isatty():
        console.width = 200  # a file has no terminal width, so a default is needed
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else printable(str(value), 200)
