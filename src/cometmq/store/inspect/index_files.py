"""Index files, each held against itself: header, hash chains, slots, and what lies behind the last entry."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cometmq.store.base.read_only_files import ReadOnlyFiles, first_byte
from cometmq.store.derived.index_file import ENTRY, ENTRY_DTYPE, HEADER, SLOT_SIZE, file_length
from cometmq.store.inspect.findings import ERROR, NOTE, REBUILD, Findings
from cometmq.store.recovery.store_layout import Shape, StoreFile

CHUNK = 1 << 16  # entries read at a time

IntArray = NDArray[np.int64]


class Header(NamedTuple):
    begin_ms: int
    end_ms: int
    begin_position: int
    end_position: int
    slots_in_use: int
    next_number: int


class IndexFiles:
    """The index files of a store as they were when this was made: those whose header can be believed."""

    def __init__(self, shape: Shape, files: ReadOnlyFiles, findings: Findings) -> None:
        self._shape = shape
        self._files = files
        self._findings = findings
        self._slots = shape.config.max_hash_slot_num
        self.entries_at = HEADER.size + self._slots * SLOT_SIZE
        self.readable: list[tuple[StoreFile, Header]] = []
        for file in shape.index_files:
            header = self._header(file)
            if header is not None:
                self.readable.append((file, header))

    def settled(self, number: int) -> bool:
        """Whether all of a readable file is on the disk: a running broker, and one that was killed, may not
        have written slots and header of the newest."""
        return not self._shape.live and (self._shape.clean or number < len(self.readable) - 1)

    def _header(self, file: StoreFile) -> Header | None:
        expected = file_length(self._slots, self._shape.config.max_index_num)
        if file.length != expected:
            if not self._shape.live:
                self._findings.add(
                    ERROR, "index-length", file.path, file.length,
                    f"{file.length} bytes instead of {expected}", REBUILD,
                )  # fmt: skip
            return None
        data = self._files.read(file.path, HEADER.size, 0)
        if len(data) < HEADER.size:
            return None
        header = Header(*HEADER.unpack(data))
        if (
            min(header) < 0
            or header.next_number > self._shape.config.max_index_num
            or header.slots_in_use > self._slots
            or (header.next_number > 1 and header.begin_position > header.end_position)
        ):
            self._findings.add(
                ERROR, "index-header", file.path, 0, f"the header cannot be true: {tuple(header)}", REBUILD
            )
            return None
        header = header._replace(next_number=max(1, header.next_number))
        newest = file == self._shape.index_files[-1]
        if header.next_number == 1 and not (newest and not self._shape.clean):
            at = first_byte(self._files, file.path, HEADER.size, file.length)
            if at is not None or not newest:
                problem = f"the header counts no entries, there are some: {tuple(header)}"
                self._findings.add(ERROR, "index-header", file.path, 0, problem, REBUILD)
                return None
        return header

    def check_files(self) -> None:
        """Chains, slots and headers of every file, each by itself."""
        for number, (file, header) in enumerate(self.readable):
            settled = self.settled(number)
            self._check_chains(file, header, settled=settled)
            if settled:
                self._check_rest(file, 0)
                self._check_rest(file, header.next_number)

    def _check_chains(self, file: StoreFile, header: Header, *, settled: bool) -> None:
        slots = np.zeros(self._slots, np.int64)
        first_position = last_position = 0
        for first in range(1, header.next_number, CHUNK):
            entries = self.raw(file, first, min(CHUNK, header.next_number - first))
            if not len(entries):
                return
            hashes = entries["hash"].astype(np.int64)
            numbers = np.arange(first, first + len(entries))
            wrong = np.flatnonzero(entries["previous"] != chain(slots, hashes, numbers))
            if settled or len(wrong) == 0:
                self._report_chain(file, entries, wrong, first)
            first_position = int(entries["position"][0]) if first == 1 else first_position
            last_position = int(entries["position"][-1])
        if header.next_number > 1 and settled and first_position != header.begin_position:
            problem = (
                f"the header begins at log position {header.begin_position}, the first entry at "
                f"{first_position}"
            )
            self._findings.add(ERROR, "index-header", file.path, 16, problem, REBUILD)
        if header.next_number > 1 and settled and last_position != header.end_position:
            problem = (
                f"the header ends at log position {header.end_position}, the last entry at {last_position}"
            )
            self._findings.add(ERROR, "index-header", file.path, 24, problem, REBUILD)
        if settled:
            self._check_slots(file, header, slots)

    def _report_chain(self, file: StoreFile, entries: NDArray[np.void], wrong: IntArray, first: int) -> None:
        for at in wrong:
            place = self.entries_at + (first + int(at)) * ENTRY.size
            previous = int(entries["previous"][at])
            problem = f"entry {first + int(at)}: the chain goes on with entry {previous}, which is not in it"
            self._findings.add(ERROR, "index-chain", file.path, place, problem, REBUILD)

    def _check_slots(self, file: StoreFile, header: Header, expected: IntArray) -> None:
        data = self._files.read(file.path, self._slots * SLOT_SIZE, HEADER.size)
        stored = np.frombuffer(data, ">i4").astype(np.int64)
        if len(stored) != len(expected):
            return
        for slot in np.flatnonzero(stored != expected):
            problem = f"slot {slot}: entry {stored[slot]} instead of {expected[slot]}"
            place = HEADER.size + int(slot) * SLOT_SIZE
            self._findings.add(ERROR, "index-slot", file.path, place, problem, REBUILD)
        used = int(np.count_nonzero(expected))
        if used != header.slots_in_use:
            problem = f"the header counts {header.slots_in_use} slots in use, there are {used}"
            self._findings.add(ERROR, "index-header", file.path, 32, problem, REBUILD)

    def _check_rest(self, file: StoreFile, number: int) -> None:
        """Nothing uses entry 0, nor those from the next free one on."""
        start = self.entries_at + number * ENTRY.size
        at = first_byte(self._files, file.path, start, start + ENTRY.size if not number else file.length)
        if at is not None:
            problem = "something stands where no entry is: left by an unclean stop, or changed since"
            self._findings.add(NOTE, "unused-bytes", file.path, at, problem)

    def raw(self, file: StoreFile, first: int, count: int) -> NDArray[np.void]:
        data = self._files.read(file.path, count * ENTRY.size, self.entries_at + first * ENTRY.size)
        return np.frombuffer(data[: len(data) // ENTRY.size * ENTRY.size], ENTRY_DTYPE)


def chain(slots: IntArray, hashes: IntArray, numbers: IntArray) -> IntArray:
    """The previous entry of each entry's chain, of the newest entry per slot so far, which is brought up to
    date. Negative hashes (damage) share the slot that their remainder names."""
    slot = hashes % len(slots)
    order = np.argsort(slot, kind="stable")
    ranked, ranked_numbers = slot[order], numbers[order]
    same = np.concatenate(([False], ranked[1:] == ranked[:-1]))
    before = np.concatenate(([0], ranked_numbers[:-1]))
    previous = np.empty(len(hashes), np.int64)
    previous[order] = np.where(same, before, slots[ranked])
    slots[slot] = numbers  # of equal slots the last one stays
    return previous
