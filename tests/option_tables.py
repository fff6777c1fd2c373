"""The tables of options in docs/pipeline.md and docs/jobs.md, from the declared options.

A table follows a comment `<!-- options: NAME -->`, where NAME is the struct of a Spark format or a job.
`python -m tests.option_tables` writes the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from cometmq.cli.app import pipeline as commands
from cometmq.pipeline.base import job_options, options
from cometmq.pipeline.base.declare import Option, declared
from cometmq.settings import INT_MAX, LONG_MAX

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "pipeline.md", DOCS / "jobs.md"]
FORMATS = {each.__name__: each for each in (options.ReadOptions, options.StoreOptions, options.WriteOptions)}
COMMON = {
    *("master", "memory", "as_json", "report_path", "metrics_at"),
    *("access_key", "secret_key", "tls", "namesrv", "source", "begin", "end", "begin_ms", "end_ms"),
}
"""Options of several jobs, which the pages describe once."""
TABLE = re.compile(r"(?<=<!-- options: )(\w+) -->\n(?:\n?\|.*(?:\n\|.*)*\n)?")
Row = tuple[str, ...]


def written(page: str) -> str:
    """Return the page with the tables of the current options."""
    return TABLE.sub(lambda found: f"{found[1]} -->\n\n{table(found[1])}\n", page)


def table(name: str) -> str:
    """Return the table of a Spark format or of a job."""
    heads, *rows = format_rows(FORMATS[name]) if name in FORMATS else job_rows(name)
    cells = [[cell.replace("|", r"\|") for cell in row] for row in (heads, *rows)]
    cells.insert(1, ["---"] * len(heads))
    return "\n".join(re.sub("  +", " ", f"| {' | '.join(row)} |") for row in cells)


def format_rows(struct: type) -> Iterator[Row]:
    """Yield the rows of a Spark format: first its own options, then the shared ones."""
    order = [name for each in struct.__mro__ for name in vars(each).get("__annotations__", ())]
    kinds = struct is options.ReadOptions
    yield ("Option (other spellings)", "Default", "Values", *(["Query"] if kinds else []), "Meaning")
    found = sorted(declared(struct), key=lambda each: order.index(each.name))
    names = {key for each in found for key in each.spark}
    spellings = [pair for pair in options.SPELLINGS.items() if pair[0] not in names]
    for each in found:
        for number, (key, text) in enumerate(each.spark.items()):
            others = ", ".join(f"`{other}`" for other, name in spellings if name == key)
            name = f"`{key}` ({others})" if others else f"`{key}`"
            default = "" if number else _default(each)  # the value consists of several options
            yield (name, default, _values(each), *([each.query or "both"] if kinds else []), text)


def _default(each: Option) -> str:
    if each.shown is not None or each.default is None:
        return "none" if each.shown is None else each.shown
    return _number(each.default) if each.type is int else f"`{str(each.default).lower()}`"


def _values(each: Option) -> str:
    if each.words or each.type is bool:
        return ", ".join(f"`{word}`" for word in each.words or ("true", "false"))
    if each.low is None:
        return ""
    high = int(each.high or LONG_MAX)
    return f"{each.low} or more" if high in (INT_MAX, LONG_MAX) else f"{each.low} to {_number(high)}"


def _number(count: int) -> str:
    for unit, word in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count % unit == 0 and count // unit > 1:
            return f"{count // unit} {word}"
    return f"{count:,}"


def job_rows(name: str) -> Iterator[Row]:
    """Yield the rows of a job's command."""
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    names = ("RedriveOptions", "DlqOptions") if name == "dlq" else (f"{name.capitalize()}Options",)
    texts = {each.name: each.text for struct in names for each in declared(getattr(job_options, struct))}
    yield ("Option", "In Python", "Default", "Meaning")
    for each in command.params:
        if each.name is None or each.name in COMMON:
            continue
        in_python = f"`{each.name}`" if each.name in texts else ""
        if isinstance(each, click.Option):
            yield (_flags(each, click.Context(command)), in_python, _shown(each), each.help or "")
        else:
            yield (f"`{each.human_readable_name}`", in_python, _shown(each), texts[each.name])


def _flags(each: click.Option, context: click.Context) -> str:
    if each.secondary_opts:
        return f"`--[no-]{each.opts[0].removeprefix('--')}`"
    value = "" if each.is_flag else f" {each.make_metavar(context)}"
    return ", ".join(f"`{flag}{value}`" for flag in each.opts)


def _shown(each: click.Parameter) -> str:
    """Return the default as a user would write it."""
    if each.required:
        return "required"
    shown = getattr(each, "show_default", None)
    if isinstance(shown, str):
        return shown
    default = each.default
    if default is True:
        return f"`{each.opts[0]}`"
    if isinstance(default, int | float) and default is not False:
        return f"{default:,g}" if default < 1e6 else f"{default:,.0f}"
    return f"`{default}`" if isinstance(default, str) and default else ""


def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
