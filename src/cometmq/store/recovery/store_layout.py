"""The layout of a store directory that another program may have written: its files, their lengths, its state.

The brokers, Apache's and CometMQ's, get the lengths of their files from their configuration. A tool must
determine them from the broker.conf in the directory, or else from the files themselves. It also determines
whether the store belongs to a raft member. Reading a layout writes nothing and locks nothing.

A start lengthens files that damage has shortened. With a wrong configuration it would lengthen all files, and
afterwards neither the wrong nor the right configuration could open the store. So a broker checks the lengths
before it changes a file. A file that is too short counts as damaged only if the configured length is
confirmed, by the lengths at the last clean stop or by another file. Empty files confirm nothing: they were
just being created.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, TypedDict, Unpack

import numpy as np

from cometmq.errors import ConfigError, StoreError, StoreInUse
from cometmq.settings import properties_of, settings_of
from cometmq.store.base.config import (
    ABORT,
    CHECKPOINT,
    CONSUME_QUEUES,
    INDEX,
    LOCATIONS,
    SMALL_FILES,
    StoreConfig,
)
from cometmq.store.base.disk import Disk, is_numbered, read_file
from cometmq.store.base.files import ReadOnlyFiles, first_byte
from cometmq.store.base.guards import AbortFile, StoreLock, is_store, lock_held
from cometmq.store.derived.index_file import ENTRY, ENTRY_DTYPE, HEADER, SLOT_SIZE, file_length
from cometmq.store.derived.queue_table import TRASH, names_a_directory
from cometmq.store.tables.clean_stop import CleanEnds, sizes_of

CONF = "broker.conf"
IN_USE = "a broker is using this store; stop it first"
MAX_CONF_BYTES = 1 << 20
"""Maximum size of a broker.conf in bytes, because parsing takes about 0.2 us per byte."""
_PROBE_ENTRIES = 64
_MAX_INDEX_READ_BYTES = 64 << 20  # Larger index files are not read to determine their number of slots
_MEMBER = re.compile(r"dledger-([A-Za-z][0-9]{1,9})").fullmatch
# The number of queue files that are checked first. If one of them has the configured length, the others need
# no check: reading the directories of ten thousand queues takes half a second.
_MAX_SAMPLED_QUEUES = 100
_ANEW = "remove this directory: the next start rebuilds it from the log"
MAX_FILE_BYTES = (1 << 31) - 1
"""The maximum length of a file in bytes: Apache's broker maps its files, and Java cannot map more."""


class Look(TypedDict, total=False):
    """Arguments of `read_layout` that tools pass on."""

    config: StoreConfig | None
    commit_log_dir: str


class StoreFile(NamedTuple):
    """A file of the log, a queue or the index: its first position, its path, and its actual length."""

    base: int
    path: str
    length: int


class QueueFiles(NamedTuple):
    """The files of one consume queue, in ascending order."""

    topic: str
    queue_id: int
    path: str
    files: list[StoreFile]


class StoreLayout(NamedTuple):
    """The layout of a store at one moment. `config` has the lengths that the existing files have.

    While a broker runs (`live`), the store is not `clean`. `strays` are paths that are not part of a store.
    """

    root: str
    config: StoreConfig
    live: bool
    clean: bool
    segments: list[StoreFile]
    queues: list[QueueFiles]
    index_files: list[StoreFile]
    strays: list[str]

    @property
    def log_min(self) -> int:
        return self.segments[0].base if self.segments else 0


