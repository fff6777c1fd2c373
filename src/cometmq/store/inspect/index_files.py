"""Checks of each index file by itself: header, hash chains, slots, and the bytes after the last entry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cometmq.store.base.read_only_files import ReadOnlyFiles, first_byte
from cometmq.store.derived.index_file import ENTRY, ENTRY_DTYPE, HEADER, SLOT_SIZE, chain, file_length
from cometmq.store.inspect.findings import ERROR, NOTE, REBUILD, Findings
from cometmq.store.recovery.store_layout import StoreFile, StoreLayout

CHUNK = 1 << 16  # Number of index entries that are read at a time

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
    """The index files of a store, listed at the creation of this object.

    `readable` holds the files with a plausible header.
    """

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
        """Return whether slots and header of a readable index file must be complete.

        Slots and header of the newest file may be incomplete, unless the store was stopped cleanly.
        """
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
                problem = (
                    f"entry {first + at}: the chain continues with entry {entries['previous'][at]}, "
                    "which is not in it"
                )
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
