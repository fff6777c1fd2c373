"""The comparison of the consume queues with the log: each unit must have its record, and vice versa.

The units of each queue are in the order of the records in the log. So the expected units of consecutive
records are compared with the existing ones as bytes, many at a time. Only differences are examined one by
one.
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
from cometmq.protocol.record.many import RecordGroup
from cometmq.protocol.record.one import Facts
from cometmq.store.base.config import CONSUME_QUEUE_UNIT as UNIT
from cometmq.store.base.config import CONSUME_QUEUES
from cometmq.store.base.files import ReadOnlyFiles
from cometmq.store.derived.consume_queue import FILLER_SIZE, UNIT_DTYPE, UNIT_STRUCT, file_name
from cometmq.store.derived.queue_ext import ExtUnits
from cometmq.store.derived.queue_table import names_a_directory
from cometmq.store.inspect.findings import ERROR, KEPT, NEXT_START, NOTE, NOTHING, REBUILD, WARNING, Findings
from cometmq.store.inspect.log_walk import RECHECK_DELAY_S, LogWalk
from cometmq.store.inspect.unit_files import UnitFiles
from cometmq.store.log.log_reader import LogReader
from cometmq.store.recovery.store_layout import QueueFiles, StoreLayout
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.writing.record_dispatch import set_delivery_times

# The maximum number of failed searches of each of two kinds: searches for the queue to which a record really
# belongs, and searches for a flipped bit in a record's properties. Few records are damaged, and a search for
# a bit takes up to 25 ms. After the last of these searches, each further difference counts as damage of the
# unit.
_MAX_FAILED_SEARCHES = 100
_MAX_POSITIONS_BEHIND = 1 << 20  # Maximum number of records after a queue's end whose positions are kept
_MAX_DELAYED_MESSAGES = 1 << 20  # Maximum number of delayed messages whose tags codes are remembered
_MAX_PROPERTIES_BYTES = 2048  # Maximum length of properties, in bytes, in which a flipped bit is searched for
_MAX_DELAY_MS = 3650 * 86_400_000

LIGHT = "%LMQ%"
"""The prefix of light message queues. The units of such a queue point at records of other topics."""

IntArray = NDArray[np.int64]


class Evidence:
    """The facts about single records in which `rebuild` trusts the old queue units more than the log.

    The CRC of a record covers its body only. So a flipped bit in topic, queue id, queue offset, transaction
    type or tags leaves a valid record that contradicts its unit. Only the unit shows the original value. Keys
    are log positions.

    Attributes:
        queue_offsets: Topic, queue id and queue offset of records in which one of them is damaged.
        tags: Tags codes of records with damaged tags, and of delayed messages whose delays are not in the
            configuration.
        superseded: Records whose queue offset now belongs to a later record, because their topic was deleted
            and created again.
    """

    def __init__(self) -> None:
        self.queue_offsets: dict[int, tuple[str, int, int]] = {}
        self.tags: dict[int, int] = {}
        self._superseded = array("q")

    def supersede(self, positions: Iterable[int]) -> None:
        self._superseded.extend(positions)

    @property
    def superseded(self) -> NDArray[np.int64]:
        """The log positions, ascending, of records whose queue offset now belongs to a later record."""
        return np.unique(np.array(self._superseded, np.int64))


@dataclass(slots=True, eq=False)
class QueueProgress:
    """The progress of the check of one queue: the units before offset `next` have been checked."""

    topic: str
    queue_id: int
    units: UnitFiles
    next: int
    behind: int = 0  # Number of records whose offsets lie after the queue's last unit
    # Log positions of the records that `behind` counts
    behind_at: array[int] = field(default_factory=lambda: array("q"))

    @property
    def name(self) -> str:
        return f"{self.topic}/{self.queue_id}"


@dataclass(eq=False)
class QueueCheck:
    """The check of all queues of a store. Call `check_records` with the records of the log, then `finish`.

    Attributes:
        known_topics: The names in topics.json; None if it cannot be read.
        deleted: The deleted topics, whose records do not count; None if the table cannot be read.
    """

    layout: StoreLayout
    files: ReadOnlyFiles
    findings: Findings
    pause: Callable[[float], None]
    known_topics: set[str] | None
    deleted: DeletedTopics | None

    def __post_init__(self) -> None:
        # The beginning of the log. The caller increases it when retention deletes the first segment.
        self.log_min = self.layout.log_min
        self._ext = ExtUnits(self.files, self.layout.root)
        self._delays = self.layout.config.delay_levels_ms
        self._log = LogReader(self.files, self.layout.config)
        self._size = self.layout.config.consume_queue_file_size
        self._states: dict[tuple[str, int], QueueProgress] = {}
        for queue in self.layout.queues:
            self._check_files(queue)
            self._states[queue.topic, queue.queue_id] = self._state(queue)
        self.queues = len(self._states)
        self.units = sum(state.units.end - state.units.first for state in self._states.values())
        self.fillers = 0
        self.orphans = 0  # number of records whose topic was deleted and created again
        self._other_delays = 0  # Number of delayed messages whose delay is no configured delay level
        self.evidence = Evidence()
        self._searches = _MAX_FAILED_SEARCHES
        self._bit_searches = _MAX_FAILED_SEARCHES
        # Log positions of the records in the current group whose topic, queue id or queue offset is damaged
        self._to_correct: list[int] = []
        # For each topic that has neither queues nor an entry in the topic table: its number of records
        self._gone: dict[str, int] = {}

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
        self, severity: str, kind: str, state: QueueProgress, offset: int, problem: str, repair: str = REBUILD
    ) -> None:
        self.findings.add(severity, kind, *state.units.location(offset), problem, repair)

    def _note(self, kind: str, problem: str) -> None:
        self.findings.add(NOTE, kind, self.layout.config.commit_log_dirs[0], -1, problem)

    # -- records ----------------------------------------------------------------------------------

    def check_records(self, group: RecordGroup) -> None:
        """Compare the next records of the log with their units, and correct damaged places in `group`."""
        queued = group.queued
        if self.deleted:
            queued &= ~self.deleted.hidden(group)
        rows = np.flatnonzero(queued)
        if not len(rows):
            return
        queue = group.topic[rows] << 32 | group.queue_id[rows] & 0xFFFFFFFF
        order = np.argsort(queue, kind="stable")
        rows = rows[order]
        expected = self._expected(group, rows).tobytes()
        offsets = group.queue_offset[rows]
        # `steps` counts, for all queues at once, the offsets that are 1 greater than the previous record's
        # offset. The n records of a queue have no gap if the count grows by n - 1 from the first to the last.
        steps = np.cumsum(np.concatenate(([0], np.diff(offsets) == 1)))
        starts = np.concatenate(([0], np.flatnonzero(np.diff(queue[order])) + 1))
        stops = np.append(starts[1:], len(rows))
        unbroken = steps[stops - 1] - steps[starts] == stops - 1 - starts
        heads = rows[starts]
        columns = group.topic[heads], group.queue_id[heads], offsets[starts], starts, stops, unbroken
        for topic, queue_id, first, start, stop, whole in zip(*[c.tolist() for c in columns], strict=True):
            key = group.names[topic], queue_id
            state = self._states.get(key)
            if state is None:
                path = os.path.join(self.layout.config.location(CONSUME_QUEUES), key[0], str(key[1]))
                state = self._states[key] = self._state(QueueFiles(*key, path, []))
            after = first + stop - start
            units = expected[start * UNIT : stop * UNIT]
            in_order = whole and first >= state.next and after <= state.units.end
            if in_order and state.units.read(first, after) == units:
                self._account_for(state, first, after)
                continue
            for facts, unit in zip(group.facts(rows[start:stop]), _pieces(units), strict=True):
                self._check_record(state, facts, unit)
        self._correct(group)

    def _expected(self, group: RecordGroup, rows: IntArray) -> NDArray[np.void]:
        units = np.empty(len(rows), UNIT_DTYPE)
        units["position"], units["size"] = group.position[rows], group.size[rows]
        texts = group.properties
        units["tags"] = [stored_tags_code(texts[row]) for row in rows.tolist()]
        set_delivery_times(units["tags"], group, rows, self._delays)
        return units

    def _correct(self, group: RecordGroup) -> None:
        for position in self._to_correct:
            row = int(np.searchsorted(group.position, position))
            if row < len(group.position) and group.position[row] == position:
                topic, group.queue_id[row], group.queue_offset[row] = self.evidence.queue_offsets[position]
                if topic not in group.names:
                    group.names.append(topic)
                group.topic[row] = group.names.index(topic)
        self._to_correct.clear()

    def _state(self, queue: QueueFiles) -> QueueProgress:
        units = UnitFiles(self.files, queue, self._size)
        return QueueProgress(queue.topic, queue.queue_id, units, units.first)

    def _account_for(self, state: QueueProgress, start: int, stop: int) -> None:
        """Mark the units [start, stop) as checked, after examining those before, which have no record."""
        self._check_unmatched(state, state.next, start)
        state.next = stop
        # These later records have units, but the older records that `behind` counts have none. So the older
        # records are superseded: their topic was deleted and created again.
        if state.behind:
            self.orphans += state.behind
            self.evidence.supersede(state.behind_at)
            state.behind, state.behind_at = 0, array("q")

    def _check_record(self, state: QueueProgress, facts: Facts, expected: bytes) -> None:
        offset, units = facts.queue_offset, state.units
        unit = self._unit(state, offset)
        if unit != expected and self.layout.live and offset < units.end:
            self.pause(RECHECK_DELAY_S)
            unit = self._unit(state, offset)
        if unit == expected or self._is_ext_address(state, unit, expected):
            if offset >= state.next:
                self._account_for(state, offset, offset + 1)
            return
        position, size, _ = UNIT_STRUCT.unpack(unit)
        mine = position == facts.position and size == facts.size
        new = self.layout.live and offset >= units.end
        if not mine and (
            facts.position in self.evidence.queue_offsets or (not new and self._find_true_queue(facts))
        ):
            return
        if offset >= units.end:
            if not state.behind or (units.end and state.behind < _MAX_POSITIONS_BEHIND):
                state.behind_at.append(facts.position)
            state.behind += 1
            return
        if self._belongs_to_another(state, offset, facts.position, position):
            self.orphans += 1
            self.evidence.supersede(array("q", [facts.position]))
            return
        if self.layout.live and offset < units.first_now():
            return  # Retention has deleted the queue file, so it is no error that the record has no unit
        if offset >= state.next:
            self._check_unmatched(state, state.next, offset)
            state.next = offset + 1
        self._report_difference(state, facts, unit, expected)

    def _is_ext_address(self, state: QueueProgress, unit: bytes, expected: bytes) -> bool:
        """Return whether the unit holds the address of an ext unit with the expected tags code."""
        code, wanted = UNIT_STRUCT.unpack(unit)[2], UNIT_STRUCT.unpack(expected)[2]
        return unit[:12] == expected[:12] and self._ext.tags_code(state.topic, state.queue_id, code) == wanted

    def _unit(self, state: QueueProgress, offset: int) -> bytes:
        """Return the unit at an offset, zeros if there is none."""
        there = state.units.first <= offset < state.units.end
        return state.units.read(offset, offset + 1) if there else bytes(UNIT)

    def _points_at(self, state: QueueProgress, offset: int, position: int, size: int) -> bool:
        return UNIT_STRUCT.unpack(self._unit(state, offset))[:2] == (position, size)

    def _report_difference(self, state: QueueProgress, facts: Facts, unit: bytes, expected: bytes) -> None:
        is_, wanted = UNIT_STRUCT.unpack(unit), UNIT_STRUCT.unpack(expected)
        where = f"unit {facts.queue_offset} of {state.name} (record at {facts.position})"
        if is_[:2] == wanted[:2] and state.topic == SCHEDULE_TOPIC and _is_delay(is_[2] - facts.store_ms):
            self._other_delays += 1
            if len(self.evidence.tags) < _MAX_DELAYED_MESSAGES:
                self.evidence.tags[facts.position] = is_[2]
            return
        hashed = state.topic == TIMER_TOPIC and is_[2] == stored_tags_code(facts.properties)
        if is_[:2] == wanted[:2] and hashed:
            return  # For a timer message, Apache's broker stores the tags' hash, CometMQ the delivery time
        if is_[:2] == wanted[:2] and self._is_flip(facts.properties, is_[2], wanted[2]):
            self.evidence.tags[facts.position] = is_[2]
            problem = f"a flipped bit in its TAGS or beside them: {where} has another code"
            self._report_damaged_record(facts, problem)
            return
        names = ("log position", "size", "tags code")
        differing = [
            f"{name} {found} instead of {should}"
            for name, found, should in zip(names, is_, wanted, strict=True)
            if found != should
        ]
        problem = "the unit is empty" if unit == bytes(UNIT) else ", ".join(differing)
        self._add(ERROR, "queue-unit", state, facts.queue_offset, f"{where}: {problem}")

    def _is_flip(self, properties: bytes, code: int, expected: int) -> bool:
        """Return whether a flipped bit in a record's properties explains the tags code `code` of its unit."""
        too_long = len(properties) > _MAX_PROPERTIES_BYTES
        if (code ^ expected).bit_count() == 1 or too_long or self._bit_searches <= 0:
            return False
        found = _tags_flipped(properties, code)
        self._bit_searches -= not found
        return found

    def _find_true_queue(self, facts: Facts) -> bool:
        """Search for a record's unit in other queues and offsets. If it is found, report it, return True."""
        if self._searches <= 0:
            return False
        position, size, offset = facts.position, facts.size, facts.queue_offset
        for (topic, queue_id), state in self._states.items():
            same = (topic == facts.topic) + (queue_id == facts.queue_id)
            place = state.next if same == 2 else offset
            if same and self._points_at(state, place, position, size):
                self._report_misplaced(facts, (topic, queue_id, place))
                return True
        self._searches -= 1
        return False

    def _report_misplaced(self, facts: Facts, place: tuple[str, int, int]) -> None:
        """Report a record whose unit is at `place` (topic, queue id, offset), not where the record says."""
        self.evidence.queue_offsets[facts.position] = place
        self._to_correct.append(facts.position)
        names = ("topic", "queue id", "queue offset")
        own = facts.topic, facts.queue_id, facts.queue_offset
        wrong = [name for name, is_, should in zip(names, own, place, strict=True) if is_ != should]
        if not wrong:
            wrong = [f"sysFlag {facts.sys_flag} (it makes it a prepared or rolled back message)"]
        topic, queue_id, offset = place
        self._report_damaged_record(
            facts, f"{', '.join(wrong)}: its unit is {offset} of {topic}/{queue_id}, "
            f"the record has {facts.queue_offset} of {facts.topic}/{facts.queue_id}",
        )  # fmt: skip

    def _report_damaged_record(self, facts: Facts, problem: str) -> None:
        at = facts.position % self.layout.config.mapped_file_size_commit_log
        problem = f"the record at {facts.position} is damaged outside its checksum: {problem}"
        self.findings.add(ERROR, "record-field", self._log.path_of(facts.position), at, problem, KEPT)

    def _belongs_to_another(
        self, state: QueueProgress, offset: int, position: int, unit_position: int
    ) -> bool:
        """Return whether the record at `unit_position`, another one, names this queue and `offset`, too.

        That is so if the topic was deleted and created again, or if one record is a duplicate.
        """
        other = self._log.facts(unit_position) if unit_position != position else None
        place = state.topic, state.queue_id, offset
        return other is not None and (other.topic, other.queue_id, other.queue_offset) == place

    # -- units without records ---------------------------------------------------------------------

    def _check_unmatched(self, state: QueueProgress, start: int, stop: int) -> None:
        if start < stop and self.layout.live:
            start = max(start, state.units.first_now())
        for offset, units in state.units.chunks(start, stop):
            position, size = units["position"].astype(np.int64), units["size"].astype(np.int64)
            filler = (size == FILLER_SIZE) & (position == 0)
            self.fillers += int(np.count_nonzero(filler))
            expired = (position < self.log_min) & (size > 0) & (position >= 0)
            empty = (position == 0) & (size == 0) & (units["tags"] == 0)
            for stretch in _consecutive_groups(empty):
                self._report_empty(state, offset + int(stretch[0]), len(stretch))
            for number in np.flatnonzero(~(filler | expired | empty)):
                place = int(position[number]), int(size[number])
                self._report_surplus_unit(state, offset + int(number), *place)

    def _report_empty(self, state: QueueProgress, offset: int, count: int) -> None:
        units = f"units {offset} to {offset + count - 1}" if count > 1 else f"unit {offset}"
        problem = f"{units} of {state.name}: empty, and the log has no record for it"
        self._add(ERROR, "queue-unit", state, offset, problem)

    def _report_surplus_unit(self, state: QueueProgress, offset: int, position: int, size: int) -> None:
        found = self._log.facts(position)
        queued = found is not None and found.queued
        own = state.topic, state.queue_id, offset
        if found is not None and queued and (found.topic, found.queue_id, found.queue_offset) == own:
            return  # The record is out of order in its queue, or its topic was deleted
        if position in self.evidence.queue_offsets or state.topic.startswith(LIGHT):
            return
        if found is not None and found.size == size:
            claimed = self._states.get((found.topic, found.queue_id))
            owned = claimed is not None and self._points_at(claimed, found.queue_offset, position, size)
            if not (queued and owned):
                self._report_misplaced(found, own)
                return
        repair, what = f"{NOTHING}; {REBUILD} for the unit", "where no valid record is"
        if found is not None:
            owner = f"{found.topic}/{found.queue_id} offset {found.queue_offset}"
            repair, what = REBUILD, f"which belongs to {owner}"
        problem = f"unit {offset} of {state.name} points at log position {position}, {what}"
        self._add(ERROR, "queue-unit", state, offset, problem, repair)

    def finish(self, walk: LogWalk) -> None:
        """Check the units after the last record, and report records without units."""
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
            levels = f"messageDelayLevel={self.layout.config.message_delay_level!r}"
            problem = f"delayed messages have delays that are not in {levels}: their broker had other levels"
            self.findings.add(NOTE, "delays", path, -1, f"{self._other_delays} {problem}")
        if self.orphans:
            what = "belong to later records: their topics were deleted and created again"
            self._note("superseded", f"{self.orphans} records whose queue offsets {what}")

    def _finish_units(self, state: QueueProgress, log_end: int) -> None:
        """Check the remaining units of a queue. After an unclean stop, some may point past the log's end."""
        stop = state.units.end
        if not self.layout.clean and not self.layout.live:
            for offset, units in state.units.chunks(state.next, state.units.end):
                beyond = np.flatnonzero(units["position"].astype(np.int64) >= log_end)
                if len(beyond):
                    stop = offset + int(beyond[0])
                    units_behind = f"{state.units.end - stop} units of {state.name} from {stop} on"
                    problem = f"{units_behind} point after the log's end {log_end}"
                    self._add(WARNING, "queue-ahead", state, stop, problem, f"{NEXT_START} cuts them off")
                    break
        self._check_unmatched(state, state.next, stop)

    def _finish_records(self, state: QueueProgress) -> None:
        if not names_a_directory(state.topic):
            self.findings.add(
                ERROR, "topic-name", self.layout.config.commit_log_dirs[0], -1,
                f"{state.behind} records, the first at {state.behind_at[0]}, have an invalid "
                f"topic: {state.topic}; they are not served", NOTHING,
            )  # fmt: skip
            return
        if state.units.end == 0 and self.known_topics is not None and state.topic not in self.known_topics:
            self._gone[state.topic] = self._gone.get(state.topic, 0) + state.behind
            return
        count = state.behind - sum(position in self.evidence.queue_offsets for position in state.behind_at)
        if not count:
            return
        end = state.units.end
        records = f"{count} records of the log, the first at {state.behind_at[0]}"
        problem = f"{state.name} ends at {end}; {records}, have no unit"
        self._add(ERROR if self.layout.clean else WARNING, "queue-short", state, end, problem)


def _tags_flipped(properties: bytes, code: int) -> bool:
    """Return whether, after flipping some one bit of `properties`, their tags code is `code`."""
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
    """Return whether `ms` may be a level's delay. A flipped bit hardly ever leads to whole seconds."""
    return 0 <= ms <= _MAX_DELAY_MS and ms % 1000 == 0


def _pieces(units: bytes) -> list[bytes]:
    return [units[at : at + UNIT] for at in range(0, len(units), UNIT)]


def _consecutive_groups(chosen: NDArray[np.bool_]) -> list[IntArray]:
    """Return the indexes of the true elements of a boolean array, in groups of consecutive indexes."""
    numbers = np.flatnonzero(chosen)
    return np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1) if len(numbers) else []
