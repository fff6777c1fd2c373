"""Consume queues held against the log: each unit must be the one that its record asks for, and each record
that belongs into a queue must have its unit.

The records come in the order of the log; per queue they meet their units in order, so runs of equal bytes
are compared at once and only what differs is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.codes import SCHEDULE_TOPIC
from cometmq.store.config import CONSUME_QUEUE_UNIT as UNIT
from cometmq.store.consume_queue import FILLER_SIZE, UNIT_STRUCT, file_name
from cometmq.store.disk import is_zero
from cometmq.store.findings import ERROR, NEXT_START, NOTE, NOTHING, REBUILD, WARNING, Findings
from cometmq.store.keys import stored_tags_code
from cometmq.store.log_walk import SETTLE_S, LogWalk
from cometmq.store.reads import LogReader, ReadOnlyFiles
from cometmq.store.recovery import tags_code_of
from cometmq.store.scan import Facts, Run
from cometmq.store.shape import QueueFiles, Shape

_CHUNK = 4096  # units
_BLOCK = 1 << 16
_PAGE = 4096
_UNIT_DTYPE = np.dtype([("position", ">i8"), ("size", ">i4"), ("tags", ">i8")])
_TRANSACTION_MASK, _PREPARED, _ROLLBACK = 0xC, 0x4, 0xC

IntArray = NDArray[np.int64]


class UnitFiles:
    """Units of one queue, read from its files. `first` and `end` are offsets: of the first file's start, and
    behind the last unit that was there when this was made."""

    __slots__ = ("_bases", "_files", "_size", "end", "first", "path")

    def __init__(self, files: ReadOnlyFiles, queue: QueueFiles, file_size: int) -> None:
        self._files = files
        self._size = file_size
        self.path = queue.path
        self._bases = [file.base for file in queue.files]
        self.first = self._bases[0] // UNIT if self._bases else 0
        self.end = self.first
        for base in reversed(self._bases):
            used = self._used(base)
            if used:
                self.end = (base + used + UNIT - 1) // UNIT
                break

    def _used(self, base: int) -> int:
        """Bytes up to the last one in the file that is not zero."""
        disk, path = self._files.disk, f"{self.path}/{file_name(base)}"
        try:
            fd = disk.open(path, write=False)
        except FileNotFoundError:
            return 0
        used = 0
        try:
            at = disk.next_data(fd, 0)
            while at is not None and at < self._size:
                data = disk.pread(fd, min(_BLOCK, self._size - at), at)
                if not data:
                    break
                left = _used_length(data)
                used = at + left if left else used
                at = disk.next_data(fd, at + len(data))
        finally:
            disk.close(fd)
        return used

    def first_now(self) -> int:
        """Offset at which the files begin by now: retention may have taken some since."""
        names = [name for name in self._files.disk.listdir(self.path) if len(name) == 20 and name.isdigit()]
        return int(names[0]) // UNIT if names else self.end

    def place(self, offset: int) -> tuple[str, int]:
        """File and byte in it of a unit."""
        position = offset * UNIT
        base = position - position % self._size
        return f"{self.path}/{file_name(base)}", position - base

    def read(self, start: int, stop: int) -> bytes:
        """The units [start, stop); what is missing reads as zeros."""
        parts = []
        while start < stop:
            path, at = self.place(start)
            count = min(stop - start, (self._size - at) // UNIT)
            parts.append(self._files.read(path, count * UNIT, at).ljust(count * UNIT, b"\0"))
            start += count
        return b"".join(parts)

    def chunks(
        self, start: int, stop: int
    ) -> Iterator[tuple[int, np.ndarray[tuple[int], np.dtype[np.void]]]]:
        """(offset of the first, units) of [start, stop), a few thousand at a time."""
        while start < stop:
            count = min(_CHUNK, stop - start)
            yield start, np.frombuffer(self.read(start, start + count), _UNIT_DTYPE)
            start += count


class QueueState:
    """How far one queue has been accounted for."""

    __slots__ = ("behind", "behind_at", "next", "queue_id", "topic", "units")

    def __init__(self, topic: str, queue_id: int, units: UnitFiles) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.units = units
        self.next = units.first
        self.behind = 0  # records whose unit would lie behind the queue's end …
        self.behind_at = -1  # … and the log position of the first of them

    @property
    def name(self) -> str:
        return f"{self.topic}/{self.queue_id}"


class QueueCheck:
    """All queues of a store. Make it, then walk the log and `take` its records, then `finish`."""

    def __init__(
        self,
        shape: Shape,
        files: ReadOnlyFiles,
        findings: Findings,
        pause: Callable[[float], None],
        known_topics: set[str] | None,
        hides: Callable[[str, int], bool] | None,
    ) -> None:
        """known_topics: names in topics.json, None if that table could not be read. hides(topic, position):
        whether a record belongs to a deleted topic; None
        when none was deleted."""
        self._shape = shape
        self._findings = findings
        self._pause = pause
        self._known = known_topics
        self._hides = hides
        self.log_min = shape.log_min  # to be raised when the log loses segments meanwhile
        self._files = files
        self._delays = shape.config.delay_levels_ms
        self._log = LogReader(files, shape.config.commit_log_dir, shape.config.mapped_file_size_commit_log)
        self._size = shape.config.consume_queue_file_size
        self._states: dict[tuple[str, int], QueueState] = {}
        for queue in shape.queues:
            self._check_files(queue)
            units = UnitFiles(files, queue, self._size)
            self._states[queue.topic, queue.queue_id] = QueueState(queue.topic, queue.queue_id, units)
        self.queues = len(self._states)
        self.units = sum(state.units.end - state.units.first for state in self._states.values())
        self.fillers = 0
        self.orphans = 0  # records of an earlier life of their topic
        self._gone: dict[str, int] = {}  # topics without queues and table entry -> their records

    def _check_files(self, queue: QueueFiles) -> None:
        for file in queue.files:
            if file.length != self._size and not self._shape.live:
                self._findings.add(
                    ERROR, "queue-length", file.path, file.length,
                    f"{file.length} bytes instead of {self._size}", REBUILD,
                )  # fmt: skip
        for before, after in zip(queue.files, queue.files[1:], strict=False):
            if after.base != before.base + self._size:
                missing = f"{queue.path}/{file_name(before.base + self._size)}"
                self._findings.add(ERROR, "queue-file-missing", missing, -1, "the file is missing", REBUILD)

    # -- records ----------------------------------------------------------------------------------

    def take(self, run: Run) -> None:
        """Check the units of these records, which follow those of the call before."""
        kind = run.sys_flag & _TRANSACTION_MASK
        queued = (kind != _PREPARED) & (kind != _ROLLBACK)
        if self._hides is not None:
            hides, names, topics = self._hides, run.names, run.topic.tolist()
            positions = enumerate(run.position.tolist())
            queued &= [not hides(names[topics[row]], position) for row, position in positions]
        rows = np.flatnonzero(queued)
        if not len(rows):
            return
        queue = run.topic[rows] << 32 | run.queue_id[rows] & 0xFFFFFFFF
        order = np.argsort(queue, kind="stable")
        rows = rows[order]
        expected = self._expected(run, rows).tobytes()
        offsets = run.queue_offset[rows]
        steps = np.cumsum(
            np.concatenate(([0], np.diff(offsets) == 1))
        )  # to tell whether a stretch has no gaps
        starts = np.concatenate(([0], np.flatnonzero(np.diff(queue[order])) + 1))
        stops = np.append(starts[1:], len(rows))
        unbroken = steps[stops - 1] - steps[starts] == stops - 1 - starts
        columns = (
            run.topic[rows[starts]],
            run.queue_id[rows[starts]],
            offsets[starts],
            starts,
            stops,
            unbroken,
        )
        for topic, queue_id, first, start, stop, whole in zip(*[c.tolist() for c in columns], strict=True):
            key = run.names[topic], queue_id
            state = self._states.get(key)
            if state is None:
                state = self._states[key] = self._absent(*key)
            after = first + stop - start
            units = expected[start * UNIT : stop * UNIT]
            in_order = whole and first >= state.next and after <= state.units.end
            if in_order and state.units.read(first, after) == units:
                self._accounted(state, first, after)
                continue
            for facts, unit in zip(run.facts(rows[start:stop]), _pieces(units), strict=True):
                self._take_one(state, facts, unit)

    def _expected(self, run: Run, rows: IntArray) -> NDArray[np.void]:
        """The units that these records ask for."""
        units = np.empty(len(rows), _UNIT_DTYPE)
        units["position"], units["size"] = run.position[rows], run.size[rows]
        texts = run.properties
        units["tags"] = [stored_tags_code(texts[row]) for row in rows.tolist()]
        if SCHEDULE_TOPIC in run.names:
            delayed = np.flatnonzero(run.topic[rows] == run.names.index(SCHEDULE_TOPIC))
            units["tags"][delayed] = [tags_code_of(each, self._delays) for each in run.facts(rows[delayed])]
        return units

    def _absent(self, topic: str, queue_id: int) -> QueueState:
        path = f"{self._shape.root}/consumequeue/{topic}/{queue_id}"
        return QueueState(
            topic, queue_id, UnitFiles(self._files, QueueFiles(topic, queue_id, path, []), self._size)
        )

    def _accounted(self, state: QueueState, start: int, stop: int) -> None:
        """Units [start, stop) have met their records."""
        self._gap(state, state.next, start)
        state.next = stop
        self.orphans += state.behind  # their offsets have been given out again since
        state.behind = 0

    def _take_one(self, state: QueueState, facts: Facts, expected: bytes) -> None:
        offset, units = facts.queue_offset, state.units
        if offset >= units.end:
            state.behind_at = facts.position if not state.behind else state.behind_at
            state.behind += 1
            return
        unit = units.read(offset, offset + 1) if offset >= units.first else bytes(UNIT)
        if unit != expected and self._shape.live:
            self._pause(SETTLE_S)
            unit = units.read(offset, offset + 1) if offset >= units.first else bytes(UNIT)
        if unit == expected:
            if offset >= state.next:
                self._accounted(state, offset, offset + 1)
            return
        position, size, tags = UNIT_STRUCT.unpack(unit)
        if self._lives_on(state, offset, facts.position, position):
            self.orphans += 1
            return
        if self._shape.live and offset < units.first_now():
            return  # retention has taken the file
        if offset >= state.next:
            self._gap(state, state.next, offset)
            state.next = offset + 1
        path, at = units.place(offset)
        if unit == bytes(UNIT):
            problem = "the unit is empty"
        else:
            wanted = UNIT_STRUCT.unpack(expected)
            names = ("log position", "size", "tags code")
            differing = [
                f"{name} {is_} instead of {should}"
                for name, is_, should in zip(names, (position, size, tags), wanted, strict=True)
                if is_ != should
            ]
            problem = ", ".join(differing)
        problem = f"unit {offset} of {state.name} (record at {facts.position}): {problem}"
        self._findings.add(ERROR, "queue-unit", path, at, problem, REBUILD)

    def _lives_on(self, state: QueueState, offset: int, position: int, unit_position: int) -> bool:
        """Whether the unit rightly belongs to another record: its topic was deleted and made again, or the
        log holds a message twice."""
        other = self._log.facts(unit_position) if unit_position != position else None
        return other is not None and (other.topic, other.queue_id, other.queue_offset) == (
            state.topic, state.queue_id, offset,
        )  # fmt: skip

    # -- units without a record -------------------------------------------------------------------

    def _gap(self, state: QueueState, start: int, stop: int) -> None:
        """Units [start, stop) for which the log had no record."""
        if start < stop and self._shape.live:
            start = max(start, state.units.first_now())
        for offset, units in state.units.chunks(start, stop):
            position, size = units["position"].astype(np.int64), units["size"].astype(np.int64)
            filler = (size == FILLER_SIZE) & (position == 0)
            self.fillers += int(np.count_nonzero(filler))
            expired = (position < self.log_min) & (size > 0) & (position >= 0)
            for number in np.flatnonzero(~(filler | expired)):
                self._lonely(state, offset + int(number), int(position[number]), int(size[number]))

    def _lonely(self, state: QueueState, offset: int, position: int, size: int) -> None:
        found = self._log.facts(position)
        queued = found is not None and found.sys_flag & _TRANSACTION_MASK not in (_PREPARED, _ROLLBACK)
        own = state.topic, state.queue_id, offset
        if found is not None and queued and (found.topic, found.queue_id, found.queue_offset) == own:
            return  # its record stands out of order, or its topic was deleted
        path, at = state.units.place(offset)
        repair = REBUILD
        if found is not None and not queued:
            what = (
                f"points at log position {position}, whose sysFlag {found.sys_flag} makes it a prepared or "
                "rolled back message, which has no unit"
            )
            repair = NOTHING
        elif found is not None:
            what = (
                f"points at log position {position}, which belongs to {found.topic}/{found.queue_id} "
                f"offset {found.queue_offset}"
            )
        elif position == 0 and size == 0:
            what = "is empty, and the log has no record for it"
        else:
            what = f"points at log position {position}, where no valid record is"
            repair = f"{NOTHING}; {REBUILD} for the unit"
        self._findings.add(ERROR, "queue-unit", path, at, f"unit {offset} of {state.name} {what}", repair)

    def finish(self, walk: LogWalk) -> None:
        """After the last record: units behind it, and records without units."""
        self.log_min = max(self.log_min, walk.log_min)
        for state in self._states.values():
            self._finish_units(state, walk.end)
            if state.behind and not self._shape.live:
                self._finish_records(state)
        for topic, count in sorted(self._gone.items()):
            self._findings.add(
                NOTE, "topic-deleted", self._shape.config.commit_log_dir, -1,
                f"{count} records of topic {topic}, which has no queues and is in no table: it was deleted",
            )  # fmt: skip
        if self.orphans:
            self._findings.add(
                NOTE, "superseded", self._shape.config.commit_log_dir, -1,
                f"{self.orphans} records whose queue offsets belong to later records: "
                "their topics were deleted and made again",
            )  # fmt: skip

    def _finish_units(self, state: QueueState, log_end: int) -> None:
        """Units of an unclean stop may point behind the log's end; everything else is a gap as others are."""
        stop = state.units.end
        if not self._shape.clean and not self._shape.live:
            for offset, units in state.units.chunks(state.next, state.units.end):
                beyond = np.flatnonzero(units["position"].astype(np.int64) >= log_end)
                if len(beyond):
                    stop = offset + int(beyond[0])
                    path, at = state.units.place(stop)
                    self._findings.add(
                        WARNING, "queue-ahead", path, at,
                        f"{state.units.end - stop} units of {state.name} from {stop} on point behind the "
                        f"log's end {log_end}", f"{NEXT_START} cuts them off",
                    )  # fmt: skip
                    break
        self._gap(state, state.next, stop)

    def _finish_records(self, state: QueueState) -> None:
        if state.units.end == 0 and self._known is not None and state.topic not in self._known:
            self._gone[state.topic] = self._gone.get(state.topic, 0) + state.behind
            return
        path, at = state.units.place(state.units.end)
        self._findings.add(
            ERROR if self._shape.clean else WARNING, "queue-short", path, at,
            f"{state.name} ends at {state.units.end}; {state.behind} records of the log, the first at "
            f"{state.behind_at}, have no unit", REBUILD if self._shape.clean else NEXT_START,
        )  # fmt: skip


def _pieces(units: bytes) -> list[bytes]:
    return [units[at : at + UNIT] for at in range(0, len(units), UNIT)]


def _used_length(data: bytes) -> int:
    """Bytes up to the last one that is not zero; most of a queue's last file is zeros."""
    stop = len(data)
    while stop and is_zero(data[max(0, stop - _PAGE) : stop]):
        stop = max(0, stop - _PAGE)
    return len(data[:stop].rstrip(b"\0"))
