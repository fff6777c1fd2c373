"""`cometmq store`: checks and repairs of a store directory of CometMQ or Apache RocketMQ.

`verify`, `dump` and `stats` only read and need no lock, so they work while a broker runs. `rebuild` and
`truncate` require that the broker is stopped, `restore` an empty directory.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from cometmq.cli.app import CometGroup
from cometmq.cli.options import COUNT, HELP, echo_json, print_table, progress_bar
from cometmq.command_options import F, opt
from cometmq.errors import CometError, ConfigError
from cometmq.protocol.compression import decompress
from cometmq.settings import read_properties_file, settings_of
from cometmq.text import counted, local_time, printable, printable_json, printable_lines

if TYPE_CHECKING:
    from cometmq.message import MessageExt
    from cometmq.store import RestoreReport, StoreConfig, TruncateReport
    from cometmq.store.inspect import StoreStats, VerifyReport


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
        opt("--json as_json", is_flag=True, help="Print JSON."),
        opt("--commitlog commit_log_dir", metavar="DIR", default="", show_default=place, help=where),
        opt("-c --config config_file", metavar="FILE", help=conf),
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


@click.group(cls=CometGroup, context_settings=HELP)
def store() -> None:
    """Check, show, rebuild, truncate, restore, measure a store directory (CometMQ's or Apache RocketMQ's)."""


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
@opt(
    "--to position",
    type=click.IntRange(min=0),
    required=True,
    metavar="POSITION",
    help="New end of the log: the end position of a record.",
)
@opt("--dry-run", is_flag=True, help="Only print what would be deleted.")
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
        click.echo(truncate_text(report))


@store.command(context_settings=HELP)
@click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
@opt(
    "-c --config config_file",
    metavar="FILE",
    show_default="DIR/broker.conf",
    help="The lost broker's configuration.",
)
@opt(
    "--id store_id",
    metavar="ID",
    default="",
    show_default="the only one",
    help="The store in the object store that is restored.",
)
@opt("--dry-run", is_flag=True, help="Only print what would be restored.")
@opt("--json as_json", is_flag=True, help="Print JSON.")
def restore(directory: str, config_file: str | None, store_id: str, dry_run: bool, as_json: bool) -> None:
    """Restore the store in DIR, which must be empty, from the object store of a broker that lost its disk.

    The configuration contains the object store (tieredStoreUri), the broker's name and its file lengths. The
    restore computes queues and index, and downloads the newest log segment. The other segments stay in the
    object store. A repeated command continues an interrupted restore. Messages after the newest segment and
    the tables in DIR/config are not restored.
    """
    from cometmq.broker.base.config import BrokerConfig
    from cometmq.broker.object_store import object_store_of
    from cometmq.store import restore_store

    path = os.path.join(directory, "broker.conf") if config_file is None else config_file
    with settings_of(path):
        properties = read_properties_file(path)
        config = BrokerConfig.from_properties({**properties, "storePathRootDir": os.path.realpath(directory)})
        objects = object_store_of(config)
        if objects is None:
            raise ConfigError("tieredStoreUri", "", "the object store of the lost broker")
    with progress_bar("restoring") as progress:
        report = restore_store(config.store, objects, store_id=store_id, dry_run=dry_run, progress=progress)
    if as_json:
        echo_json(report)
    else:
        click.echo(restore_text(report))


@store.command(context_settings=HELP)
@store_options
@opt("--queues by_queue", is_flag=True, help="Print a line per queue instead of per topic.")
def stats(directory: str, look: dict[str, Any], as_json: bool, by_queue: bool) -> None:
    """Show statistics of the store in DIR: messages and bytes by topic and queue, files, and retention."""
    from cometmq.store.inspect import store_stats

    with progress_bar("counting") as progress:
        found = store_stats(directory, **look, progress=progress)
    if as_json:
        echo_json(found)
        return

    print_stats(found, by_queue=by_queue)


@store.command(context_settings=HELP)
@store_options
@opt("--offset", type=click.IntRange(min=0), metavar="N", help="Show the record at this position of the log.")
@opt("--id message_id", metavar="ID", help="Show the message with this offset id or unique key.")
@opt("--key", metavar="KEY", help="Show the messages with this key, of --topic or of all topics.")
@opt("-t --topic", metavar="NAME", help="Topic for --key or --queue.")
@opt("-q --queue queue_id", type=click.IntRange(min=0), metavar="N", help="Show this queue of --topic.")
@opt(
    "--from start",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="First queue offset (with --queue) or log position to show.",
)
@opt("--limit", type=COUNT, default=32, show_default=True, help="Maximum number of messages to show.")
@opt(
    "--body",
    type=click.Choice(["auto", "text", "hex", "none"]),
    default="auto",
    show_default=True,
    help="Format of bodies; auto: as text if it is UTF-8.",
)
@opt(
    "--raw", is_flag=True, help="Print everything as stored: compressed bodies, unescaped control characters."
)
@opt("--scan", is_flag=True, help="Search ids and keys in the whole log, without the index.")
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


MAX_BODY_BYTES = 16 << 20
"""Maximum bytes of a body after decompression. Its text as escaped JSON can take 13 times as much memory."""
_MAX_PREVIEW_CHARS = 60  # maximum characters of a body that a one-line output shows
_FIELDS = (
    "topic", "queue_id", "queue_offset", "physical_offset", "store_size", "msg_id", "offset_msg_id", "tags",
    "keys", "flag", "sys_flag", "born_timestamp_ms", "born_host", "store_timestamp_ms", "store_host",
    "reconsume_times", "prepared_transaction_offset", "body_crc",
)  # fmt: skip


def time_text(epoch_ms: int) -> str:
    """Return a time of the store's statistics as text; a dash for a negative number, which means no time."""
    return moment(max(epoch_ms, 0))


