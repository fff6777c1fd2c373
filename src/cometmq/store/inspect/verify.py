"""`verify` compares all parts of a store directory with each other, without changing them.

Queues and index are compared with the log, record by record. If a broker uses the store, the ends of queues
and index are read before the log, so that the log contains the records of all units and entries. What the
broker adds later is not checked.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

import msgspec

from cometmq.errors import ProtocolError, StoreCorrupt, StoreError
from cometmq.protocol.codes import SCHEDULE_TOPIC, TIMER_TOPIC, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from cometmq.store.base.checkpoint import (
    FILE_SIZE,
    POSITION_LOCATION,
    checkpoint_position_of,
    is_position_whole,
)
from cometmq.store.base.config import CHECKPOINT
from cometmq.store.base.disk import NO_FILE, NOT_A_FILE, Disk, read_file
from cometmq.store.base.files import ReadOnlyFiles
from cometmq.store.inspect.findings import ERROR, NEXT_START, NOTE, WARNING, Finding, Findings
from cometmq.store.inspect.index_check import IndexCheck
from cometmq.store.inspect.log_walk import RECHECK_DELAY_S, LogWalk
from cometmq.store.inspect.queue_check import QueueCheck
from cometmq.store.recovery.store_layout import MAX_FILE_BYTES, Look, StoreLayout, read_layout
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.table_checks import ENDS, SEALED, TABLE_RULES, TOPICS, Table, read_table

_SYSTEM_TOPICS = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC})
_FUTURE_MS = 1 << 53
_CHECKPOINT_USED = 24

Progress = Callable[[int, int], None]
"""A function that receives two numbers of bytes of the log: those processed so far, and all."""


def no_progress(_done: int, _all: int) -> None: ...


class VerifyReport(msgspec.Struct):
    """The result of `verify`: how many files, records, units and entries were checked, and the findings."""

    root: str
    live: bool
    clean: bool
    segments: int
    records: int
    bytes: int
    first_position: int
    end_position: int
    queues: int
    units: int
    fillers: int
    index_files: int
    index_entries: int
    tables: int
    errors: int
    warnings: int
    notes: int
    omitted: int
    findings: list[Finding]

    @property
    def sound(self) -> bool:
        """Whether there are no errors. Warnings and notes do not count."""
        return not self.errors


def verify(
    root: str,
    *,
    disk: Disk | None = None,
    progress: Progress = no_progress,
    pause: Callable[[float], None] = time.sleep,
    **look: Unpack[Look],
) -> VerifyReport:
    """Check the store in `root`. `pause` waits for some seconds while a broker may be writing.

    Raises:
        StoreError: There is no store, or it belongs to a running raft member, whose committed end is unknown.
        OSError: A file cannot be read.
    """
    disk = disk or Disk()
    layout = read_layout(disk, root, **look)
    if layout.live and layout.config.enable_d_leger_commit_log:
        raise StoreError("a running raft member cannot be checked; stop it first", layout.root)
    findings = Findings()
    for path in layout.strays:
        _stray(disk, findings, path)
    tables = TableCheck(disk, layout, findings, pause)
    tables.check_tables()
    with ReadOnlyFiles(disk) as files:
        queues = QueueCheck(layout, files, findings, pause, tables.topics, tables.deleted)
        index = IndexCheck(layout, files, findings)
        walk = LogWalk(disk, layout, findings, pause)
        records = _walk(walk, queues, index, layout, progress)
        queues.finish(walk)
        index.finish()
    if not layout.live:
        _check_checkpoint(disk, layout, findings, walk)
    count = findings.by_severity
    return VerifyReport(
        layout.root, layout.live, layout.clean, walk.segments, records, walk.end - walk.log_min, walk.log_min,
        walk.end, queues.queues, queues.units, queues.fillers, index.files, index.entries, tables.count,
        count[ERROR], count[WARNING], count[NOTE], findings.omitted, findings.kept,
    )  # fmt: skip


def _stray(disk: Disk, findings: Findings, path: str) -> None:
    facts = disk.facts(path)
    if facts is not None and not facts.regular and (disk.is_link(path) or not disk.is_dir(path)):
        findings.add(ERROR, "not-a-file", path, -1, f"{NO_FILE}; not read", "remove it, or put a file there")
    elif facts is not None and facts.size > MAX_FILE_BYTES and facts.regular:
        problem = f"{facts.size} bytes: no broker made it"
        findings.add(ERROR, "too-long", path, facts.size, problem, "remove it")
    else:
        findings.add(NOTE, "stray", path, -1, "belongs to no store, left alone")


def _walk(
    walk: LogWalk, queues: QueueCheck, index: IndexCheck, layout: StoreLayout, progress: Progress
) -> int:
    records = 0
    total = len(layout.segments) * layout.config.mapped_file_size_commit_log
    for group in walk.groups():
        records += len(group.properties)
        queues.log_min = index.log_min = walk.log_min
        queues.check_records(group)
        index.check_records(group, queues.deleted)
        progress(walk.end - walk.log_min, total)
    progress(total, total)
    return records


def _check_checkpoint(disk: Disk, layout: StoreLayout, findings: Findings, walk: LogWalk) -> None:
    path = layout.config.location(CHECKPOINT)
    facts = disk.facts(path)
    anew = f"{NEXT_START} writes it again; after an unclean stop it then scans the whole log"

    def add(severity: str, place: int, problem: str, repair: str = anew) -> None:
        findings.add(severity, "checkpoint", path, place, problem, repair)

    if facts is None:
        if layout.segments:
            add(WARNING, -1, "the file is missing")
        return
    if not facts.regular:
        findings.add(ERROR, "not-a-file", path, -1, f"{NO_FILE}; not read", "remove it")
        return
    data = read_file(disk, path, FILE_SIZE + 1)
    if len(data) != FILE_SIZE:
        add(ERROR, len(data), f"not {FILE_SIZE} bytes long")
        return
    saved = checkpoint_position_of(data)
    if saved is not None and saved.position > max(walk.end, walk.log_min):
        vouched = f"it covers the log up to {saved.position}, which ends at {walk.end}"
        add(WARNING, POSITION_LOCATION.start, f"{vouched}: the end of the log is gone", NEXT_START)
    unused = bytearray(data)
    unused[:_CHECKPOINT_USED] = bytes(_CHECKPOINT_USED)
    if unused[POSITION_LOCATION].strip(b"\0") and not is_position_whole(data):
        problem = "its position of the durable log is damaged"
        add(WARNING, POSITION_LOCATION.start, problem, NEXT_START)
    unused[POSITION_LOCATION] = bytes(len(unused[POSITION_LOCATION]))
    if unused.strip(b"\0"):
        at = FILE_SIZE - len(unused.lstrip(b"\0"))
        problem = "nonzero bytes after the times, which nothing reads"
        findings.add(NOTE, "unused-bytes", path, at, problem)
    if layout.clean and walk.last_store_ms and not data.strip(b"\0"):
        add(WARNING, 0, "it holds no times")
    for number, value in enumerate(struct.unpack_from(">qqq", data)):
        if not 0 <= value < _FUTURE_MS:
            add(ERROR, number * 8, f"{value} is no time")
        elif 0 < walk.last_store_ms < value and number < 2:
            vouched = f"it covers {value} ms, the last record is of {walk.last_store_ms} ms"
            problem = f"{vouched}: the end of the log is gone, or the file is damaged"
            add(WARNING, number * 8, problem, NEXT_START)


@dataclass(eq=False)
class TableCheck:
    """The check of the JSON tables of `config/` and their `.bak` files."""

    disk: Disk
    layout: StoreLayout
    findings: Findings
    pause: Callable[[float], None]

    def __post_init__(self) -> None:
        self.deleted: DeletedTopics | None = None
        self.count = 0
        self.topics: set[str] | None = None

    def check_tables(self) -> None:
        directory = os.path.join(self.layout.root, "config")
        names = self.disk.listdir(directory)
        tables = {name.removesuffix(".bak") for name in names if name.endswith((".json", ".json.bak"))}
        for name in sorted(tables):
            path = os.path.join(directory, name)
            table, problem = self._read(path, name)
            backup, backup_problem = self._read(path + ".bak", name)
            self.count += 1
            if table is None and problem:
                repair = "write it again by hand"
                if backup is not None and name != ENDS:
                    repair = f"{NEXT_START} uses the .bak"
                elif name in SEALED:
                    repair = f"{NEXT_START} ignores it"
                self.findings.add(ERROR, "table", path, -1, problem, repair)
            elif table is None and backup is not None:
                repair = f"{NEXT_START} uses the .bak"
                self.findings.add(ERROR, "table", path, -1, "the file is missing", repair)
            if backup is None and backup_problem:
                repair = "the next change of the table replaces it"
                self.findings.add(WARNING, "table", path + ".bak", -1, backup_problem, repair)
            if name == TOPICS:
                known = ((backup if table is None else table) or {}).get("topicConfigTable")
                if isinstance(known, dict):
                    self.topics = {str(topic) for topic in known} | _SYSTEM_TOPICS
        try:
            self.deleted = DeletedTopics(self.disk, self.layout.root)
        except (StoreCorrupt, OSError):
            pass  # The check of the tables has already reported that this table is unreadable

    def _read(self, path: str, name: str) -> tuple[Table | None, str]:
        """Return the table in a file (or None), and the file's defect. "" means none, or a missing file."""
        table, problem = self._parse(path, name)
        if table is None and self.layout.live:  # The broker may have replaced the file during the first read
            self.pause(RECHECK_DELAY_S)
            table, problem = self._parse(path, name)
        return table, problem

    def _parse(self, path: str, name: str) -> tuple[Table | None, str]:
        try:
            text = read_file(self.disk, path)
        except FileNotFoundError:
            return None, ""
        except OSError as failure:
            if failure.errno not in NOT_A_FILE:
                raise
            return None, NO_FILE
        if not text.strip():
            return None, "the file is empty"
        try:
            return read_table(text, TABLE_RULES.get(name)), ""
        except ProtocolError as problem:
            return None, str(problem)
