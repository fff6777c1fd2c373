"""Parts that the commands of message-reading jobs share: source options, text tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click

from cometmq.cli.options import moment, namesrv_option
from cometmq.text import printable

F = TypeVar("F", bound=Callable[..., Any])


def source_options(command: F, *, give_namesrv: bool = False) -> F:
    """Add `--source`, `--namesrv`, `--from`, `--to`.

    The command receives `source`, `begin_ms` and `end_ms`, and with `give_namesrv` also `namesrv`.
    """

    @functools.wraps(command)
    def read(*, source: str | None, namesrv: str, begin: str | None, end: str | None, **options: Any) -> Any:
        if give_namesrv:
            options["namesrv"] = namesrv
        return command(
            source=source or f"live:{namesrv}",
            begin_ms=None if begin is None else moment(begin),
            end_ms=None if end is None else moment(end),
            **options,
        )

    what = "An archive (directory or URI), store:DIR[,DIR...] or live:HOST:PORT; default: live, at --namesrv."
    when = "Store time: 10m (s, m, h, d ago), ms since 1970 or yyyy-MM-dd#HH:mm:ss:SSS."
    for decorate in (
        click.option("--to", "end", metavar="TIME", help="Only messages stored before this time."),
        click.option(
            "--from", "begin", metavar="TIME", help=f"Only messages stored at or after this time. {when}"
        ),
        namesrv_option,
        click.option("-s", "--source", metavar="SOURCE", help=what),
    ):
        decorate(read)
    return read  # type: ignore[return-value]


def print_absent(topics: Iterable[str]) -> None:
    """Print a line to standard error for each of these topics, because no messages of them were found."""
    for topic in topics:
        click.echo(f"not complete: no messages of topic {printable(topic, 200)}", err=True)


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
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 200  # a file has no terminal width, so a default is needed
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else printable(str(value), 200)