def read_layout(
    disk: Disk, root: str, *, config: StoreConfig | None = None, commit_log_dir: str = ""
) -> StoreLayout:
    """Return the layout of the store in `root`.

    Args:
        config: The settings of the store's broker; by default those of the broker.conf in `root`, or the
            defaults. If existing files have another length than the settings, the layout contains the actual
            length. If this store is a copy, paths in the original store are ignored.
        commit_log_dir: The directory of the log, or several separated by commas; by default as configured.

    Raises:
        StoreError: There is no store.
        OSError: A directory or file cannot be read.
    """
    root = os.path.realpath(os.path.expanduser(root))
    if not disk.is_dir(root):
        raise StoreError("the directory does not exist", root)
    config = config or _found_config(disk, root, commit_log_dir)
    if disk.is_dir(config.root) and not same_directory(config.root, root):
        config = config.at_root().replace(store_path_commit_log="", read_only_commit_log_store_paths="")
    config = config.replace(store_path_root_dir=root)
    if not commit_log_dir:
        config = _as_member(disk, config)
    if commit_log_dir:
        paths = ",".join(os.path.abspath(path.strip()) for path in commit_log_dir.split(","))
        config = config.replace(store_path_commit_log=paths, read_only_commit_log_store_paths="")
    elif missing := [path for path in config.commit_log_dirs if not disk.is_dir(path)]:
        if config.store_path_commit_log and not disk.is_dir(os.path.join(root, "commitlog")):
            raise StoreError(f"the configured log directory {', '.join(missing)} does not exist", root)
        # The configured path does not exist: the store was moved here with its configuration.
        config = config.replace(store_path_commit_log="", read_only_commit_log_store_paths="")
    if moved := misplaced(disk, config):
        config = config.at_root(*moved)
    check_paths(config)
    strays: list[str] = []
    # The lock shows whether a broker is running. It is read before the files are listed: a broker that starts
    # in between only adds files, so the list still contains all older ones.
    live, clean = lock_held(disk, root), not AbortFile(disk, config.location(ABORT)).exists()
    segments = _possible(log_files(disk, config, strays), config.mapped_file_size_commit_log, strays)
    queues = [
        queue._replace(files=_possible(queue.files, config.consume_queue_file_size, strays))
        for queue in queue_files(disk, config, strays)
    ]
    index = _possible(numbered_files(disk, config.location(INDEX), 17, strays), 0, strays)
    for directory in config.commit_log_dirs:
        if not disk.is_dir(directory):
            stores = [name for name in sorted(disk.listdir(root)) if is_store(disk, os.path.join(root, name))]
            hint = f"; stores in it: {', '.join(stores[:10])}" if stores else ""
            raise StoreError(f"the store has no commitlog directory{hint}", root)
    if segments:
        config = config.replace(
            mapped_file_size_commit_log=_common_length(segments, config.mapped_file_size_commit_log)
        )
    files = [file for queue in queues for file in queue.files]
    if files:
        length = _common_length(files, config.consume_queue_file_size)
        config = config.replace(mapped_file_size_consume_queue=length)
    slots, capacity = _index_sizes(disk, index, config)
    config = config.replace(max_hash_slot_num=slots, max_index_num=capacity)
    return StoreLayout(root, config, live, clean and not live, segments, queues, index, strays)


def same_directory(one: str, other: str) -> bool:
    """Return whether two paths lead to the same directory, possibly through links."""
    return os.path.realpath(one) == os.path.realpath(other)


@contextmanager
def locked_layout(disk: Disk, root: str, **look: Unpack[Look]) -> Iterator[StoreLayout]:
    """Lock the store in `root` during a `with` block, and return its layout (see `read_layout`).

    Raises StoreError if there is no store or it is in use, ConfigError as StoreLock does, and OSError.
    """
    found = read_layout(disk, root, **look)
    try:
        lock = StoreLock(disk, found.config)
    except StoreInUse as held:
        raise StoreError(IN_USE, held.path or found.root) from None
    try:
        layout = read_layout(disk, root, **look)
        # `read_layout` takes the lock, which this process holds, for that of a running broker. So its results
        # `live` and `clean` are wrong and replaced here.
        clean = not AbortFile(disk, layout.config.location(ABORT)).exists()
        yield layout._replace(live=False, clean=clean)
    finally:
        lock.release()


def _found_config(disk: Disk, root: str, commit_log_dir: str) -> StoreConfig:
    """Return the settings of the broker.conf in `root`, without its log directory if another is given."""
    path = os.path.join(root, CONF)
    try:
        data = read_file(disk, path, MAX_CONF_BYTES + 1)
    except FileNotFoundError:
        return StoreConfig()
    if len(data) > MAX_CONF_BYTES:
        raise StoreError(f"the settings have more than {MAX_CONF_BYTES} bytes", path)
    properties = {"storePathRootDir": root, **properties_of(data, path)}
    if commit_log_dir:
        properties.pop("storePathCommitLog", None)
    with settings_of(path, data=data):
        return StoreConfig.from_properties(properties)


def _as_member(disk: Disk, config: StoreConfig) -> StoreConfig:
    """Return the settings, with raft mode and the member's name if the only log is that of a raft member.

    Raises StoreError if the store contains several logs.
    """
    root, plain = config.root, config.replace(enable_d_leger_commit_log=False)
    found = [match[1] for name in disk.listdir(root) if (match := _MEMBER(name))]
    found = [each for each in found if any(disk.listdir(os.path.join(root, f"dledger-{each}", "data")))]
    if config.enable_d_leger_commit_log or not found:
        return config
    if any(is_numbered(name, 20) for path in plain.commit_log_dirs for name in disk.listdir(path)):
        problem = f"the logs of a broker without raft and of the raft member {found[0]} are here"
        raise StoreError(f"{problem}; move one of the logs to its own directory", root)
    if len(found) > 1:
        problem = f"the logs of several raft members are here, {', '.join(sorted(found))}"
        raise StoreError(f"{problem}; a broker.conf with dLegerSelfId selects a member", root)
    return config.replace(
        enable_d_leger_commit_log=True, d_leger_self_id=found[0], d_leger_group=config.d_leger_group or "?"
    )


