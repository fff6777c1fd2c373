"""Output of `cometmq store`, as text and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cometmq.errors import CometError
from cometmq.protocol.compression import decompress
from cometmq.text import counted, local_time, printable, printable_json, printable_lines

if TYPE_CHECKING:
    from cometmq.message import MessageExt
    from cometmq.store import TruncateReport
    from cometmq.store.inspect import StoreStats, VerifyReport

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
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("topic", overflow="fold")
    heads = ("queue", "offsets") if by_queue else ("queues",)
    for head in (*heads, "messages", "bytes", "oldest", "newest"):
        table.add_column(head, justify="right", no_wrap=True)
    if by_queue:
        for queue in stats.queues:
            offsets = f"{queue.min_offset}-{queue.max_offset}"
            table.add_row(
                printable(queue.topic), str(queue.queue_id), offsets, str(queue.messages),
                size_text(queue.bytes), time_text(queue.oldest_ms), time_text(queue.newest_ms),
            )  # fmt: skip
    else:
        for topic in stats.topics:
            table.add_row(
                printable(topic.topic), str(topic.queues), str(topic.messages), size_text(topic.bytes),
                time_text(topic.oldest_ms), time_text(topic.newest_ms),
            )  # fmt: skip
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 200  # a file has no terminal width, so a default is needed
    console.print(table)
    console.print(files_text(stats))


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
