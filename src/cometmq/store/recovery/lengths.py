"""Whether the files of a store have the configured lengths; asked before anything is touched.

A start fills up files that damage has cut short. With a wrong configuration that would lengthen whole files,
and then neither the wrong nor the right one would open the store. So a shorter length counts as damage only
where the lengths at the last clean stop (kept beside the queues' ends) or another file bear the configured
one out. A file that holds nothing says nothing: it was just being made.
"""

from __future__ import annotations

import itertools
from collections import Counter

from cometmq.errors import StoreError
from cometmq.store.base.config import CONSUME_QUEUES, INDEX, StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.base.read_only_files import ReadOnlyFiles, first_byte
from cometmq.store.recovery.store_layout import StoreFile, log_files, numbered_files, queue_files
from cometmq.store.tables.clean_stop import CleanEnds, sizes_of

# Queue files that are asked first: those of ten thousand queues took half a second of a start (profiled).
_MAX_SAMPLED_QUEUES = 100
_ANEW = "remove this directory: the next start makes it anew from the log"


def check_lengths(disk: Disk, config: StoreConfig, ends: CleanEnds) -> None:
    """Raises StoreError, with both lengths, when files were written with other ones; OSError."""
    of_segments, of_queues, of_index = sizes_of(config)
    last_of_segments, last_of_queues, last_of_index = ends.sizes

    segments = log_files(disk, config, [])
    where, key = ", ".join(config.commit_log_dirs), f"mappedFileSizeCommitLog={of_segments}"
    cure = f"truncate -s {of_segments} gives it its length back"
    _check(disk, segments, of_segments, last_of_segments, where, key, cure)

    where = config.location(INDEX)
    files = [file._replace(base=0) for file in numbered_files(disk, where, 17, [])]
    key = f"maxHashSlotNum={config.max_hash_slot_num}, maxIndexNum={config.max_index_num} ({of_index} bytes)"
    _check(disk, files, of_index, last_of_index, where, key, _ANEW)

    if of_queues == last_of_queues:
        return  # thousands of directories need not be looked at for it
    found = (file for queue in queue_files(disk, config, []) for file in queue.files)
    files = list(itertools.islice(found, _MAX_SAMPLED_QUEUES))
    if all(file.length != of_queues for file in files):
        files += found  # the few do not bear the configured length out: ask all
    where, key = config.location(CONSUME_QUEUES), f"mappedFileSizeConsumeQueue={of_queues}"
    _check(disk, files, of_queues, last_of_queues, where, key, _ANEW)


def _check(disk: Disk, files: list[StoreFile], size: int, last: int, where: str, key: str, cure: str) -> None:
    """last: the length at the last clean stop, 0 if unknown. where, key, cure: for the error."""
    for file in files:
        if file.length > size or file.base % size:
            raise StoreError(f"{file.length} bytes in {file.path} do not fit {key}", where)
    lengths = Counter(file.length for file in files if file.length)
    if size in lengths or size == last:
        return
    for length, count in lengths.most_common():
        if count > 1 or length == last:
            raise StoreError(f"files of {length} bytes do not fit {key}", where)
    with ReadOnlyFiles(disk) as contents:
        for file in files:
            if first_byte(contents, file.path, 0, file.length) is not None:
                misfit = f"{file.length} bytes in {file.path} do not fit {key}"
                raise StoreError(
                    f"{misfit}, and nothing tells which is wrong; if the file was cut short, {cure}", where
                )
