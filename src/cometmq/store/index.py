"""All index files of a store: keys of dispatched records go in, commit-log positions come out.

Keys wait in a list and are hashed and chained together (numpy), at the latest when the index is written or
searched. A record's keys are its unique key, then each of its KEYS split at blanks; what is hashed is
`topic#key`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import cast

import numpy as np

from cometmq.protocol.properties import index_hash, java_hash
from cometmq.store.appender import BatchRecords, Keys, Lot
from cometmq.store.checkpoint import Mark
from cometmq.store.clock import Clock
from cometmq.store.config import StoreConfig
from cometmq.store.files import StoreFiles
from cometmq.store.index_file import IndexFile, IntArray
from cometmq.store.keys import behind_prefix, hash_equal, hash_keys

log = logging.getLogger(__name__)

_BATCH = 1024  # records hashed together, at least
_SLOTS_BEHIND = 2_000_000  # entries; chained anew in 0.1 s by a recovery
_MOST_PREFIXES = 20_000


class IndexService:
    """Files of the `index` directory, oldest first. Loop thread, except `search`."""

    __slots__ = (
        "_clock",
        "_directory",
        "_files",
        "_hashed",
        "_new_names",
        "_prefixes",
        "_unproven",
        "_unsynced",
        "_waiting",
        "_waiting_count",
        "capacity",
        "enabled",
        "files",
        "full_until_ms",
        "slots",
    )  # fmt: skip

    def __init__(self, files: StoreFiles, clock: Clock, config: StoreConfig) -> None:
        self._files = files
        self._clock = clock
        self._directory = os.path.join(config.root, "index")
        self.slots = config.max_hash_slot_num
        self.capacity = config.max_index_num
        self.enabled = config.message_index_enable
        self.files: list[IndexFile] = []
        self.full_until_ms = 0  # end time of the newest full file that `write` has written out
        self._waiting: list[Lot] = []
        self._waiting_count = 0  # records among them
        self._hashed: tuple[IntArray, IntArray, IntArray] | None = (
            None  # of the first batch, not yet in a file
        )
        self._prefixes: dict[str, int] = {}
        self._unsynced: set[str] = set()
        self._unproven: list[IndexFile] = []
        self._new_names = False

    @property
    def end_position(self) -> int:
        """Position of the last record whose keys are in the files; 0 for an empty index."""
        return self.files[-1].end_position if self.files else 0

    # -- writing ----------------------------------------------------------------------------------

    def take(self, lots: list[Lot], count: int) -> None:
        """Index `count` dispatched records, in the order of their positions; their keys wait until
        `settle`."""
        self._waiting += lots
        self._waiting_count += count

    def forget_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_count = 0

    def wants_settling(self) -> bool:
        return self._waiting_count >= _BATCH

    def settle(self) -> None:
        """Hash and chain the waiting keys, rolling to new files as they fill up. Raises OSError when a
        file cannot be made or written; the records whose keys are not all in files then keep waiting."""
        waiting = self._waiting
        while waiting:
            lots, records = self._next_lots()
            if self._hashed is None:
                self._hashed = self._hash(lots)
            hashes, positions, times = self._hashed
            if not self.files:
                self._roll()  # even without a key: a store without an index file is one that has lost it
            while len(hashes):
                if self.files[-1].full:
                    self._roll()
                taken = self.files[-1].add(hashes, positions, times)
                hashes, positions, times = hashes[taken:], positions[taken:], times[taken:]
                self._hashed = hashes, positions, times
            self._hashed = None
            del waiting[: len(lots)]
            self._waiting_count -= records

    def _next_lots(self) -> tuple[list[Lot], int]:
        """The oldest waiting lots that have enough records together, and how many those are."""
        records = 0
        for taken, lot in enumerate(self._waiting, 1):
            records += len(lot.sizes) if type(lot) is BatchRecords else 1
            if records >= _BATCH:
                return self._waiting[:taken], records
        return self._waiting[:], records

    def _hash(self, lots: list[Lot]) -> tuple[IntArray, IntArray, IntArray]:
        """Absolute key hashes, positions and store times, one for each key of the records."""
        topics: list[str] = []
        found_positions: list[int] = []
        found_times: list[int] = []
        counts: list[int] = []
        given: list[Keys] = []
        properties: list[bytes] = []
        for lot in lots:
            if type(lot) is BatchRecords:
                counts.append(len(lot.sizes))
                found_positions += lot.physical_offsets
                given += lot.keys if lot.keys is not None else [None] * len(lot.sizes)
                properties += lot.properties
            elif lot[9]:
                counts.append(1)
                found_positions.append(lot[3])
                given.append(lot[8])
                properties.append(lot[7])
            else:
                continue
            topics.append(lot[1])
            found_times.append(lot[6])
        if not given:
            empty = np.zeros(0, np.int64)
            return empty, empty, empty
        of_topic = {topic: self._prefix(topic) for topic in set(topics)}
        prefixes = np.array([of_topic[topic] for topic in topics], np.uint32).repeat(counts)
        positions = np.array(found_positions, np.int64)
        times = np.array(found_times, np.int64).repeat(counts)
        hashes = hash_equal(cast("list[bytes]", given)) if set(map(type, given)) == {bytes} else None
        if hashes is None:
            # Callers that know the keys hand them over; in the form of properties they all go one way.
            texts = [
                text if keys is None or isinstance(keys, bytes) else b"KEYS\x01" + " ".join(keys).encode()
                for text, keys in zip(properties, given, strict=True)
            ]
            hashes, lengths, owners = hash_keys(texts)
            prefixes, positions, times = prefixes[owners], positions[owners], times[owners]
        else:
            lengths = np.full(len(given), len(cast(bytes, given[0])), np.int64)
        whole = behind_prefix(prefixes, hashes, lengths)
        absolute = np.abs(whole.view(np.int32).astype(np.int64))
        absolute[absolute > 0x7FFFFFFF] = 0  # Java's absolute value of the smallest number, made 0 by Apache
        return absolute, positions, times

    def _prefix(self, topic: str) -> int:
        """Java hash of `topic#`: the hash of prefix and key is hash(prefix) * 31 ** len(key) + hash(key)."""
        known = self._prefixes
        prefix = known.get(topic)
        if prefix is None:
            if len(known) > _MOST_PREFIXES:
                known.clear()
            prefix = known[topic] = java_hash(topic + "#") & 0xFFFFFFFF
        return prefix

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
        """A name from the local time, `yyyyMMddHHmmssSSS`, behind every existing one even if the clock is
        not."""
        now = self._clock.time_ms()
        name = time.strftime("%Y%m%d%H%M%S", time.localtime(now // 1000)) + f"{now % 1000:03d}"
        if self.files:
            last = os.path.basename(self.files[-1].path)
            if name <= last:
                moment = datetime.strptime(last + "000", "%Y%m%d%H%M%S%f") + timedelta(milliseconds=1)
                name = moment.strftime("%Y%m%d%H%M%S%f")[:17]
        return os.path.join(self._directory, name)

    def write(self, *, slots: bool = False) -> None:
        """Settle and write. Raises OSError."""
        self.settle()
        if self.files and self.files[-1].write(slots=slots):
            self._unsynced.add(self.files[-1].path)

    def write_slots(self) -> Iterator[None]:
        """Bring the slots of the newest file up to date once many entries have come in, a part a step. Raises
        OSError."""
        if self.files and self.files[-1].count - self.files[-1].slots_lack >= _SLOTS_BEHIND:
            file = self.files[-1]
            for _ in file.write_slots():
                yield
            self._unsynced.add(file.path)

    def mark(self, position: int, last: int) -> Mark:
        """What the next sync makes durable, beside everything before `position`. After `write`."""
        if not self.files:
            return Mark(position, last)
        file = self.files[-1]
        return Mark(
            position,
            last,
            int(os.path.basename(file.path)),
            file.written,
            file.slots_lack,
            file.end_position,
        )

    def take_unsynced(self) -> tuple[list[str], list[str]]:
        """(files written, directories with new names) since the last call, for a sync in a thread."""
        paths, self._unsynced = sorted(self._unsynced), set()
        names = [self._directory, os.path.dirname(self._directory)] if self._new_names else []
        self._new_names = False
        return paths, names

    # -- searching --------------------------------------------------------------------------------

    def search(self, topic: str, key: str, limit: int, begin: int, end: int) -> list[int]:
        """Positions of records that may have this key and were stored in [begin, end] (ms), ascending, the
        newest `limit` of them. Different keys with equal hashes are not told apart. Waits for the device."""
        key_hash = index_hash(f"{topic}#{key}")
        found: list[int] = []
        for file in reversed(self.files):
            if file.overlaps(begin, end):
                file.search(key_hash, limit, begin, end, found)
            if file.begin_ms < begin or len(found) >= limit:
                break
        return sorted(found)

    # -- opening, retention -----------------------------------------------------------------------

    def load(self, *, clean: bool, checkpoint_ms: int, mark: Mark | None = None) -> tuple[list[str], bool]:
        """Read the headers of the files on disk. Returns notes about damage, and whether entries have been
        lost: then the log behind `end_position` must be dispatched again. `resume` must follow. An index that
        is switched off is loaded too, for searches and retention, but nothing is made anew for it.

        After an unclean stop Apache deletes every file that ends behind the checkpoint; here a mark tells
        how far the files can be trusted, and what is newer is forgotten. Without a mark such a file is
        checked entry by entry, and deleted only if something is wrong with it.
        """
        notes: list[str] = []
        marked = self._trusted(mark)
        for name in self._files.disk.listdir(self._directory):
            path = os.path.join(self._directory, name)
            if len(name) != 17 or not name.isdigit():
                notes.append(f"{path}: not an index file, left alone")
                continue
            file = IndexFile(self._files, path, self.slots, self.capacity)
            if marked is not None and mark is not None and path >= marked.path:
                if path > marked.path:
                    self._files.delete(path)  # made behind the mark
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
            if name.isdigit() and name >= os.path.basename(self.files[-1].path):
                self._files.delete(os.path.join(self._directory, name))
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
        # After an unclean stop files may be there whose names have not been synced yet.
        self._new_names = self._new_names or (not clean and bool(self.files))

    def forget_expired(self, log_min: int) -> str | None:
        """Take the oldest file out of the index if all its records are gone; never the newest. Returns its
        path: the file is the caller's to unlink."""
        if len(self.files) > 1 and self.files[0].end_position < log_min:
            path = self.files.pop(0).path
            self._files.descriptors.drop(path)
            self._unsynced.discard(path)
            return path
        return None

    def close(self) -> None:
        """Write everything, slots included. Raises OSError."""
        self.write(slots=True)