def moment(epoch_ms: int) -> str:
    """Return a time of a record as text with milliseconds, or `-` for a number that is no valid time."""
    return local_time(epoch_ms, ".") or "-"


def size_text(count: int) -> str:
    """Return a number of bytes in the largest unit with at least one whole, such as 1.5 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def verify_text(report: VerifyReport) -> str:
    """Return the report as text: the findings, then the summary."""
    lines = []
    for finding in report.findings:
        place = finding.path if finding.offset < 0 else f"{finding.path} at byte {finding.offset}"
        lines.append(f"{finding.severity:<7} {place}: {finding.problem}")
        if finding.repair:
            lines.append(f"        repaired by {finding.repair}")
    if report.omitted:
        lines.append(f"... and {report.omitted} more of the same kinds")
    state = (
        "in use by a broker" if report.live else "stopped cleanly" if report.clean else "not stopped cleanly"
    )
    lines.append(
        f"{report.root} ({state}): {report.records} records in {report.segments} segments, "
        f"{report.units} units in {report.queues} queues, {report.index_entries} entries in "
        f"{report.index_files} index files, {report.tables} tables"
    )
    lines.append(f"{report.errors} errors, {report.warnings} warnings, {report.notes} notes")
    return "\n".join(printable(line, None) for line in lines)


def truncate_text(report: TruncateReport) -> str:
    """Return the lost messages of each queue, one queue per line, the removed segments, and a summary."""
    lines = [
        f"{each.topic}/{each.queue_id}: {counted(each.messages, 'message')} from offset {each.first_offset}"
        for each in report.queues
    ]
    lines += [f"{path}: the whole segment" for path in report.segments]
    what = f"{counted(report.records, 'record')} ({report.bytes} bytes of the log)"
    if report.done:
        lines.append(
            f"{report.root}: {what} removed; the log ended at {report.end}, now at {report.position}"
        )
    else:
        lines.append(f"{report.root}: {what} would be removed; the log ends at {report.end}")
    return "\n".join(printable(line, None) for line in lines)


def restore_text(report: RestoreReport) -> str:
    """Return a report about a restore as text: the restored part of the log, and the losses."""
    done = "restored" if report.done else "would be restored"
    lines = [
        f"{report.root}: the log from position {report.start} to {report.end} {done} from store "
        f"{report.store_id} ({counted(report.segments, 'segment')}, {size_text(report.bytes)})"
    ]
    if report.done:
        lines.append(f"{counted(report.messages, 'message')} in {counted(report.queues, 'queue')}")
    if report.not_served:
        lines.append(
            f"{counted(report.not_served, 'record')} not served, as they fit into no queue (see the log)"
        )
    lines += [f"lost: the log from position {gap.start} to {gap.stop}" for gap in report.gaps]
    lines.append(
        f"lost: the log from position {report.end} on, messages after {time_text(report.newest_ms)}, and the "
        "tables in config: settings of topics and groups, consumer offsets, accounts, purges"
    )
    return "\n".join(printable(line, None) for line in lines)


def body_of(message: MessageExt, how: str, *, raw: bool) -> tuple[str, str]:
    """Return the (form, text) of a body; form is "text", "hex" or "none"."""
    if how == "none":
        return "none", ""
    data = bytes(message.body)
    if not raw:
        try:
            data = decompress(message.sys_flag, data, MAX_BODY_BYTES)
        except CometError:
            pass  # a body that cannot be decompressed is shown as stored
    if how != "hex":
        try:
            return "text", data.decode("utf-8", "replace" if how == "text" else "strict")
        except UnicodeDecodeError:
            pass
    return "hex", data.hex()


def message_json(message: MessageExt, how: str, *, raw: bool) -> bytes:
    """Return a message as one line of JSON."""
    form, text = body_of(message, how, raw=raw)
    value = {name: getattr(message, name) for name in _FIELDS}
    value |= {"properties": dict(message.properties), "body_form": form, "body": text}
    return printable_json(json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace"))


def message_text(message: MessageExt, how: str, *, raw: bool) -> str:
    """Return a message as text with one field per line."""
    form, text = body_of(message, how, raw=raw)
    fields = [
        ("topic", message.topic),
        ("queue", message.queue_id),
        ("queue offset", message.queue_offset),
        ("log position", message.physical_offset),
        ("record size", message.store_size),
        ("message id", message.msg_id),
        ("offset id", message.offset_msg_id),
        ("born", f"{moment(message.born_timestamp_ms)} at {message.born_host}"),
        ("stored", f"{moment(message.store_timestamp_ms)} at {message.store_host}"),
        ("flag", message.flag),
        ("sys flag", f"0x{message.sys_flag & 0xFFFFFFFF:x}"),
        ("reconsumed", message.reconsume_times),
        ("prepared at", message.prepared_transaction_offset),
        *((f"property {name}", value) for name, value in message.properties.items()),
    ]
    width = max(len(name) for name, _ in fields)
    lines = [f"{name:<{width}}  {value}" for name, value in fields]
    if form != "none":
        # The body comes last, because its lines are printed unchanged and could otherwise be mistaken for
        # fields.
        text = f"{f'body ({form})':<{width}}  {text}"
    if raw:
        return "\n".join([*lines, text] if form != "none" else lines)
    lines = [printable(line, None) for line in lines]
    return "\n".join([*lines, printable_lines(text)] if form != "none" else lines)


def message_line(message: MessageExt, how: str, *, raw: bool) -> str:
    """Return a message as one line: position, queue and offset, time, id, tags, keys, start of the body."""
    form, text = body_of(message, how, raw=raw)
    start = text[:_MAX_PREVIEW_CHARS] + ("..." if len(text) > _MAX_PREVIEW_CHARS else "")
    words = [
        f"{message.physical_offset:>12}",
        f"{message.topic}/{message.queue_id}@{message.queue_offset}",
        moment(message.store_timestamp_ms),
        message.msg_id,
        message.tags or "-",
        " ".join(message.keys) or "-",
        "" if form == "none" else repr(start) if form == "text" else f"0x{start}",
    ]
    line = "  ".join(words).rstrip()
    return line if raw else printable(line, None)


def print_stats(stats: StoreStats, *, by_queue: bool) -> None:
    """Print the tables of the store's statistics to standard output."""
    columns: dict[str, str | Callable[[Any], object]] = {"topic": "topic"}
    if by_queue:
        columns |= {
            "queue": lambda row: str(row.queue_id),
            "offsets": lambda row: f"{row.min_offset}-{row.max_offset}",
        }
    else:
        columns["queues"] = lambda row: str(row.queues)
    columns |= {
        "messages": lambda row: str(row.messages),
        "bytes": lambda row: size_text(row.bytes),
        "oldest": lambda row: time_text(row.oldest_ms),
        "newest": lambda row: time_text(row.newest_ms),
    }
    print_table(stats.queues if by_queue else stats.topics, columns)
    click.echo(files_text(stats))


def files_text(stats: StoreStats) -> str:
    """Return the totals, the files and the retention forecast as text."""
    look = stats.outlook
    lines = [
        "",
        f"{stats.messages} messages, {size_text(stats.bytes)} readable",
        f"log: {stats.segments} segments of {size_text(stats.segment_size)} from position "
        f"{stats.first_position} on, {size_text(stats.log_allocated)} on the disk",
        f"queues: {stats.queue_files} files, {size_text(stats.queue_allocated)} on the disk",
        f"index: {stats.index_files} files, {stats.index_entries} entries, "
        f"{size_text(stats.index_allocated)} on the disk",
        f"disk: {look.disk_used_ratio:.1%} used, early deletion above {look.disk_max_used_ratio:.0%}",
        f"retention: {look.file_reserved_hours} h, deleted in hour {look.delete_when}; "
        f"{look.expired_segments} segments are expired, the oldest expires {time_text(look.next_expiry_ms)}",
    ]
    if look.bytes_per_day:
        until = "" if look.full_in_days < 0 else f"; {look.full_in_days} days until that share at this rate"
        lines.append(f"growth: {size_text(look.bytes_per_day)} a day{until}")
    return "\n".join(lines)
