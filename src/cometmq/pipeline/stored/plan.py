"""Division of store directories into slices of log files, one slice for each Spark task.

The end of the log is fixed when Spark plans a query. So all actions on one DataFrame see the same rows, even
while a broker appends to the log.
"""

from __future__ import annotations

import glob
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np
from pyspark.sql.datasource import InputPartition

from cometmq import logs
from cometmq.errors import ConfigError, StoreCorrupt
from cometmq.pipeline.base.errors import LogLossError
from cometmq.pipeline.base.options import StoreOptions
from cometmq.pipeline.stored.log import Block, Damage, LogFile, LogReader, numbered_files, opened
from cometmq.protocol.java_properties import PropertiesError, parse_properties
from cometmq.protocol.record.framing import ENTRIES, ENTRY_SIZE, PLAIN, EntryHead
from cometmq.protocol.record.layout import BLANK_SIZE
from cometmq.protocol.record.many import bodies_match
from cometmq.protocol.record.one import PLACE_BYTES, place_of
from cometmq.store.inspect import MAX_FILE_BYTES, MemberLog, member_log, same_directory

log = logs.logger(__name__)

_CONF_MAX = 1 << 20  # Maximum size of a `broker.conf` that is read, in bytes
_LOOK = 4096  # Bytes that are read after the last record, to find out whether data follows it

_CLOCK_MARGIN_MS = 600_000
"""Tolerance, in ms, of the rule that skips slices outside the requested time range.

Store times ascend along a log, so the messages of a slice were stored between the first store time of this
slice and that of the next slice. The tolerance allows for a clock that was set back. Within a slice, each row
is selected by its own store time.
"""


@dataclass(frozen=True)
class Slice(InputPartition):
    """The records of a file in [start, stop), for a Spark task. `first_ms`: the first store time, or None."""

    file: LogFile
    start: int
    stop: int
    broker_name: str
    first_ms: int | None


def plan_slices(options: StoreOptions) -> list[Slice]:
    """Return all slices of all stores. Raises ConfigError, LogLossError, StoreCorrupt, OSError."""
    found: list[Slice] = []
    for directory in store_directories(options.paths):
        found += _in_time(_slices(directory, options), options)
    return found


def store_directories(paths: Sequence[str]) -> list[str]:
    """Return the store directories that the paths or patterns match, each once. Raises ConfigError."""
    found: dict[str, str] = {}
    for path in paths:
        plain = path.removeprefix("file://").removeprefix("file:")
        matches = [each for each in sorted(glob.glob(plain)) or [plain] if _is_store(each)]
        if not matches:
            raise ConfigError(
                "path", path, "a store: a directory with a commitlog, or a raft member's dledger-*, in it"
            )
        for each in matches:
            found.setdefault(os.path.realpath(each), os.path.abspath(each))
    return list(found.values())


def _is_store(directory: str) -> bool:
    if os.path.isdir(os.path.join(directory, "commitlog")) or _has_member(directory):
        return True
    # A raft member's bare log directory is refused, because the log alone does not show which entries are
    # committed.
    return os.path.isdir(directory) and bool(numbered_files(directory)) and not _has_entries(directory)


def _has_member(directory: str) -> bool:
    return bool(glob.glob(os.path.join(glob.escape(directory), "dledger-*", "data", "")))


def _has_entries(directory: str) -> bool:
    base, path = numbered_files(directory)[0]
    with opened(path) as fd:
        head = os.pread(fd, ENTRY_SIZE, 0)
    return len(head) == ENTRY_SIZE and EntryHead.read(head).holds(base)


def broker_name(directory: str) -> str:
    """Return the `brokerName` in the store's `broker.conf`, or else the name of the directory."""
    return _settings(directory).get("brokerName", "") or os.path.basename(directory)


def _settings(directory: str) -> dict[str, str]:
    """Return the settings in the store's broker.conf, or none if the file cannot be read."""
    try:
        with opened(os.path.join(directory, "broker.conf")) as fd:
            text = os.pread(fd, _CONF_MAX, 0).decode("utf-8")
        return parse_properties(text)
    except (OSError, UnicodeDecodeError, PropertiesError):
        return {}


def _queue_directory(directory: str) -> str:
    """Return the consume queues' directory: that of broker.conf if it exists and is no other store's."""
    settings = _settings(directory)
    configured = os.path.expanduser(settings.get("storePathConsumeQueue", ""))
    root = os.path.expanduser(settings.get("storePathRootDir", ""))
    own = os.path.isdir(configured) and (not os.path.isdir(root) or same_directory(root, directory))
    return configured if own else os.path.join(directory, "consumequeue")


