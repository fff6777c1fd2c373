"""Consume queues held against the log: each unit has its record, each queued record its unit.

Records come in the order of the log, and so do the units of each queue. Runs of equal bytes are compared at
once; only what differs is looked at one by one.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.codes import SCHEDULE_TOPIC, TIMER_TOPIC
from cometmq.protocol.properties.values import java_hash, stored_tags_code, value_of
from cometmq.protocol.record.many import Run
from cometmq.protocol.record.one import Facts
from cometmq.store.base.config import CONSUME_QUEUE_UNIT as UNIT
from cometmq.store.base.config import CONSUME_QUEUES
from cometmq.store.base.read_only_files import ReadOnlyFiles
from cometmq.store.derived.consume_queue import FILLER_SIZE, UNIT_DTYPE, UNIT_STRUCT, file_name
from cometmq.store.derived.queue_ext import ExtUnits
from cometmq.store.derived.queue_table import names_a_directory
from cometmq.store.inspect.findings import ERROR, KEPT, NEXT_START, NOTE, NOTHING, REBUILD, WARNING, Findings
from cometmq.store.inspect.log_walk import RECHECK_DELAY_S, LogWalk
from cometmq.store.inspect.unit_files import UnitFiles
from cometmq.store.log.log_reader import LogReader
from cometmq.store.recovery.store_layout import QueueFiles, StoreLayout
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.writing.record_dispatch import WAITING_TOPICS, tags_code_of

_MAX_FAILED_SEARCHES = 100  # in vain, for the true place of a record
_MAX_FLIPS, _MAX_FLIPS_PER_QUEUE = 1 << 24, 1 << 20  # tried for tags codes; about 1.5 us each
_MAX_POSITIONS_BEHIND = 1 << 20  # positions kept of records behind a queue's end
_MAX_DELAYED_MESSAGES = 1 << 20  # delayed messages whose units are kept in mind
_MAX_PROPERTIES_BYTES = 2048  # bytes; every bit of them is tried
_MAX_DELAY_MS = 3650 * 86_400_000

LIGHT = "%LMQ%"
"""Topics of light message queues begin so; their units point at records of other topics."""

IntArray = NDArray[np.int64]


class Evidence:
    """What units know better than the log about single records, by log position, for `rebuild` to keep to.

    A record's CRC covers its body only, so a flip in its topic, queue id, queue offset, transaction type or
    tags leaves a valid record that contradicts its unit. The record does not tell what it was; its unit does.

    `places`: (topic, queue id, queue offset) of records whose own say is damaged; `tags`: tags codes of such
    records, and of delayed messages with other delays than the configuration gives; `superseded`: records
    whose place belongs to a later one, because their topic was deleted and made again.
    """

    __slots__ = ("_superseded", "places", "tags")

    def __init__(self) -> None:
        self.places: dict[int, tuple[str, int, int]] = {}
        self.tags: dict[int, int] = {}
        self._superseded = array("q")

    def supersede(self, positions: Iterable[int]) -> None:
        self._superseded.extend(positions)

    @property
    def superseded(self) -> NDArray[np.int64]:
        """Log positions, ascending."""
        return np.unique(np.array(self._superseded, np.int64))


@dataclass(slots=True, eq=False)
class QueueState:
    """How far one queue has been accounted for: up to the offset `next`."""

    topic: str
    queue_id: int
    units: UnitFiles
    next: int
    behind: int = 0  # records whose unit would lie behind the queue's end …
    behind_at: array[int] = field(default_factory=lambda: array("q"))  # … and where the first of them are
    flips: int = field(default_factory=lambda: _MAX_FLIPS_PER_QUEUE)  # that may be tried yet
    untried: int = 0  # units with another tags code for which no more were

    @property
    def name(self) -> str:
        return f"{self.topic}/{self.queue_id}"


@dataclass(eq=False)
class QueueCheck:
    """All queues of a store. Make it, then walk the log and `check` its records, then `finish`.

    known_topics: names in topics.json; deleted: which records do not count. None: that table cannot be read.
    """

    layout: StoreLayout
    files: ReadOnlyFiles
    findings: Findings
    pause: Callable[[float], None]
    known_topics: set[str] | None
    deleted: DeletedTopics | None

    def __post_init__(self) -> None:
        self.log_min = self.layout.log_min  # to be raised when the log loses segments meanwhile
        self._ext = ExtUnits(self.files, self.layout.root)
        self._delays = self.layout.config.delay_levels_ms
        self._log = LogReader(self.files, self.layout.config)
        self._size = self.layout.config.consume_queue_file_size
        self._states: dict[tuple[str, int], QueueState] = {}
        for queue in self.layout.queues:
            self._check_files(queue)
            self._states[queue.topic, queue.queue_id] = self._state(queue)
        self.queues = len(self._states)
        self.units = sum(state.units.end - state.units.first for state in self._states.values())
        self.fillers = 0
        self.orphans = 0  # records of an earlier life of their topic
        self._other_delays = 0  # delayed messages with other delays than those of the configuration
        self.evidence = Evidence()
        self._searches = _MAX_FAILED_SEARCHES
        self._flips = _MAX_FLIPS
        self._to_set_right: list[int] = []  # positions of records of the present run
        self._gone: dict[str, int] = {}  # topics without queues and table entry -> their records

    def _check_files(self, queue: QueueFiles) -> None:
        for file in queue.files:
            if file.length != self._size and not self.layout.live:
                problem = f"{file.length} bytes instead of {self._size}"
                self.findings.add(ERROR, "queue-length", file.path, file.length, problem, REBUILD)
        for before, after in zip(queue.files, queue.files[1:], strict=False):
            if after.base != before.base + self._size:
                missing = f"{queue.path}/{file_name(before.base + self._size)}"
                self.findings.add(ERROR, "queue-file-missing", missing, -1, "the file is missing", REBUILD)

    def _add(
        self, severity: str, kind: str, state: QueueState, offset: int, problem: str, repair: str = REBUILD
    ) -> None:
        """A finding about the unit of a queue at an offset."""
        self.findings.add(severity, kind, *state.units.place(offset), problem, repair)

    def _note(self, kind: str, problem: str) -> None:
        """A finding about the log."""
        self.findings.add(NOTE, kind, self.layout.config.commit_log_dirs[0], -1, problem)

    # -- records ----------------------------------------------------------------------------------

    def check(self, run: Run) -> None:
        """Check the units of the next records. A record that gives a wrong place gets the right one."""
        queued = run.queued
        if self.deleted:
            queued &= ~self.deleted.hidden(run)
        rows = np.flatnonzero(queued)
        if not len(rows):
            return
        queue = run.topic[rows] << 32 | run.queue_id[rows] & 0xFFFFFFFF
        order = np.argsort(queue, kind="stable")
        rows = rows[order]
        expected = self._expected(run, rows).tobytes()
        offsets = run.queue_offset[rows]
        steps = np.cumsum(np.concatenate(([0], np.diff(offsets) == 1)))  # tell whether a stretch has no gaps
        starts = np.concatenate(([0], np.flatnonzero(np.diff(queue[order])) + 1))
        stops = np.append(starts[1:], len(rows))
        unbroken = steps[stops - 1] - steps[starts] == stops - 1 - starts
        heads = rows[starts]
        columns = run.topic[heads], run.queue_id[heads], offsets[starts], starts, stops, unbroken
        for topic, queue_id, first, start, stop, whole in zip(*[c.tolist() for c in columns], strict=True):
            key = run.names[topic], queue_id
            state = self._states.get(key)
            if state is None:
                path = os.path.join(self.layout.config.location(CONSUME_QUEUES), key[0], str(key[1]))
                state = self._states[key] = self._state(QueueFiles(*key, path, []))
            after = first + stop - start
            units = expected[start * UNIT : stop * UNIT]
            in_order = whole and first >= state.next and after <= state.units.end
            if in_order and state.units.read(first, after) == units:
                self._accounted(state, first, after)
                continue
            for facts, unit in zip(run.facts(rows[start:stop]), _pieces(units), strict=True):
                self._check_one(state, facts, unit)
        self._set_right(run)

    def _expected(self, run: Run, rows: IntArray) -> NDArray[np.void]:
        """The units that these records ask for."""
        units = np.empty(len(rows), UNIT_DTYPE)
        units["position"], units["size"] = run.position[rows], run.size[rows]
        texts = run.properties
        units["tags"] = [stored_tags_code(texts[row]) for row in rows.tolist()]
        for topic in WAITING_TOPICS.intersection(run.names):
            waiting = np.flatnonzero(run.topic[rows] == run.names.index(topic))
            units["tags"][waiting] = [tags_code_of(each, self._delays) for each in run.facts(rows[waiting])]
        return units

    def _set_right(self, run: Run) -> None:
        for position in self._to_set_right:
            row = int(np.searchsorted(run.position, position))
            if row < len(run.position) and run.position[row] == position:
                topic, run.queue_id[row], run.queue_offset[row] = self.evidence.places[position]
                if topic not in run.names:
                    run.names.append(topic)
                run.topic[row] = run.names.index(topic)
        self._to_set_right.clear()

    def _state(self, queue: QueueFiles) -> QueueState:
        units = UnitFiles(self.files, queue, self._size)
        return QueueState(queue.topic, queue.queue_id, units, units.first)

    def _accounted(self, state: QueueState, start: int, stop: int) -> None:
        """Units [start, stop) have met their records."""
        self._gap(state, state.next, start)
        state.next = stop
        if state.behind:  # their offsets have been given out again since
            self.orphans += state.behind
            self.evidence.supersede(state.behind_at)
            state.behind, state.behind_at = 0, array("q")

    def _check_one(self, state: QueueState, facts: Facts, expected: bytes) -> None:
        offset, units = facts.queue_offset, state.units
        unit = self._unit(state, offset)
        if unit != expected and self.layout.live and offset < units.end:
            self.pause(RECHECK_DELAY_S)
            unit = self._unit(state, offset)
        if unit == expected or self._by_address(state, unit, expected):
            if offset >= state.next:
                self._accounted(state, offset, offset + 1)
            return
        position, size, _ = UNIT_STRUCT.unpack(unit)
        mine = position == facts.position and size == facts.size
        new = self.layout.live and offset >= units.end
        if not mine and (facts.position in self.evidence.places or (not new and self._is_elsewhere(facts))):
            return
        if offset >= units.end:
            if not state.behind or (units.end and state.behind < _MAX_POSITIONS_BEHIND):
                state.behind_at.append(facts.position)
            state.behind += 1
            return
        if self._lives_on(state, offset, facts.position, position):
            self.orphans += 1
            self.evidence.supersede(array("q", [facts.position]))
            return
        if self.layout.live and offset < units.first_now():
            return  # retention has taken the file
        if offset >= state.next:
            self._gap(state, state.next, offset)
            state.next = offset + 1
        self._unlike(state, facts, unit, expected)

    def _by_address(self, state: QueueState, unit: bytes, expected: bytes) -> bool:
        """Whether the unit has in place of the expected tags code the address of an ext unit that has it."""
        code, wanted = UNIT_STRUCT.unpack(unit)[2], UNIT_STRUCT.unpack(expected)[2]
        return unit[:12] == expected[:12] and self._ext.tags_code(state.topic, state.queue_id, code) == wanted

    def _unit(self, state: QueueState, offset: int) -> bytes:
        """The unit at an offset; zeros where the queue has none."""
        there = state.units.first <= offset < state.units.end
        return state.units.read(offset, offset + 1) if there else bytes(UNIT)

    def _points_at(self, state: QueueState, offset: int, position: int, size: int) -> bool:
        return UNIT_STRUCT.unpack(self._unit(state, offset))[:2] == (position, size)

    def _unlike(self, state: QueueState, facts: Facts, unit: bytes, expected: bytes) -> None:
        """A unit that is not the one that its record asks for."""
        is_, wanted = UNIT_STRUCT.unpack(unit), UNIT_STRUCT.unpack(expected)
        where = f"unit {facts.queue_offset} of {state.name} (record at {facts.position})"
        if is_[:2] == wanted[:2] and state.topic == SCHEDULE_TOPIC and _is_delay(is_[2] - facts.store_ms):
            self._other_delays += 1
            if len(self.evidence.tags) < _MAX_DELAYED_MESSAGES:
                self.evidence.tags[facts.position] = is_[2]
            return
        if (
            is_[:2] == wanted[:2]
            and state.topic == TIMER_TOPIC
            and is_[2] == stored_tags_code(facts.properties)
        ):
            return  # as Apache's broker writes it
        if is_[:2] == wanted[:2] and self._is_flip(state, facts.properties, is_[2], wanted[2]):
            self.evidence.tags[facts.position] = is_[2]
            self._record_damaged(facts, f"a flipped bit in its TAGS or beside them: {where} has another code")
            return
        names = ("log position", "size", "tags code")
        differing = [
            f"{name} {found} instead of {should}"
            for name, found, should in zip(names, is_, wanted, strict=True)
            if found != should
        ]
        problem = "the unit is empty" if unit == bytes(UNIT) else ", ".join(differing)
        self._add(ERROR, "queue-unit", state, facts.queue_offset, f"{where}: {problem}")

    def _is_flip(self, state: QueueState, properties: bytes, code: int, expected: int) -> bool:
        """Whether a flipped bit in the record's properties explains the tags code, as far as there is time to
        try: flipped bits are few, so where many codes are wrong the units are."""
        if (code ^ expected).bit_count() == 1 or len(properties) > _MAX_PROPERTIES_BYTES:
            return False
        tries = 8 * len(properties)
        if tries > min(state.flips, self._flips):
            state.untried += 1
            return False
        state.flips -= tries
        self._flips -= tries
        return _tags_flipped(properties, code)

    def _is_elsewhere(self, facts: Facts) -> bool:
        """Whether this record's unit is in another place than the record says: then the record is damaged."""
        if self._searches <= 0:
            return False
        position, size, offset = facts.position, facts.size, facts.queue_offset
        for (topic, queue_id), state in self._states.items():
            same = (topic == facts.topic) + (queue_id == facts.queue_id)
            place = state.next if same == 2 else offset
            if same and self._points_at(state, place, position, size):
                self._misplaced(facts, (topic, queue_id, place))
                return True
        self._searches -= 1
        return False

    def _misplaced(self, facts: Facts, place: tuple[str, int, int]) -> None:
        """The record of a unit at `place` says that it belongs elsewhere."""
        self.evidence.places[facts.position] = place
        self._to_set_right.append(facts.position)
        names = ("topic", "queue id", "queue offset")
        own = facts.topic, facts.queue_id, facts.queue_offset
        wrong = [name for name, is_, should in zip(names, own, place, strict=True) if is_ != should]
        if not wrong:
            wrong = [f"sysFlag {facts.sys_flag} (it makes it a prepared or rolled back message)"]
        topic, queue_id, offset = place
        self._record_damaged(
            facts, f"{', '.join(wrong)}: its unit is {offset} of {topic}/{queue_id}, "
            f"it says {facts.queue_offset} of {facts.topic}/{facts.queue_id}",
        )  # fmt: skip

    def _record_damaged(self, facts: Facts, problem: str) -> None:
        at = facts.position % self.layout.config.mapped_file_size_commit_log
        problem = f"the record at {facts.position} is damaged where no checksum is: {problem}"
        self.findings.add(ERROR, "record-field", self._log.path_of(facts.position), at, problem, KEPT)

    def _lives_on(self, state: QueueState, offset: int, position: int, unit_position: int) -> bool:
        """Whether the unit belongs to another record: of the topic's next life, or the same message twice."""
        other = self._log.facts(unit_position) if unit_position != position else None
        place = state.topic, state.queue_id, offset
        return other is not None and (other.topic, other.queue_id, other.queue_offset) == place

    # -- units without a record -------------------------------------------------------------------

    def _gap(self, state: QueueState, start: int, stop: int) -> None:
        """Units [start, stop) for which the log had no record."""
        if start < stop and self.layout.live:
            start = max(start, state.units.first_now())
        for offset, units in state.units.chunks(start, stop):
            position, size = units["position"].astype(np.int64), units["size"].astype(np.int64)
            filler = (size == FILLER_SIZE) & (position == 0)
            self.fillers += int(np.count_nonzero(filler))
            expired = (position < self.log_min) & (size > 0) & (position >= 0)
            empty = (position == 0) & (size == 0) & (units["tags"] == 0)
            for stretch in _stretches(empty):
                self._empty(state, offset + int(stretch[0]), len(stretch))
            for number in np.flatnonzero(~(filler | expired | empty)):
                self._lonely(state, offset + int(number), int(position[number]), int(size[number]))

    def _empty(self, state: QueueState, offset: int, count: int) -> None:
        units = f"units {offset} to {offset + count - 1}" if count > 1 else f"unit {offset}"
        problem = f"{units} of {state.name}: empty, and the log has no record for it"
        self._add(ERROR, "queue-unit", state, offset, problem)

    def _lonely(self, state: QueueState, offset: int, position: int, size: int) -> None:
        found = self._log.facts(position)
        queued = found is not None and found.queued
        own = state.topic, state.queue_id, offset
        if found is not None and queued and (found.topic, found.queue_id, found.queue_offset) == own:
            return  # its record stands out of order, or its topic was deleted
        if position in self.evidence.places or state.topic.startswith(LIGHT):
            return
        if found is not None and found.size == size:
            claimed = self._states.get((found.topic, found.queue_id))
            owned = claimed is not None and self._points_at(claimed, found.queue_offset, position, size)
            if not (queued and owned):
                self._misplaced(found, own)
                return
        repair, what = f"{NOTHING}; {REBUILD} for the unit", "where no valid record is"
        if found is not None:
            owner = f"{found.topic}/{found.queue_id} offset {found.queue_offset}"
            repair, what = REBUILD, f"which belongs to {owner}"
        problem = f"unit {offset} of {state.name} points at log position {position}, {what}"
        self._add(ERROR, "queue-unit", state, offset, problem, repair)

    def finish(self, walk: LogWalk) -> None:
        """After the last record: units behind it, and records without units."""
        self.log_min = max(self.log_min, walk.log_min)
        for state in self._states.values():
            self._finish_units(state, walk.end)
        for state in self._states.values():
            if state.behind and not self.layout.live:
                self._finish_records(state)
        for topic, count in sorted(self._gone.items()):
            what = "which has no queues and is in no table: it was deleted"
            self._note("topic-deleted", f"{count} records of topic {topic}, {what}")
        if self._other_delays:
            path = os.path.join(self.layout.config.location(CONSUME_QUEUES), SCHEDULE_TOPIC)
            problem = (
                f"{self._other_delays} delayed messages have other delays than messageDelayLevel="
                f"{self.layout.config.message_delay_level!r} gives them: their broker had other levels"
            )
            self.findings.add(NOTE, "delays", path, -1, problem)
        if self.orphans:
            what = "belong to later records: their topics were deleted and made again"
            self._note("superseded", f"{self.orphans} records whose queue offsets {what}")

    def _finish_units(self, state: QueueState, log_end: int) -> None:
        """Units of an unclean stop may point behind the log's end; everything else is a gap as others are."""
        stop = state.units.end
        if not self.layout.clean and not self.layout.live:
            for offset, units in state.units.chunks(state.next, state.units.end):
                beyond = np.flatnonzero(units["position"].astype(np.int64) >= log_end)
                if len(beyond):
                    stop = offset + int(beyond[0])
                    units_behind = f"{state.units.end - stop} units of {state.name} from {stop} on"
                    problem = f"{units_behind} point behind the log's end {log_end}"
                    self._add(WARNING, "queue-ahead", state, stop, problem, f"{NEXT_START} cuts them off")
                    break
        self._gap(state, state.next, stop)

        if state.untried:
            problem = (
                f"{state.untried} more units of {state.name} have other tags codes than their records; "
                "whether flipped bits in the records explain them was not tried: they count as damaged units"
            )
            self._add(NOTE, "tags-untried", state, state.units.first, problem)

    def _finish_records(self, state: QueueState) -> None:
        if not names_a_directory(state.topic):
            self.findings.add(
                ERROR, "topic-name", self.layout.config.commit_log_dirs[0], -1,
                f"{state.behind} records, the first at {state.behind_at[0]}, have a topic that can name no "
                f"directory: {state.topic}; they are not served", NOTHING,
            )  # fmt: skip
            return
        if state.units.end == 0 and self.known_topics is not None and state.topic not in self.known_topics:
            self._gone[state.topic] = self._gone.get(state.topic, 0) + state.behind
            return
        count = state.behind - sum(position in self.evidence.places for position in state.behind_at)
        if not count:
            return
        end = state.units.end
        records = f"{count} records of the log, the first at {state.behind_at[0]}"
        problem = f"{state.name} ends at {end}; {records}, have no unit"
        self._add(ERROR if self.layout.clean else WARNING, "queue-short", state, end, problem)


def _tags_flipped(properties: bytes, code: int) -> bool:
    """Whether the properties have this tags code with one of their bits flipped."""
    flipped = bytearray(properties)
    for at in range(len(properties)):
        for bit in range(8):
            flipped[at] ^= 1 << bit
            tags = value_of(bytes(flipped), b"TAGS")
            if tags and java_hash(tags.decode("utf-8", "replace")) == code:
                return True
            flipped[at] ^= 1 << bit
    return False


def _is_delay(ms: int) -> bool:
    """Whether some level may be this long. Levels are whole seconds, which no flipped bit adds or takes."""
    return 0 <= ms <= _MAX_DELAY_MS and ms % 1000 == 0


def _pieces(units: bytes) -> list[bytes]:
    return [units[at : at + UNIT] for at in range(0, len(units), UNIT)]


def _stretches(chosen: NDArray[np.bool_]) -> list[IntArray]:
    """The numbers that are chosen, in stretches that follow each other."""
    numbers = np.flatnonzero(chosen)
    return np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1) if len(numbers) else []
