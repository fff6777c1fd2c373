"""The index of a store: it finds commit-log positions by the keys of records.

The keys of dispatched records are first collected in a list. Then they are hashed and added to index files in
batches (numpy), at the latest when the index is written or searched. The keys of a record are its unique key
and the parts of its property KEYS, which are separated by blanks. The hashed text is `topic#key`.
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
from cometmq.protocol.properties.values import MAX_PROPERTIES_BYTES, UNIQUE_KEY, index_hash
from cometmq.store.base.checkpoint import CheckpointPosition
from cometmq.store.base.clock import Clock
from cometmq.store.base.config import INDEX, StoreConfig
from cometmq.store.base.disk import is_numbered
from cometmq.store.base.executor import StoreExecutor
from cometmq.store.base.files import StoreFiles
from cometmq.store.derived.index_file import IndexFile, IntArray

_MAX_KEY_LENGTH = 255 + MAX_PROPERTIES_BYTES  # Maximum total length of topic and key, in characters
NO_POSITION = 1 << 63
"""A log position that is greater than the position of any record."""
_MIN_BATCH = 1024  # Number of records whose keys are hashed together
# The maximum number of entries that may be missing from the hash slots in the file. Recovery adds 2 million
# missing entries in 0.1 s.
_MAX_ENTRIES_WITHOUT_SLOTS = 2_000_000


@dataclass(slots=True)
class _Waiting:
    """Dispatched records whose keys are not hashed yet.

    Each attribute is a list with one value per record.
    """

    keys: list[Keys] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    properties: list[bytes] = field(default_factory=list)
    times_ms: list[int] = field(default_factory=list)


class IndexService:
    """The files of the `index` directory, oldest first.

    All methods except `search` belong to the loop thread.
    """

    def __init__(self, files: StoreFiles, clock: Clock, config: StoreConfig) -> None:
        self._files = files
        self._clock = clock
        self._directory = config.location(INDEX)
        self.slots = config.max_hash_slot_num
        self.capacity = config.max_index_num
        self.enabled = config.message_index_enable
        self.files: list[IndexFile] = []
        self.full_until_ms = 0  # End time, in ms, of the newest full index file; 0 if there is none
        self._waiting = _Waiting()
        # Hashes, log positions and times of keys that have been hashed but not added to an index file yet.
        self._hashed: tuple[IntArray, IntArray, IntArray] | None = None
        self._unsynced: set[str] = set()
        self._unchecked_files: list[IndexFile] = []
        self._files_to_delete: list[str] = []  # Paths of files that are damaged or newer than the checkpoint
        self._new_names = False

    @property
    def end_position(self) -> int:
        """The position of the last record whose keys are in the index files; 0 for an empty index."""
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
        """Collect the keys of dispatched records, in the order of the log, for `index_waiting_keys`.

        The properties of a record are read only if its `keys` are None.
        """
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
        return len(self._waiting.positions) >= _MIN_BATCH or self._hashed is not None

    def index_waiting_keys(self) -> None:
        """Hash the collected keys, and add them to the files. After an OSError, the next call continues."""
        while self._hashed is not None or self._waiting.positions:
            if self._hashed is None:
                self._hashed = _hash(self._waiting)
            hashes, positions, times = self._hashed
            if not self.files:
                # Create a file even if no record has a key: recovery would treat a missing index as lost.
                self._roll()
            while len(hashes):
                if self.files[-1].full:
                    self._roll()
                added = self.files[-1].add(hashes, positions, times)
                hashes, positions, times = hashes[added:], positions[added:], times[added:]
                self._hashed = hashes, positions, times
            self._hashed = None

    def add_hashed(self, hashes: IntArray, positions: IntArray, times_ms: IntArray) -> None:
        """Add keys that `hashed_keys` has returned, after those that `add` has collected. Raises OSError."""
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
        """Return the path of a new index file, named by the local time, and later than the newest file."""
        now = self._clock.time_ms()
        name = time.strftime("%Y%m%d%H%M%S", time.localtime(now // 1000)) + f"{now % 1000:03d}"
        if self.files:
            last = os.path.basename(self.files[-1].path)
            if name <= last:
                moment = datetime.strptime(last + "000", "%Y%m%d%H%M%S%f") + timedelta(milliseconds=1)
                name = moment.strftime("%Y%m%d%H%M%S%f")[:17]
        return os.path.join(self._directory, name)

    def write(self, *, slots: bool = False) -> None:
        """Add the collected keys to the index, and write the newest file, with or without hash slots."""
        self.index_waiting_keys()
        if self.files and self.files[-1].write(slots=slots):
            self._unsynced.add(self.files[-1].path)

    def write_slots(self) -> Iterator[None]:
        """Write the hash slots of the newest index file in steps, if the slots on disk lack many entries."""
        if self.files and self.files[-1].count - self.files[-1].slots_lack >= _MAX_ENTRIES_WITHOUT_SLOTS:
            file = self.files[-1]
            for _ in file.write_slots():
                yield
            self._unsynced.add(file.path)

    def checkpoint_position(self, position: int, last: int, queue_ends: int) -> CheckpointPosition:
        """Return a position that declares all that is written durable, for use after the files are synced."""
        if not self.files:
            return CheckpointPosition(position, last, queue_ends)
        file = self.files[-1]
        name = int(os.path.basename(file.path))
        return CheckpointPosition(
            position, last, queue_ends, name, file.written, file.slots_lack, file.end_position
        )

    def collect_unsynced(self) -> tuple[list[str], list[str]]:
        """Return the files and the directories that have changed since the last call and must be synced."""
        paths, self._unsynced = sorted(self._unsynced), set()
        names = [self._directory, os.path.dirname(self._directory)] if self._new_names else []
        self._new_names = False
        return paths, names

    # -- searching --------------------------------------------------------------------------------

    async def search(
        self, executor: StoreExecutor, topic: str, key: str, limit: int, begin: int, end: int,
        before: int = NO_POSITION,
    ) -> list[int]:  # fmt: skip
        """Return the positions of the newest `limit` records that may have a key, in ascending order.

        All positions are less than `before`. The result may include records with another key of the same
        hash, and records that were stored a little before or after [begin, end] (ms).
        """
        if len(topic) + len(key) > _MAX_KEY_LENGTH:
            return []
        key_hash = index_hash(f"{topic}#{key}")
        found: list[int] = []
        for file in self.files[::-1]:
            if file.overlaps(begin, end):
                await file.search(executor, key_hash, limit, begin, end, found, before)
            if len(found) >= limit:
                break
            await executor.pause(0)
        return sorted(found)

    # -- opening, retention -----------------------------------------------------------------------

    def load(
        self, *, clean: bool, checkpoint_ms: int, saved: CheckpointPosition | None = None
    ) -> tuple[list[str], bool]:
        """Read the headers of the index files on disk. The caller must call `resume` afterwards.

        A disabled index is loaded, too, for searches and retention, but its files are not rebuilt.

        After an unclean stop, Apache's broker deletes every file whose end time is later than the checkpoint.
        CometMQ removes only the entries and files after the checkpoint position. If there is no checkpoint
        position, each file whose end time is later than `checkpoint_ms` is checked entry by entry. Only a
        damaged file is removed, together with all later files.

        This method only selects the files to remove; `resume` deletes them. Before calling `resume`, the
        caller must make sure that the checkpoint does not declare any of these files durable.

        Returns:
            Notes about damage, and whether entries are lost. If entries are lost, the caller must dispatch
                the log after `end_position` again.
        """
        notes: list[str] = []
        counted = self._trusted(saved)
        for name in self._files.disk.listdir(self._directory):
            path = os.path.join(self._directory, name)
            if not is_numbered(name, 17):
                notes.append(f"{path}: not an index file, left alone")
                continue
            file = IndexFile(self._files, path, self.slots, self.capacity)
            if counted is not None and saved is not None and path >= counted.path:
                if path > counted.path:
                    # This file was created after the checkpoint position, so it may not be durable.
                    self._files_to_delete.append(path)
                    continue
                file, good = counted, True
                if file.full and file.slots_lack < file.count:
                    self._unchecked_files.append(file)
            else:
                good = file.load()
            if good and not clean and counted is None and file.end_ms > checkpoint_ms:
                good = file.check_entries() == file.count - 1
                self._unchecked_files.append(file)
            self.files.append(file)
            if not good:
                # Positions must ascend from file to file, so the files after the damaged file are deleted
                # with it.
                notes.append(f"{path}: damaged, deleted and rebuilt from the log")
                break
        else:
            lost = saved is not None and self.end_position < saved.index_end
            return notes, self.enabled and (lost or not self.files)
        names = self._files.disk.listdir(self._directory)
        for name in names:
            if is_numbered(name, 17) and name >= os.path.basename(self.files[-1].path):
                self._files_to_delete.append(os.path.join(self._directory, name))
        self.files.pop()
        return notes, self.enabled

    def _trusted(self, saved: CheckpointPosition | None) -> IndexFile | None:
        """Load the index file that the checkpoint position names, without the entries after that position.

        Return None if the checkpoint position names no file, or if the file contradicts it.
        """
        if saved is None or saved.index_name <= 0:
            return None
        path = os.path.join(self._directory, f"{saved.index_name:017d}")
        file = IndexFile(self._files, path, self.slots, self.capacity)
        return file if file.load_counted(saved.index_count, saved.index_slots, saved.index_end) else None

    def resume(self, *, clean: bool, cut_at: int | None = None) -> None:
        """Remove the index entries of records at or after `cut_at`, and make the newest file writable."""
        for path in self._files_to_delete:
            self._files.delete(path)
            self._new_names = True  # The directory needs a sync, so that deleted files cannot reappear
        self._files_to_delete.clear()
        if cut_at is not None:
            while self.files and (self.files[-1].count == 1 or self.files[-1].begin_position >= cut_at):
                self._files.delete(self.files.pop().path)
            if self.files:
                self.files[-1].cut(cut_at)
        if self.files and not self.files[-1].full:
            self.files[-1].resume(rebuild_slots=not clean)
        for file in self._unchecked_files:
            if file in self.files and file.full:
                file.resume(rebuild_slots=True)  # The hash slots on disk may be incomplete or damaged
                file.write(slots=True)
                file.release()
                self._unsynced.add(file.path)
        self._unchecked_files.clear()
        self.full_until_ms = max((file.end_ms for file in self.files if file.full), default=0)
        # Sync the directory later, because the names of files may not have been synced before an unclean
        # stop.
        self._new_names = self._new_names or (not clean and bool(self.files))

    def forget_expired(self, log_min: int) -> str | None:
        """Drop the oldest file, unless it is the newest, if all its records lie before `log_min`.

        Return its path, which the caller must delete, or None.
        """
        if len(self.files) > 1 and self.files[0].end_position < log_min:
            path = self.files.pop(0).path
            self._files.drop(path)
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
    """Yield hashes, positions and times for `add_hashed`. The arguments are those of `IndexService.add`."""
    waiting = _Waiting([*keys], [*positions], [*prefixes], [*properties], [*times_ms])
    while waiting.positions:
        yield _hash(waiting)


def _hash(waiting: _Waiting) -> tuple[IntArray, IntArray, IntArray]:
    """Remove a batch of records from `waiting`. Return hashes, positions and store times of their keys."""
    columns: list[list[Any]] = []
    for each in fields(waiting):
        column = getattr(waiting, each.name)
        columns.append(column[:_MIN_BATCH])
        del column[:_MIN_BATCH]
    given, found_positions, found_prefixes, properties, found_times = columns
    # struct needs half as much time as numpy to convert a list of numbers to an array.
    prefixes = np.frombuffer(struct.pack(f"={len(given)}I", *found_prefixes), np.uint32)
    positions = np.frombuffer(struct.pack(f"={len(given)}q", *found_positions), np.int64)
    times = np.frombuffer(struct.pack(f"={len(given)}q", *found_times), np.int64)
    hashes = _hash_equal(given)
    if hashes is None and any(given) and () in given:  # Op messages of transactions have no keys
        rows = [row for row, keys in enumerate(given) if keys != ()]
        given, properties = [given[row] for row in rows], [properties[row] for row in rows]
        prefixes, positions, times = prefixes[rows], positions[rows], times[rows]
        hashes = _hash_equal(given)
    if hashes is None:
        # `hash_keys` accepts only property strings, so the keys are converted to property strings.
        texts = map(_as_properties, properties, given)
        hashes, lengths, owners = hash_keys(list(texts))
        prefixes, positions, times = prefixes[owners], positions[owners], times[owners]
    else:
        lengths = np.full(len(given), len(given[0]), np.int64)
    return absolute_hashes(prefixes, hashes, lengths), positions, times


def _hash_equal(keys: list[Any]) -> NDArray[np.uint32] | None:
    """Return the hashes of `keys` if these are single ASCII texts of equal length, otherwise None."""
    try:
        return hash_equal(keys)
    except TypeError:  # `hash_equal` accepts only bytes, but some keys are strings
        return None


def absolute_hashes(prefixes: NDArray[np.uint32], hashes: NDArray[np.uint32], lengths: IntArray) -> IntArray:
    """Return the hashes that index entries contain: the absolute values of the hashes of `topic#key`."""
    absolute = np.abs(behind_prefix(prefixes, hashes, lengths).view(np.int32).astype(np.int64))
    absolute[absolute > 0x7FFFFFFF] = 0  # For -2**31, Apache's broker uses 0
    return absolute


def _as_properties(properties: bytes, keys: Keys) -> bytes:
    """Return the keys of a record in a properties string: `properties` itself if `keys` is None."""
    if keys is None:
        return properties
    return UNIQUE_KEY + keys if isinstance(keys, bytes) else b"KEYS\x01" + " ".join(keys).encode()
