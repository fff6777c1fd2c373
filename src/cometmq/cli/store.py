"""`cometmq store`: checks and repairs of a store directory of CometMQ or Apache RocketMQ.

`verify`, `dump` and `stats` only read and need no lock, so they work while a broker runs. `rebuild` and
`truncate` require that the broker is stopped.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cometmq.cli.lazy import CometGroup
from cometmq.cli.options import COUNT, HELP
from cometmq.cli.progress import progress_bar
from cometmq.settings import read_properties_file, settings_of
from cometmq.text import counted, printable, printable_json

if TYPE_CHECKING:
    from cometmq.message import MessageExt
    from cometmq.store import StoreConfig

F = TypeVar("F", bound=Callable[..., Any])


def store_options(command: F) -> F:
    """Add the argument DIR and the options -c, --commitlog and --json to a command.

    The command receives DIR, the value of --json as `as_json`, and a dict with the values of the other
    options: the keyword arguments that the functions of `store.inspect` accept.
    """

    @functools.wraps(command)
    def opened(directory: str, config_file: str | None, commit_log_dir: str, **options: Any) -> Any:
        look = {"config": store_config(config_file), "commit_log_dir": commit_log_dir}
        return command(directory, look, **options)

    where = "Directory of the log."
    place = "DIR/commitlog"
    conf = "The broker's configuration, if there is no broker.conf in DIR."
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option(
            "--commitlog", "commit_log_dir", metavar="DIR", default="", show_default=place, help=where
        ),
        click.option("-c", "--config", "config_file", metavar="FILE", help=conf),
        click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False)),
    ):
        decorate(opened)
    return opened  # type: ignore[return-value]


def store_config(path: str | None) -> StoreConfig | None:
    """Return the store settings of a properties file. Raises ConfigError, OSError."""
    from cometmq.store import StoreConfig

    if path is None:
        return None
    with settings_of(path):
        return StoreConfig.from_properties(read_properties_file(path))


def echo_json(value: object) -> None:
    import msgspec

    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:  # a file name is not valid UTF-8, so its bytes are shown as escapes
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        data = re.sub("[\ud800-\udfff]", lambda found: rf"\\u{ord(found[0]):x}", text).encode()
    click.echo(printable_json(msgspec.json.format(data, indent=2)))


@click.group(cls=CometGroup, context_settings=HELP)
def store() -> None:
    """Check, show, rebuild, truncate and measure a store directory (CometMQ's or Apache RocketMQ's)."""


@store.command(context_settings=HELP)
@store_options
def verify(directory: str, look: dict[str, Any], as_json: bool) -> None:
    """Check every record, queue unit, index entry, the checkpoint and the tables of the store in DIR.

    The command changes nothing and may run while the broker runs. Exit code 1 if the store is damaged. Traces
    of an unclean stop are warnings, not damage.
    """
    from cometmq.store.inspect import verify as check

    with progress_bar("verifying") as progress:
        report = check(directory, **look, progress=progress)
    if as_json:
        echo_json(report)
    else:
        from cometmq.cli.store_text import verify_text

        click.echo(verify_text(report))
    if not report.sound:
        raise click.exceptions.Exit(1)


@store.command(context_settings=HELP)
@store_options
def rebuild(directory: str, look: dict[str, Any], as_json: bool) -> None:
    """Rebuild the consume queues and the index of the store in DIR from its log.

    The broker must be stopped. The old directories remain until the new ones are complete.
    """
    from cometmq.store.inspect import rebuild as run

    with progress_bar("rebuilding") as progress:
        report = run(directory, **look, progress=progress)
    if as_json:
        echo_json(report)
        return
    click.echo(
        f"{printable(report.root)}: {report.queues} queues with {report.units} units and "
        f"{report.index_files} index files with {report.index_entries} entries made from "
        f"{counted(report.records, 'record')}"
    )
    if report.not_served:
        records = "1 record is" if report.not_served == 1 else f"{report.not_served} records are"
        click.echo(f"{records} not served: queue offsets that do not fit their queues")
    for finding in report.findings:
        text = f"{finding.severity}: {finding.path} at {finding.offset}: {finding.problem}"
        click.echo(printable(text, None), err=True)


@store.command(context_settings=HELP)
@store_options
@click.option("--to", "position", type=click.IntRange(min=0), required=True, metavar="POSITION",
              help="New end of the log: the end position of a record.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
def truncate(directory: str, look: dict[str, Any], as_json: bool, position: int, dry_run: bool) -> None:
    """Truncate the log of the store in DIR after a record; later records are lost.

    Use this for a slave with messages that its master does not have. The broker must be stopped. Queues and
    index are truncated with the log.
    """
    from cometmq.store import truncate_log

    report = truncate_log(directory, position, dry_run=dry_run, **look)
    if as_json:
        echo_json(report)
    else:
        from cometmq.cli.store_text import truncate_text

        click.echo(truncate_text(report))


@store.command(context_settings=HELP)
@store_options
@click.option("--queues", "by_queue", is_flag=True, help="Print a line per queue instead of per topic.")
def stats(directory: str, look: dict[str, Any], as_json: bool, by_queue: bool) -> None:
    """Show statistics of the store in DIR: messages and bytes by topic and queue, files, and retention."""
    from cometmq.store.inspect import store_stats

    with progress_bar("counting") as progress:
        found = store_stats(directory, **look, progress=progress)
    if as_json:
        echo_json(found)
        return
    from cometmq.cli.store_text import print_stats

    print_stats(found, by_queue=by_queue)


@store.command(context_settings=HELP)
@store_options
@click.option(
    "--offset", type=click.IntRange(min=0), metavar="N", help="Show the record at this position of the log."
)
@click.option("--id", "message_id", metavar="ID", help="Show the message with this offset id or unique key.")
@click.option("--key", metavar="KEY", help="Show the messages with this key, of --topic or of all topics.")
@click.option("-t", "--topic", metavar="NAME", help="Topic for --key or --queue.")
@click.option(
    "-q", "--queue", "queue_id", type=click.IntRange(min=0), metavar="N", help="Show this queue of --topic."
)
@click.option(
    "--from",
    "start",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="First queue offset (with --queue) or log position to show.",
)
@click.option(
    "--limit", type=COUNT, default=32, show_default=True, help="Maximum number of messages to show."
)
@click.option("--body", type=click.Choice(["auto", "text", "hex", "none"]), default="auto", show_default=True,
              help="Format of bodies; auto: as text if it is UTF-8.")  # fmt: skip
@click.option(
    "--raw",
    is_flag=True,
    help="Print everything as stored: compressed bodies, unescaped control characters.",
)
@click.option("--scan", is_flag=True, help="Search ids and keys in the whole log, without the index.")
def dump(
    directory: str,
    look: dict[str, Any],
    as_json: bool,
    offset: int | None,
    message_id: str | None,
    key: str | None,
    topic: str | None,
    queue_id: int | None,
    start: int,
    limit: int,
    body: str,
    raw: bool,
    scan: bool,
) -> None:
    """Show messages of the store in DIR: one by --offset or --id, several by --key, or a range.

    With --json the output is one JSON object per line. Exit code 1 if no message is found.
    """
    if sum(given is not None for given in (offset, message_id, key, queue_id)) > 1:
        raise click.UsageError("Give one of --offset, --id, --key and --queue.")
    if (queue_id is not None and topic is None) or (topic is not None and queue_id is None and key is None):
        raise click.UsageError("--topic requires --key or --queue.")
    from cometmq.cli.store_text import message_json, message_line, message_text
    from cometmq.store.inspect import RecordFinder

    with progress_bar("searching") as progress, RecordFinder(directory, **look, progress=progress) as finder:
        found: Iterable[MessageExt]
        if offset is not None:
            at = finder.at(offset)
            found = [] if at is None else [at]
        elif message_id is not None:
            found = finder.by_id(message_id, scan=scan)
        elif key is not None:
            found = finder.by_key(key, topic, scan=scan)
        elif queue_id is not None and topic is not None:
            found = finder.of_queue(topic, queue_id, start)
        else:
            found = finder.of_log(start)
        single = offset is not None or message_id is not None
        show = message_json if as_json else message_text if single else message_line
        shown = 0
        for message in islice(found, limit):
            click.echo(show(message, body, raw=raw), color=raw)
            shown += 1
        if shown:
            return
        problem = "there are no messages in this range"
        if offset is not None:
            problem = f"no message begins at log position {offset}: {finder.why_not_at(offset)}"
        elif message_id is not None:
            problem = f"there is no message {message_id}: {finder.why_not_id(message_id)}"
        elif key is not None:
            where = "of any topic" if topic is None else f"of topic {topic}"
            problem = f"no message {where} has the key {key}"
        if not scan and (key is not None or message_id is not None):
            problem += " (by the index; --scan reads the log)"
    raise click.ClickException(problem)