def _files(directory: str) -> list[LogFile]:
    inside = os.path.join(directory, "commitlog")
    queues = _queue_directory(directory)
    member = member_log(directory) if _has_member(directory) else None
    if member is None:
        member, framing = MemberLog((inside if os.path.isdir(inside) else directory,), sys.maxsize), PLAIN
    else:
        framing = ENTRIES
    found = []
    for base, path in sorted(file for place in member.directories for file in numbered_files(place)):
        try:
            length = os.stat(path).st_size
        except FileNotFoundError:
            continue  # A running broker has deleted this file since the directory was listed
        if length > MAX_FILE_BYTES:
            raise StoreCorrupt(f"the file has {length} bytes, a log file at most {MAX_FILE_BYTES}", path)
        if length and base < member.committed:
            own_queues = queues if os.path.isdir(queues) else None
            found.append(LogFile(path, base, min(base + length, member.committed), own_queues, framing))
    return found


def _slices(directory: str, options: StoreOptions) -> list[Slice]:
    """Return the slices of a store's log, in log order, up to the log's current end."""
    name = broker_name(directory)
    found: list[Slice] = []  # The slices of the log, the newest first
    for file in reversed(_files(directory)):
        try:
            reader = file.open()
        except FileNotFoundError:
            continue
        with reader:
            borders = _borders(reader, options.slice_bytes)
            # Only the file that holds the last record can have unused space at its end: files after it are
            # reserved and empty, and files before it are full.
            end = file.end if found or file.framing.gap else _end(reader, borders[-1], options)
            if end > file.base:
                for start, stop in reversed([*pairwise([*borders, end])]):
                    found.append(Slice(file, start, stop, name, _first_ms(reader, start)))
    found.reverse()
    for before, after in pairwise(found):
        if before.file.end < after.file.base:
            lost = LogLossError(directory, before.file.end, after.file.base, "no file holds these")
            if options.fail_on_data_loss:
                raise lost
            log.warning("%s", lost)
    return found


def _borders(reader: LogReader, slice_bytes: int) -> list[int]:
    """Return the starts of slices, about `slice_bytes` apart: the file's, and those of queued records."""
    file = reader.file
    borders = [file.base]
    if file.queues is None or not reader.read(file.base, BLANK_SIZE).strip(b"\0"):
        return borders
    for near in range(file.base + slice_bytes, file.end - slice_bytes // 2, slice_bytes):
        stop = min(near + slice_bytes, file.end)
        found = reader.next_record(max(near, borders[-1] + 1), stop)
        if found < stop:
            borders.append(found)
    return borders


def _end(reader: LogReader, start: int, options: StoreOptions) -> int:
    """Return the end of the last whole record that begins at `start` or later, or else `start`."""
    file, last, found = reader.file, None, None
    for found in reader.walk(start, file.end, options.batch_bytes):
        if isinstance(found, Block):
            last = found
    if not isinstance(found, Damage) or found.stop < file.end:
        return file.end  # A blank record ends the file, so the file is complete
    end = start
    if last is not None:
        ends = last.rows.properties_start + last.rows.properties_length
        if options.check_crc:  # After a power failure, the bodies of the newest records may be missing
            ends = ends[: 1 + max(np.flatnonzero(bodies_match(last.data, last.rows)), default=-1)]
        if len(ends) and last.rows.properties_length[len(ends) - 1] and not last.data[ends[-1] - 1]:
            # The properties of the last record end with a NUL byte, which no client writes. So this part of
            # the file is still unwritten, and the record is incomplete.
            ends = ends[:-1]
        end = last.position + int(ends[-1] if len(ends) else 0)
    if reader.read(end, _LOOK).strip(b"\0"):
        log.warning("%s: no complete record begins at log position %d or after it", file.path, end)
    return end


def _first_ms(reader: LogReader, start: int) -> int | None:
    start += reader.file.framing.gap
    head = reader.read(start, PLACE_BYTES)
    place = place_of(head) if len(head) == PLACE_BYTES else None
    return place.store_timestamp_ms if place is not None and place.physical_offset == start else None


def _in_time(found: Sequence[Slice], options: StoreOptions) -> list[Slice]:
    """Return the slices of the log that may hold records of the requested time range."""
    starts = [each.first_ms for each in found]
    least = -math.inf if options.starting_ms is None else options.starting_ms - _CLOCK_MARGIN_MS
    most = math.inf if options.ending_ms is None else options.ending_ms + _CLOCK_MARGIN_MS
    kept = []
    for each, next_ms in zip_longest(found, starts[1:]):
        if next_ms is not None and next_ms < least:
            continue
        if each.first_ms is None or each.first_ms < most:
            kept.append(each)
    return kept