def log_files(disk: Disk, config: StoreConfig, strays: list[str]) -> list[StoreFile]:
    """Return the segments of the log in all its directories, in ascending order."""
    directories = config.commit_log_dirs
    found = sorted(file for each in directories for file in numbered_files(disk, each, 20, strays))
    # A broker may create segments while the directories are listed. The lists may then contain a new segment
    # and lack an older one. So the directories are listed twice, and the result ends before the first segment
    # that is missing from the first lists.
    if len(directories) > 1:
        again = {file.base for each in directories for file in numbered_files(disk, each, 20, [])}
        made = min(again - {file.base for file in found}, default=None)
        found = [file for file in found if made is None or file.base < made]
    return found


def numbered_files(disk: Disk, directory: str, digits: int, strays: list[str]) -> list[StoreFile]:
    """Return the files whose names have `digits` digits, in ascending order. Others are added to `strays`.

    The directory is listed twice for the same reason as in `log_files`.
    """
    found = []
    names = disk.listdir(directory)
    made = {name for name in disk.listdir(directory) if len(name) == digits} - set(names)
    for name in names:
        if made and len(name) == digits and name > min(made):
            continue
        path = os.path.join(directory, name)
        if not is_numbered(name, digits):
            strays.append(path)
            continue
        facts = disk.facts(path)
        if facts is not None and not facts.regular:
            strays.append(path)
        elif facts is not None:
            found.append(StoreFile(int(name), path, facts.size))
    return found


def _possible(files: list[StoreFile], configured: int, strays: list[str]) -> list[StoreFile]:
    """Return the files without those that are longer than any that a broker creates, which are `strays`."""
    longest = max(MAX_FILE_BYTES, configured)
    strays += [file.path for file in files if file.length > longest]
    return [file for file in files if file.length <= longest]


def misplaced(disk: Disk, config: StoreConfig) -> list[str]:
    """Return the settings of `LOCATIONS` whose path is empty although files exist at the usual path."""
    found = []
    for key, name in LOCATIONS.items():
        path, usual = config.location(key), os.path.join(config.root, name)
        if path != usual and not _holds_something(disk, path) and _holds_something(disk, usual):
            found.append(key)
    return found


def check_locations(disk: Disk, config: StoreConfig) -> None:
    """Check the settings that move directories or files of a store.

    Raises:
        ConfigError: A path overlaps another path of this store (see `check_paths`). Or a path lies in the
            directory of another store, and that store is in use or the path is that of a file. Or the
            directory or file exists at its usual path, but not at the path in the setting: the broker would
            begin with an empty one, and queues could lose their offsets.
        OSError: A directory cannot be read.
    """
    check_paths(config)
    root = os.path.realpath(config.root)
    for key, path in ((key, path) for key, paths in config.paths.items() for path in paths):
        parent = os.path.dirname(os.path.realpath(path))
        while not _is_within(root, parent):
            if _is_in_use(disk, parent):
                raise ConfigError(key, path, f"a path outside {parent}, which another store is using")
            if key in (CHECKPOINT, ABORT) and is_store(disk, parent):
                raise ConfigError(key, path, f"a path outside {parent}, which belongs to another store")
            parent = os.path.dirname(parent)
        if key in (CHECKPOINT, ABORT) and parent != root and is_store(disk, parent):
            raise ConfigError(key, path, f"a path outside {parent}, which belongs to another store")
    for key in misplaced(disk, config):
        usual = os.path.join(config.root, LOCATIONS[key])
        remedy = "move it to the new path, or remove the setting, which Apache's broker ignores"
        raise ConfigError(key, config.location(key), f"the path of the files at {usual} ({remedy})")


