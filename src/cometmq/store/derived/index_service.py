"""All index files of a store: keys of dispatched records go in, commit-log positions come out.

Keys wait in a list and are hashed and chained together (numpy), at the latest when the index is written or
searched. A record's keys are its unique key, then each of its KEYS split at blanks; what is hashed is
`topic#key`.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.properties.key_hashes import Keys, behind_prefix, hash_equal, hash_keys
from cometmq.protocol.properties.values import PROPERTIES_MAX_BYTES, UNIQUE_KEY, index_hash
from cometmq.store.base.checkpoint import Mark
from cometmq.store.base.clock import Clock
from cometmq.store.base.config import INDEX, StoreConfig
from cometmq.store.base.disk import is_numbered
from cometmq.store.base.files import StoreFiles
from cometmq.store.base.off_loop import OffLoop
from cometmq.store.derived.index_file import IndexFile, IntArray

_LONGEST_KEY = 255 + PROPERTIES_MAX_BYTES  # characters of topic and key: no record has more
NO_POSITION = 1 << 63
"""Behind all records."""
_BATCH = 1024  # records hashed together, at least
_SLOTS_BEHIND = 2_000_000  # entries; chained anew in 0.1 s by a recovery


@dataclass(slots=True)
class _Waiting:
    """Dispatched records whose keys are still to be hashed, in columns of equal length."""

    keys: list[Keys] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    properties: list[bytes] = field(default_factory=list)
    times_ms: list[int] = field(default_factory=list)


class IndexService:
    """Files of the `index` directory, oldest first. Loop thread, except `search`."""

    def __init__(self, files: StoreFiles, clock: Clock, config: StoreConfig) -> None:
        self._files = files
        self._clock = clock
        self._directory = config.location(INDEX)
        self.slots = config.max_hash_slot_num
        self.capacity = config.max_index_num
        self.enabled = config.message_index_enable
        self.files: list[IndexFile] = []
        self.full_until_ms = 0  # end time of the newest full file that `write` has written out
        self._waiting = _Waiting()
        # Hashes, positions and times of the oldest records, whose keys are not all in a file.
        self._hashed: tuple[IntArray, IntArray, IntArray] | None = None
        self._unsynced: set[str] = set()
        self._unproven: list[IndexFile] = []
        self._doomed: list[str] = []  # damaged files, and those behind the mark
        self._new_names = False

    @property
    def end_position(self) -> int:
        """Position of the last record whose keys are in the files; 0 for an empty index."""
        return self.files[-1].end_position if self.files else 0

    # -- writing ----------------------------------------------------------------------------------

    def add(
        self,
        prefixes: Iterable[int],
        positions: Iterable[int],
        times_ms: Iterable[int],
        properties: Iterable[bytes],
        keys: Iterable[Keys],
    ) -> None:
        """Index dispatched records, in the order of their positions; `index_waiting_keys` hashes their keys.
        Properties count only where no keys are given."""
        waiting = self._waiting
        waiting.prefixes += prefixes
        waiting.positions += positions
        waiting.times_ms += times_ms
        waiting.properties += properties
        waiting.keys += keys

    def forget_waiting(self) -> None:
        self._waiting = _Waiting()
        self._hashed = None

    def has_batch_waiting(self) -> bool:
        return len(self._waiting.positions) >= _BATCH or self._hashed is not None

    def index_waiting_keys(self) -> None:
        """Hash and chain the waiting keys, in new files as they fill up. Raises OSError; what is not in a
        file then keeps waiting."""
        while self._hashed is not None or self._waiting.positions:
            if self._hashed is None:
                self._hashed = _hash(self._waiting)
            hashes, positions, times = self._hashed
            if not self.files:
                self._roll()  # even without a key: a store without an index file is one that has lost it
            while len(hashes):
                if self.files[-1].full:
                    self._roll()
                added = self.files[-1].add(hashes, positions, times)
                hashes, positions, times = hashes[added:], positions[added:], times[added:]
                self._hashed = hashes, positions, times
            self._hashed = None

    def add_hashed(self, hashes: IntArray, positions: IntArray, times_ms: IntArray) -> None:
        """Chain keys of `hashed_keys`, behind those that wait. Raises OSError."""
        self.index_waiting_keys()
        self._hashed = hashes, positions, times_ms
        self.index_waiting_keys()

    def _roll(self) -> None:
        seed_ms = seed_position = 0
        if self.files:
            last = self.files[-1]
            last.write(slots=True)
            self._unsynced.add(last.path)
            last.release()
            seed_ms, seed_position = last.end_ms, last.end_position
            self.full_until_ms = last.end_ms
        self._files.disk.makedirs(self._directory)
        file = IndexFile(self._files, self._new_path(), self.slots, self.capacity)
        file.create(seed_ms, seed_position)
        self._new_names = True
        self.files.append(file)

    def _new_path(self) -> str:
        """A name from the local time, `yyyyMMddHHmmssSSS`, behind the newest one whatever the clock says."""
        now = self._clock.time_ms()
        name = time.strftime("%Y%m%d%H%M%S", time.localtime(now // 1000)) + f"{now % 1000:03d}"
        if self.files:
            last = os.path.basename(self.files[-1].path)
            if name <= last:
                moment = datetime.strptime(last + "000", "%Y%m%d%H%M%S%f") + timedelta(milliseconds=1)
                name = moment.strftime("%Y%m%d%H%M%S%f")[:17]
        return os.path.join(self._directory, name)

    def write(self, *, slots: bool = False) -> None:
        """Index the waiting keys and write. Raises OSError."""
        self.index_waiting_keys()
        if self.files and self.files[-1].write(slots=slots):
            self._unsynced.add(self.files[-1].path)

    def write_slots(self) -> Iterator[None]:
        """Write the slots of the newest file, if they lack many entries, a part a step. Raises OSError."""
        if self.files and self.files[-1].count - self.files[-1].slots_lack >= _SLOTS_BEHIND:
            file = self.files[-1]
            for _ in file.write_slots():
                yield
            self._unsynced.add(file.path)

    def mark(self, position: int, last: int, queue_ends: int) -> Mark:
        """What the next sync makes durable, beside everything before `position`. After `write`."""
        if not self.files:
            return Mark(position, last, queue_ends)
        file = self.files[-1]
        name = int(os.path.basename(file.path))
        return Mark(position, last, queue_ends, name, file.written, file.slots_lack, file.end_position)

    def collect_unsynced(self) -> tuple[list[str], list[str]]:
        """(files written, directories with new names) since the last call, for a sync in a thread."""
        paths, self._unsynced = sorted(self._unsynced), set()
        names = [self._directory, os.path.dirname(self._directory)] if self._new_names else []
        self._new_names = False
        return paths, names

    # -- searching --------------------------------------------------------------------------------

    async def search(
        self,
        off_loop: OffLoop,
        topic: str,
        key: str,
        limit: int,
        begin: int,
        end: int,
        before: int = NO_POSITION,
    ) -> list[int]:
        """Ascending positions of the newest `limit` records that may have this key (or one with its hash),
        lie before a position, and were stored in [begin, end] (ms)."""
        if len(topic) + len(key) > _LONGEST_KEY:
            return []
        key_hash = index_hash(f"{topic}#{key}")
        found: list[int] = []
        for file in self.files[::-1]:
            if file.overlaps(begin, end):
                await file.search(off_loop, key_hash, limit, begin, end, found, before)
            if file.begin_ms < begin or len(found) >= limit:
                break
            await off_loop.pause(0)
        return sorted(found)

    # -- opening, retention -----------------------------------------------------------------------

    def load(self, *, clean: bool, checkpoint_ms: int, mark: Mark | None = None) -> tuple[list[str], bool]:
        """Read the headers of the files on disk. Returns notes about damage, and whether entries have been
        lost: then the log behind `end_position` must be dispatched again. `resume` must follow. An index that
        is switched off is loaded too, for searches and retention, but nothing is made anew for it.

        After an unclean stop Apache deletes every file that ends behind the checkpoint; here a mark tells
        how far the files can be trusted, and what is newer is forgotten. Without a mark such a file is
        checked entry by entry, and deleted only if something is wrong with it. Files go in `resume`: before
        that the caller must see to it that the checkpoint vouches for none of them.
        """
        notes: list[str] = []
        marked = self._trusted(mark)
        for name in self._files.disk.listdir(self._directory):
            path = os.path.join(self._directory, name)
            if not is_numbered(name, 17):
                notes.append(f"{path}: not an index file, left alone")
                continue
            file = IndexFile(self._files, path, self.slots, self.capacity)
            if marked is not None and mark is not None and path >= marked.path:
                if path > marked.path:
                    self._doomed.append(path)  # made behind the mark
                    continue
                file, good = marked, True
                if file.full and file.slots_lack < file.count:
                    self._unproven.append(file)
            else:
                good = file.load()
            if good and not clean and marked is None and file.end_ms > checkpoint_ms:
                good = file.check_entries() == file.count - 1
                self._unproven.append(file)
            self.files.append(file)
            if not good:
                # Whatever is newer goes too: positions must not fall from file to file.
                notes.append(f"{path}: damaged, deleted and built anew from the log")
                break
        else:
            lost = mark is not None and self.end_position < mark.index_end
            return notes, self.enabled and (lost or not self.files)
        names = self._files.disk.listdir(self._directory)
        for name in names:
            if is_numbered(name, 17) and name >= os.path.basename(self.files[-1].path):
                self._doomed.append(os.path.join(self._directory, name))
        self.files.pop()
        return notes, self.enabled

    def _trusted(self, mark: Mark | None) -> IndexFile | None:
        """The file that was the newest when the mark was made, as it was then; None if there is none."""
        if mark is None or mark.index_name <= 0:
            return None
        path = os.path.join(self._directory, f"{mark.index_name:017d}")
        file = IndexFile(self._files, path, self.slots, self.capacity)
        return file if file.load_marked(mark.index_count, mark.index_slots, mark.index_end) else None

    def resume(self, *, clean: bool, cut_at: int | None = None) -> None:
        """Make the newest file writable; entries of records at or behind `cut_at` are forgotten first."""
        for path in self._doomed:
            self._files.delete(path)
            self._new_names = True  # they must not come back with a power failure
        self._doomed.clear()
        if cut_at is not None:
            while self.files and (self.files[-1].count == 1 or self.files[-1].begin_position >= cut_at):
                self._files.delete(self.files.pop().path)
            if self.files:
                self.files[-1].cut(cut_at)
        if self.files and not self.files[-1].full:
            self.files[-1].resume(rebuild_slots=not clean)
        for file in self._unproven:
            if file in self.files and file.full:
                file.resume(rebuild_slots=True)  # its entries are there, its slots may not be
                file.write(slots=True)
                file.release()
                self._unsynced.add(file.path)
        self._unproven.clear()
        self.full_until_ms = max((file.end_ms for file in self.files if file.full), default=0)
        # After an unclean stop files may be there whose names have not been synced yet.
        self._new_names = self._new_names or (not clean and bool(self.files))

    def forget_expired(self, log_min: int) -> str | None:
        """Drop the oldest file if its records are gone; never the newest. The caller unlinks its path."""
        if len(self.files) > 1 and self.files[0].end_position < log_min:
            path = self.files.pop(0).path
            self._files.descriptors.drop(path)
            self._unsynced.discard(path)
            return path
        return None


def hashed_keys(
    prefixes: Iterable[int],
    positions: Iterable[int],
    times_ms: Iterable[int],
    properties: Iterable[bytes],
    keys: Iterable[Keys],
) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """The keys of records, given as to `IndexService.add`: hashes, positions and times, for `add_hashed`."""
    waiting = _Waiting([*keys], [*positions], [*prefixes], [*properties], [*times_ms])
    while waiting.positions:
        yield _hash(waiting)


def _hash(waiting: _Waiting) -> tuple[IntArray, IntArray, IntArray]:
    """Hashes, positions and store times of the keys of the oldest records, which then wait no longer."""
    columns: list[list[Any]] = []
    for each in fields(waiting):
        column = getattr(waiting, each.name)
        columns.append(column[:_BATCH])
        del column[:_BATCH]
    given, found_positions, found_prefixes, properties, found_times = columns
    # struct makes an array of a list of numbers in half of numpy's time.
    prefixes = np.frombuffer(struct.pack(f"={len(given)}I", *found_prefixes), np.uint32)
    positions = np.frombuffer(struct.pack(f"={len(given)}q", *found_positions), np.int64)
    times = np.frombuffer(struct.pack(f"={len(given)}q", *found_times), np.int64)
    try:
        hashes = hash_equal(given)
    except TypeError:  # they are not all bytes
        hashes = None
    if hashes is None:
        # Callers that know the keys hand them over; in the form of properties they all go one way.
        texts = map(_as_properties, properties, given)
        hashes, lengths, owners = hash_keys(list(texts))
        prefixes, positions, times = prefixes[owners], positions[owners], times[owners]
    else:
        lengths = np.full(len(given), len(given[0]), np.int64)
    return absolute_hashes(prefixes, hashes, lengths), positions, times


def absolute_hashes(prefixes: NDArray[np.uint32], hashes: NDArray[np.uint32], lengths: IntArray) -> IntArray:
    """The hashes of keys behind their topics' prefixes, as entries have them."""
    absolute = np.abs(behind_prefix(prefixes, hashes, lengths).view(np.int32).astype(np.int64))
    absolute[absolute > 0x7FFFFFFF] = 0  # Java's absolute value of the smallest number, made 0 by Apache
    return absolute


def _as_properties(properties: bytes, keys: Keys) -> bytes:
    """A string of properties with the keys of a record."""
    if keys is None:
        return properties
    return UNIQUE_KEY + keys if isinstance(keys, bytes) else b"KEYS\x01" + " ".join(keys).encode()
