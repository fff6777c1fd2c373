"""Whether the files of a store have the lengths that the configuration gives them; asked before anything is
touched.

A start fills up files that damage has cut short. With a wrong configuration that would lengthen whole files,
and then neither the wrong nor the right one would open the store again. So a shorter length counts as damage
only as long as nothing speaks for another configuration: the lengths at the last clean stop (kept beside the
queues' ends), several files of one other length, one of the usual lengths, or a file that is complete as it
is.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from cometmq.errors import StoreError
from cometmq.store.config import CONSUME_QUEUE_UNIT, SMALL_FILES, StoreConfig
from cometmq.store.consume_queue import UNIT_STRUCT
from cometmq.store.disk import Disk
from cometmq.store.ends import QueueEnds
from cometmq.store.scan import SegmentScan
from cometmq.store.shape import StoreFile, log_files, numbered_files

_USUAL_SEGMENTS = (StoreConfig.mapped_file_size_commit_log, SMALL_FILES["mapped_file_size_commit_log"])
_USUAL_QUEUE_FILES = (
    StoreConfig.mapped_file_size_consume_queue,
    SMALL_FILES["mapped_file_size_consume_queue"],
)


# Queue files that are asked first: those of ten thousand queues took half a second of a start (profiled).
_WITNESSES = 100


def check_lengths(disk: Disk, config: StoreConfig, ends: QueueEnds) -> None:
    """Raises StoreError, with both lengths, when log or queues were written with other ones; OSError."""
    size = config.mapped_file_size_commit_log
    other = _contradiction(
        log_files(disk, config, []), size, ends.segment_size, _USUAL_SEGMENTS,
        lambda file: _is_whole_segment(disk, file),
    )  # fmt: skip
    if other:
        raise StoreError(
            f"{other} do not fit mappedFileSizeCommitLog={size}", ", ".join(config.commit_log_dirs)
        )
    size = config.consume_queue_file_size
    if size == ends.queue_file_size:
        return  # as at the last clean stop; thousands of directories need not be looked at for it
    directory = os.path.join(config.root, "consumequeue")
    found = _queue_files(disk, directory)
    files = list(itertools.islice(found, _WITNESSES))
    if all(file.length != size for file in files):
        files += found  # the few do not bear the configured length out: ask all
    other = _contradiction(
        files, size, ends.queue_file_size, _USUAL_QUEUE_FILES, lambda file: _is_whole_queue_file(disk, file)
    )
    if other:
        raise StoreError(f"{other} do not fit mappedFileSizeConsumeQueue={size}", directory)


def _queue_files(disk: Disk, directory: str) -> Iterator[StoreFile]:
    for topic in disk.listdir(directory):
        topic_dir = os.path.join(directory, topic)
        if disk.is_dir(topic_dir):
            for name in disk.listdir(topic_dir):
                if name.isdigit():
                    yield from numbered_files(disk, os.path.join(topic_dir, name), 20, [])


def _contradiction(
    files: list[StoreFile],
    configured: int,
    last: int,
    usual: Iterable[int],
    is_whole: Callable[[StoreFile], bool],
) -> str:
    """What speaks for another length than the configured one, "" if nothing does.

    last: the length at the last clean stop, 0 if unknown. A file without content says nothing.
    """
    for file in files:
        if file.length > configured or file.base % configured:
            return f"{file.length} bytes from {file.base} on"
    lengths = Counter(file.length for file in files if file.length)
    if configured in lengths or last == configured:
        return ""
    for length, count in lengths.most_common():
        if count > 1 or length == last or length in usual:
            return f"files of {length} bytes"
    return next((f"files of {file.length} bytes" for file in files if file.length and is_whole(file)), "")


def _is_whole_segment(disk: Disk, file: StoreFile) -> bool:
    """Whether a blank record ends exactly where the file does."""
    scan = SegmentScan(disk, file.path, file.base, file.length, check_crc=False, search=False)
    for _ in scan.runs(file.base):
        pass
    return scan.closed


def _is_whole_queue_file(disk: Disk, file: StoreFile) -> bool:
    """Whether a unit ends exactly where the file does."""
    if file.length % CONSUME_QUEUE_UNIT:
        return False
    fd = disk.open(file.path, write=False)
    try:
        data = disk.pread(fd, CONSUME_QUEUE_UNIT, file.length - CONSUME_QUEUE_UNIT)
    finally:
        disk.close(fd)
    return len(data) == CONSUME_QUEUE_UNIT and UNIT_STRUCT.unpack(data)[1] > 0
