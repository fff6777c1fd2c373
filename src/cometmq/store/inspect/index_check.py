"""The comparison of the index files with the log: each key of a record must have one entry.

Entries are in the order of the records, and within a record in the order of its keys. So the expected entries
of a batch of records are compared with the next entries of the files as whole arrays. Only where they differ
are entries matched one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.properties.key_hashes import hash_keys, key_prefix
from cometmq.protocol.properties.values import index_hash, index_keys
from cometmq.protocol.record.many import RecordGroup
from cometmq.protocol.record.one import Facts
from cometmq.store.base.config import INDEX
from cometmq.store.base.files import ReadOnlyFiles, first_byte
from cometmq.store.derived.index_file import ENTRY, ENTRY_DTYPE, HEADER, SLOT_SIZE, chain, file_length
from cometmq.store.derived.index_service import absolute_hashes
from cometmq.store.inspect.findings import ERROR, NEXT_START, NOTE, REBUILD, WARNING, Findings
from cometmq.store.log.log_reader import LogReader
from cometmq.store.recovery.store_layout import StoreFile, StoreLayout
from cometmq.store.tables.deleted_topics import DeletedTopics

# Where index and log differ, a match for each key is also searched for in this number of further entries.
_MAX_ENTRIES_AHEAD = 4096
CHUNK = 1 << 16  # Number of index entries that are read at a time
_BATCH = 1024  # Number of records whose keys are hashed together

IntArray = NDArray[np.int64]


class Header(NamedTuple):
    """The header of an index file."""

    begin_ms: int
    end_ms: int
    begin_position: int
    end_position: int
    slots_in_use: int
    next_number: int


def read_header(files: ReadOnlyFiles, path: str) -> Header | None:
    """Return the header of an index file, unchecked, or None if the file is too short or missing."""
    data = files.read(path, HEADER.size, 0)
    return Header(*HEADER.unpack(data)) if len(data) == HEADER.size else None


@dataclass(eq=False)
class IndexFiles:
    """The index files of a store at one moment: `readable` are those with a plausible header."""

    layout: StoreLayout
    files: ReadOnlyFiles
    findings: Findings

    def __post_init__(self) -> None:
        self._slots = self.layout.config.max_hash_slot_num
        self.readable: list[tuple[StoreFile, Header]] = []
        for file in self.layout.index_files:
            header = self._header(file)
            if header is not None:
                self.readable.append((file, header))

    def location(self, number: int) -> int:
        """Return the position of an entry in its file."""
        return HEADER.size + self._slots * SLOT_SIZE + number * ENTRY.size

    def all_written(self, number: int) -> bool:
        """Return whether slots and header must be complete: in the newest file only after a clean stop."""
        return not self.layout.live and (self.layout.clean or number < len(self.readable) - 1)

    def chunks(self, file: StoreFile, header: Header) -> Iterator[tuple[int, NDArray[np.void]]]:
        """Yield the entries of a file in chunks, each with the number of its first entry."""
        first = 1
        while first < header.next_number:
            count = min(CHUNK, header.next_number - first)
            data = self.files.read(file.path, count * ENTRY.size, self.location(first))
            entries = np.frombuffer(data[: len(data) // ENTRY.size * ENTRY.size], ENTRY_DTYPE)
            if not len(entries):
                return
            yield first, entries
            first += len(entries)

    def _error(self, kind: str, file: StoreFile, place: int, problem: str) -> None:
        self.findings.add(ERROR, kind, file.path, place, problem, REBUILD)

    def _header(self, file: StoreFile) -> Header | None:
        config = self.layout.config
        expected = file_length(self._slots, config.max_index_num)
        if file.length != expected:
            if not self.layout.live:
                problem = f"{file.length} bytes instead of {expected}"
                self._error("index-length", file, file.length, problem)
            return None
        header = read_header(self.files, file.path)
        if header is None:
            return None
        if (
            min(header) < 0
            or header.next_number > config.max_index_num
            or header.slots_in_use > self._slots
            or (header.next_number > 1 and header.begin_position > header.end_position)
        ):
            self._error("index-header", file, 0, f"the header cannot be true: {tuple(header)}")
            return None
        header = header._replace(next_number=max(1, header.next_number))
        newest = file == self.layout.index_files[-1]
        if header.next_number == 1 and not (newest and not self.layout.clean):
            at = first_byte(self.files, file.path, HEADER.size, file.length)
            if at is not None or not newest:
                problem = f"the header counts no entries, but some exist: {tuple(header)}"
                self._error("index-header", file, 0, problem)
                return None
        return header

    def check_files(self) -> None:
        """Check chains, slots and header of every complete index file."""
        for number, (file, header) in enumerate(self.readable):
            if self.all_written(number):
                self._check_chains(file, header)
                self._check_rest(file, 0)
                self._check_rest(file, header.next_number)

    def _check_chains(self, file: StoreFile, header: Header) -> None:
        slots = np.zeros(self._slots, np.int64)
        first_position = last_position = 0
        following = 1
        for first, entries in self.chunks(file, header):
            following = first + len(entries)
            expected = chain(slots, entries["hash"].astype(np.int64), np.arange(first, following))
            for at in np.flatnonzero(entries["previous"] != expected).tolist():
                wrong = f"the chain continues with entry {entries['previous'][at]}, which is not in it"
                problem = f"entry {first + at}: {wrong}"
                self._error("index-chain", file, self.location(first + at), problem)
            first_position = int(entries["position"][0]) if first == 1 else first_position
            last_position = int(entries["position"][-1])
        if following < header.next_number:
            return
        if following > 1:
            for verb, which, place, value, position in (
                ("begins", "first", 16, header.begin_position, first_position),
                ("ends", "last", 24, header.end_position, last_position),
            ):
                if value != position:
                    problem = f"the header {verb} at log position {value}, the {which} entry at {position}"
                    self._error("index-header", file, place, problem)
        self._check_slots(file, header, slots)

    def _check_slots(self, file: StoreFile, header: Header, expected: IntArray) -> None:
        data = self.files.read(file.path, self._slots * SLOT_SIZE, HEADER.size)
        stored = np.frombuffer(data, ">i4").astype(np.int64)
        if len(stored) != len(expected):
            return
        for slot in np.flatnonzero(stored != expected).tolist():
            problem = f"slot {slot}: entry {stored[slot]} instead of {expected[slot]}"
            self._error("index-slot", file, HEADER.size + slot * SLOT_SIZE, problem)
        used = int(np.count_nonzero(expected))
        if used != header.slots_in_use:
            problem = f"the header counts {header.slots_in_use} slots in use, there are {used}"
            self._error("index-header", file, 32, problem)

    def _check_rest(self, file: StoreFile, number: int) -> None:
        """Report nonzero bytes where an index file has no entry: in entry 0, and after the last entry."""
        stop = file.length if number else self.location(1)
        at = first_byte(self.files, file.path, self.location(number), stop)
        if at is not None:
            problem = "nonzero bytes where no entry is: left by an unclean stop, or changed since"
            self.findings.add(NOTE, "unused-bytes", file.path, at, problem)


class Entries(NamedTuple):
    """Entries of index files, one array per field: file number, entry number, hash, position, seconds."""

    file: IntArray
    number: IntArray
    hash: IntArray
    position: IntArray
    seconds: IntArray

    def at(self, chosen: slice | IntArray | NDArray[np.bool_] | list[int]) -> Entries:
        return Entries(*(column[chosen] for column in self))

    def __add__(self, other: object) -> Entries:
        assert isinstance(other, Entries)
        return Entries(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


_EMPTY = Entries(*(np.zeros(0, np.int64) for _ in range(5)))


@dataclass
class _Keys:
    """A number of keys without an entry, and the positions of the first and the last of their records."""

    count: int = 0
    first: int = -1
    last: int = -1

    def add(self, position: int) -> None:
        self.count, self.last = self.count + 1, position
        if self.first < 0:
            self.first = position


class IndexCheck:
    """The check of the index files that exist at the start. Call `check_records`, then `finish`."""

    def __init__(self, layout: StoreLayout, files: ReadOnlyFiles, findings: Findings) -> None:
        self._layout = layout
        self._findings = findings
        self._log = LogReader(files, layout.config)
        self.log_min = layout.log_min  # Beginning of the log; raised by the caller when retention moves it
        self._index = IndexFiles(layout, files, findings)
        self._index.check_files()
        self._readable = self._index.readable
        self.files = len(self._readable)
        self.entries = sum(header.next_number - 1 for _, header in self._readable)
        self._unread = self._all_entries()
        self._ahead = _EMPTY
        self._first = True
        self._expired_to = -1
        self._missing = _Keys()
        self._behind = _Keys()  # Keys without an entry, after the last key that has one
        # By file number: how many entries have a wrong time, and the number of the first such entry
        self._wrong_seconds: dict[int, list[int]] = {}
        self._repeated = 0
        self._first_repeated = "", -1
        self.enabled = layout.config.message_index_enable and bool(layout.index_files or layout.segments)

    # -- entries and records ----------------------------------------------------------------------

    def check_records(self, group: RecordGroup, deleted: DeletedTopics | None) -> None:
        """Compare the next records with their index entries. Those of deleted topics need no entries."""
        if not self.enabled:
            return
        wanted = ~group.rolled_back
        if deleted:
            hidden = deleted.hidden(group)
            self._drop(group.position[hidden])
            wanted &= ~hidden
        rows = np.flatnonzero(wanted)
        for at in range(0, len(rows), _BATCH):
            part = rows[at : at + _BATCH]
            if self._first:
                self._first = False
                self._skip_expired(int(group.position[part[0]]))
            self._compare(*self._wanted(group, part))

    def _drop(self, positions: IntArray) -> None:
        """Remove the entries of the records at `positions` from the entries that are still to be compared."""
        more = len(positions) > 0
        while more:
            known = len(self._ahead.position)
            ahead = self._peek(known + 1)
            more = len(ahead) > known and ahead[-1] <= positions[-1]
            kept = ~np.isin(ahead, positions)
            self._ahead = self._ahead.at(kept)

    def _wanted(self, group: RecordGroup, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return hash, position and store time of every index entry that the given records must have."""
        texts = group.properties
        hashes, lengths, owners = hash_keys([texts[row] for row in rows.tolist()])
        prefixes = np.array([key_prefix(name) for name in group.names], np.uint32)
        owners = rows[owners]
        whole = absolute_hashes(prefixes[group.topic[owners]], hashes, lengths)
        return whole, group.position[owners], group.store_ms[owners]

    def _skip_expired(self, first_position: int) -> None:
        """Remove the entries of records before the first one, which retention has deleted."""
        while len(self._peek(CHUNK)):
            behind = np.flatnonzero(self._ahead.position >= first_position)
            self._ahead = self._ahead.at(slice(behind[0] if len(behind) else len(self._ahead.position), None))
            if len(behind):
                return

    def _all_entries(self) -> Iterator[Entries]:
        for file_number, (file, header) in enumerate(self._readable):
            following = 1
            for first, raw in self._index.chunks(file, header):
                following = first + len(raw)
                columns = [raw[name].astype(np.int64) for name in ("hash", "position", "seconds")]
                numbers = np.arange(first, following, dtype=np.int64)
                yield Entries(np.full(len(raw), file_number, np.int64), numbers, *columns)
            if following < header.next_number and self._layout.live:
                self._expired_to = header.end_position  # Retention has deleted the file and its records

    def _peek(self, count: int) -> IntArray:
        """Read until `_ahead`, the entries to be compared, has `count` or all. Return their positions."""
        while len(self._ahead.position) < count and (more := next(self._unread, None)) is not None:
            self._ahead += more
        return self._ahead.position

    def _compare(self, hashes: IntArray, positions: IntArray, times: IntArray) -> None:
        count = len(hashes)
        self._peek(count + _MAX_ENTRIES_AHEAD)
        ahead = self._ahead.at(slice(count))
        if (
            len(ahead.hash) == count
            and np.array_equal(ahead.position, positions)
            and np.array_equal(ahead.hash, hashes)
        ):
            self._ahead = self._ahead.at(slice(count, None))
            self._check_times(ahead, times)
        else:
            self._match(hashes, positions, times)

    def _match(self, hashes: IntArray, positions: IntArray, times: IntArray) -> None:
        """Match index entries with keys one by one. Report surplus and missing entries."""
        window = self._ahead.at(slice(len(hashes) + _MAX_ENTRIES_AHEAD))
        wanted: dict[tuple[int, int], list[int]] = {}
        for at, pair in enumerate(zip(positions.tolist(), hashes.tolist(), strict=True)):
            wanted.setdefault(pair, []).append(at)
        found = [
            wanted.get(pair) for pair in zip(window.position.tolist(), window.hash.tolist(), strict=True)
        ]
        hits = [at for at, places in enumerate(found) if places]
        # Process the entries up to the last match, and those directly after it whose records precede the
        # given records. The remaining entries may belong to later records.
        stop = hits[-1] + 1 if hits else 0
        while stop < len(window.position) and 0 <= window.position[stop] < positions[0]:
            stop += 1
        good: list[tuple[int, int]] = []
        for at in range(stop):
            places = found[at]
            if places:
                good.append((at, places.pop(0)))
            else:
                self._surplus(window, at, record_there=bool((positions == window.position[at]).any()))
        if good:
            entries, records = np.array(good).T
            self._check_times(window.at(entries), times[records])
        self._ahead = self._ahead.at(slice(stop, None))
        exhausted = not len(self._ahead.position)
        last = good[-1][1] if good else 0
        for places in wanted.values():
            for at in places:
                if positions[at] > self._expired_to:
                    (self._behind if exhausted and at >= last else self._missing).add(int(positions[at]))

    def _location(self, entries: Entries, at: int) -> tuple[str, int]:
        return self._readable[int(entries.file[at])][0].path, self._index.location(int(entries.number[at]))

    def _surplus(self, window: Entries, at: int, *, record_there: bool) -> None:
        if self._layout.live and window.position[at] < self.log_min:
            return  # This is no error: retention has deleted the entry's record in the meantime
        if self._repeats(window, at):
            return
        what = "whose record has no such key" if record_there else "where no valid record with a key begins"
        entry = f"entry {window.number[at]} (hash {window.hash[at]})"
        problem = f"{entry} points at log position {window.position[at]}, {what}"
        self._findings.add(ERROR, "index-entry", *self._location(window, at), problem, REBUILD)

    def _repeats(self, window: Entries, at: int) -> bool:
        """Return whether an entry repeats a correct entry of the same record, and is therefore no error."""
        facts = self._log.facts(int(window.position[at]))
        if facts is None or int(window.hash[at]) not in _hashes(facts):
            return False
        if not self._repeated:
            self._first_repeated = self._location(window, at)
        self._repeated += 1
        return True

    def _check_times(self, entries: Entries, times: IntArray) -> None:
        headers = [header for _, header in self._readable]
        begins = np.array([header.begin_ms for header in headers], np.int64)
        # In the first entry of a file, the field `seconds` counts from the end time of the previous file. In
        # the first entry of the oldest file, the field is not checked, because that end time is unknown.
        before = np.array([-1, *[header.end_ms for header in headers]], np.int64)[entries.file]
        since = np.where(entries.number > 1, begins[entries.file], before)
        seconds = np.clip((times - since) // 1000, 0, 0x7FFFFFFF)
        wrong = np.flatnonzero((seconds != entries.seconds) & (since >= 0))
        for at in wrong:
            known = self._wrong_seconds.setdefault(int(entries.file[at]), [0, int(entries.number[at])])
            known[0] += 1
        numbers = np.array([header.next_number for header in headers], np.int64)[entries.file]
        for at in np.flatnonzero((entries.number == 1) | (entries.number == numbers - 1)):
            self._check_header_time(int(entries.file[at]), int(entries.number[at]), int(times[at]))

    def _check_header_time(self, file_number: int, number: int, time_ms: int) -> None:
        """Compare a file's first or last record with the times in the header. The end has whole seconds."""
        file, header = self._readable[file_number]
        if not self._index.all_written(file_number):
            return
        for which, name, place, value, slack in (
            (1, "begins", 0, header.begin_ms, 0), (header.next_number - 1, "ends", 8, header.end_ms, 999),
        ):  # fmt: skip
            if number == which and abs(value - time_ms) > slack:
                problem = f"the header {name} at {value} ms, the record of that entry is of {time_ms} ms"
                self._findings.add(ERROR, "index-header", file.path, place, problem, REBUILD)

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Report what is known only at the end: surplus entries, wrong times, and keys without an entry."""
        for file_number, (count, number) in self._wrong_seconds.items():
            path = self._readable[file_number][0].path
            problem = f"{count} entries whose time is not that of their record, the first is entry {number}"
            self._findings.add(ERROR, "index-time", path, self._index.location(number), problem, REBUILD)
        while len(self._peek(1)):
            self._report_left_over()
        if self._repeated:
            problem = (
                f"{self._repeated} entries repeat others: Apache's broker indexes a record again when it "
                "recovers, so a query can answer with it twice"
            )
            self._findings.add(NOTE, "index-twice", *self._first_repeated, problem, REBUILD)
        directory = self._layout.config.location(INDEX)
        missing, behind = self._missing, self._behind
        if missing.count:
            where = f"from log position {missing.first} to {missing.last}"
            problem = f"{missing.count} keys of records {where} have no entry"
            self._findings.add(ERROR, "index-gap", directory, -1, problem, REBUILD)
        if behind.count:
            path = self._layout.index_files[-1].path if self._layout.index_files else directory
            problem = f"{behind.count} keys of records from log position {behind.first} on have no entry"
            self._at_the_end("index-short", path, -1, problem)

    def _at_the_end(self, kind: str, path: str, place: int, problem: str) -> None:
        """Report what is wrong at the end: after an unclean stop a warning, while a broker runs nothing."""
        severity, repair = (ERROR, REBUILD) if self._layout.clean else (WARNING, NEXT_START)
        if not self._layout.live:
            self._findings.add(severity, kind, path, place, problem, repair)

    def _report_left_over(self) -> None:
        """Report the index entries that follow the entries of the log's last record."""
        ahead, self._ahead = self._ahead, _EMPTY
        strange = [at for at in range(len(ahead.file)) if not self._repeats(ahead, at)]
        if not strange:
            return
        number = ahead.number[strange[0]]
        problem = f"{len(strange)} entries from {number} on point after the log's last record"
        self._at_the_end("index-ahead", *self._location(ahead, strange[0]), problem)


def _hashes(facts: Facts) -> set[int]:
    """Return the hashes under which the index contains the keys of a record."""
    return {
        index_hash(f"{facts.topic}#{key.decode('utf-8', 'replace')}") for key in index_keys(facts.properties)
    }