def check_paths(config: StoreConfig) -> None:
    """Raise ConfigError if a path of the settings equals, contains or lies in another path of the store.

    No path may contain the store directory either.
    """
    root, member = os.path.realpath(config.root), config.enable_d_leger_commit_log
    unused = _LOG_KEYS[:2] if member else _LOG_KEYS[2:]
    usual = dict.fromkeys((CONF, "lock", "config", "consumequeue_ext"), "") | {"commitlog": _LOG_KEYS[0]}
    usual |= {name: key for key, name in LOCATIONS.items()}
    if member:
        raft_log = os.path.basename(config.raft_log_dir)
        usual |= {raft_log: _LOG_KEYS[0], f"{raft_log}/index": ""}
    # Pairs of a path that the store uses and the key of a setting. Only a path in that setting may equal the
    # used path, contain it or lie inside it. If the key is "", no configured path may.
    taken = [(os.path.realpath(os.path.join(root, name)), key) for name, key in usual.items()]
    seen: set[tuple[str, str]] = set()
    for key, path in ((key, path) for key, paths in config.paths.items() for path in paths):
        resolved, owner = os.path.realpath(path), _LOG_KEYS[0] if key in _LOG_KEYS else key
        # A directory of the log may be named several times, even by different settings. It is checked once.
        if key in unused or (owner, path) in seen:
            continue
        seen.add((owner, path))
        if _is_within(root, resolved):
            raise ConfigError(key, path, f"a path that does not contain the store directory {root}")
        for other, permitted in taken:
            if permitted != owner and (_is_within(resolved, other) or _is_within(other, resolved)):
                raise ConfigError(key, path, f"a path apart from {other}, which the store uses otherwise")
        taken.append((resolved, ""))


_LOG_KEYS = ("storePathCommitLog", "readOnlyCommitLogStorePaths", "storePathDLedgerCommitLog")


def _is_within(path: str, directory: str) -> bool:
    """Return whether a resolved path is the directory itself or lies inside it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _is_in_use(disk: Disk, root: str) -> bool:
    try:
        return lock_held(disk, root)
    except OSError:
        return False  # The file `lock` exists, but is not the lock of a store


def _holds_something(disk: Disk, path: str) -> bool:
    try:
        return bool(disk.listdir(path)) if disk.is_dir(path) else disk.facts(path) is not None
    except NotADirectoryError:
        return False


def queue_files(disk: Disk, config: StoreConfig, strays: list[str]) -> Iterator[QueueFiles]:
    """Yield the files of each queue of a store."""
    directory = config.location(CONSUME_QUEUES)
    for topic in disk.listdir(directory):
        if topic == TRASH:
            continue  # This directory holds files of deleted topics until the broker removes them.
        topic_dir = os.path.join(directory, topic)
        if disk.is_link(topic_dir) or not disk.is_dir(topic_dir) or not names_a_directory(topic):
            strays.append(topic_dir)
            continue
        for name in disk.listdir(topic_dir):
            path = os.path.join(topic_dir, name)
            number = name.isascii() and name.isdigit()
            if number and disk.is_dir(path) and not disk.is_link(path):
                yield QueueFiles(topic, int(name), path, numbered_files(disk, path, 20, strays))
            else:
                strays.append(path)


def _common_length(files: list[StoreFile], configured: int) -> int:
    """Return the length with which a set of files was probably created.

    A length fits a set of files if each file begins at a multiple of the length and none is longer. The first
    of these that exists is returned: the configured length if a file has it and all files begin at multiples
    of it; the most frequent length of a file that fits; the configured length if it fits; the shortest
    distance between two files; the length of the only file.
    """
    lengths = Counter(file.length for file in files)
    longest: int = max(lengths)
    starts = [file.base for file in files]

    def fits(length: int) -> bool:
        return length > 0 and length >= longest and all(base % length == 0 for base in starts)

    if lengths[configured] and all(base % configured == 0 for base in starts):
        return configured  # At least one file has the configured length, so a longer file is a damaged one
    seen = next((length for length, _ in lengths.most_common() if fits(length)), 0)
    if seen or fits(configured):
        return seen or configured
    return min((b - a for a, b in pairwise(sorted(starts)) if b > a), default=longest)


def _index_sizes(disk: Disk, files: list[StoreFile], config: StoreConfig) -> tuple[int, int]:
    """Return the numbers of slots and of entries for which the index files have room.

    The first that fits the length of the files counts: configured, default, SMALL_FILES, derived from the
    content of a file. If none fits, the configured numbers are returned.
    """
    configured = config.max_hash_slot_num, config.max_index_num
    default = StoreConfig()
    usual = (
        configured,
        (default.max_hash_slot_num, default.max_index_num),
        (SMALL_FILES["max_hash_slot_num"], SMALL_FILES["max_index_num"]),
    )
    lengths = Counter(file.length for file in files)
    if not lengths:
        return configured
    length = lengths.most_common(1)[0][0]
    for slots, capacity in usual:
        if file_length(slots, capacity) == length:
            return slots, capacity
    for file in files:
        if file.length == length:
            slots = _slots_by_content(disk, file)
            if slots:
                return slots, (length - HEADER.size - slots * SLOT_SIZE) // ENTRY.size
    return configured


def _slots_by_content(disk: Disk, file: StoreFile) -> int:
    """Return the number of slots of an index file, determined from its entries; 0 if that is impossible.

    The entries can be recognized: entry 0 is all zeros, and the last entry contains the end position that the
    file header also contains. The positions in the entries between them ascend, and each entry refers to an
    earlier entry of its hash chain.
    """
    data = read_file(disk, file.path) if file.length <= _MAX_INDEX_READ_BYTES else b""
    if len(data) < HEADER.size:
        return 0
    _, _, begin, end, _, count = HEADER.unpack_from(data)
    if count < 2 or end <= 0:
        return 0
    wanted = end.to_bytes(8, "big")
    at = data.find(wanted, HEADER.size)
    while at >= 0:
        # If the bytes found at `at` are the position field of the last entry, entry 0 begins at `first`.
        first = at - 4 - (count - 1) * ENTRY.size
        slots, odd = divmod(first - HEADER.size, SLOT_SIZE)
        if slots > 0 and not odd and _entries_fit(data, first, count, begin, end):
            return int(slots)
        at = data.find(wanted, at + 1)
    return 0


def _entries_fit(data: bytes, first: int, count: int, begin: int, end: int) -> bool:
    if (len(data) - first) % ENTRY.size or data[first : first + ENTRY.size].strip(b"\0"):
        return False
    shown = min(count - 1, _PROBE_ENTRIES)
    entries = np.frombuffer(data, ENTRY_DTYPE, shown, first + ENTRY.size)
    position = entries["position"].astype(np.int64)
    good = (entries["hash"] >= 0) & (entries["previous"] >= 0)
    good &= (position >= begin) & (position <= end) & (entries["previous"] < np.arange(1, shown + 1))
    return bool(good.all()) and bool((np.diff(position) >= 0).all())


def check_lengths(disk: Disk, config: StoreConfig, ends: CleanEnds) -> None:
    """Check that the files of a store have the configured lengths. Raises StoreError, OSError."""
    of_segments, of_queues, of_index = sizes_of(config)
    last_of_segments, last_of_queues, last_of_index = ends.sizes

    segments = log_files(disk, config, [])
    where, key = ", ".join(config.commit_log_dirs), f"mappedFileSizeCommitLog={of_segments}"
    remedy = f"truncate -s {of_segments} restores its length"
    _check(disk, segments, of_segments, last_of_segments, where, key, remedy)

    where = config.location(INDEX)
    files = [file._replace(base=0) for file in numbered_files(disk, where, 17, [])]
    key = f"maxHashSlotNum={config.max_hash_slot_num}, maxIndexNum={config.max_index_num} ({of_index} bytes)"
    _check(disk, files, of_index, last_of_index, where, key, _ANEW)

    if of_queues == last_of_queues:
        return  # This was the length at the last clean stop. So thousands of directories need not be read.
    found = (file for queue in queue_files(disk, config, []) for file in queue.files)
    files = list(itertools.islice(found, _MAX_SAMPLED_QUEUES))
    if all(file.length != of_queues for file in files):
        files += found  # No sampled file has the configured length, so all files are checked
    where, key = config.location(CONSUME_QUEUES), f"mappedFileSizeConsumeQueue={of_queues}"
    _check(disk, files, of_queues, last_of_queues, where, key, _ANEW)


def _check(
    disk: Disk, files: list[StoreFile], size: int, last: int, where: str, key: str, remedy: str
) -> None:
    """Check one kind of files: their configured length, and that at the last clean stop, 0 if unknown.

    An error names their directories (`where`), the setting (`key`) and what the operator can do (`remedy`).
    """
    for file in files:
        if file.length > size or file.base % size:
            raise StoreError(f"the length of {file.path}, {file.length} bytes, contradicts {key}", where)
    lengths = Counter(file.length for file in files if file.length)
    if size in lengths or size == last:
        return
    for length, count in lengths.most_common():
        if count > 1 or length == last:
            raise StoreError(f"the length of the files, {length} bytes, contradicts {key}", where)
    with ReadOnlyFiles(disk) as contents:
        for file in files:
            if first_byte(contents, file.path, 0, file.length) is not None:
                misfit = f"the length of {file.path}, {file.length} bytes, contradicts {key}"
                raise StoreError(
                    f"{misfit}: either the file or the setting is wrong. If the file was truncated, {remedy}",
                    where,
                )
