"""Where recovery after an unclean stop begins: as late as the checkpoint allows.

Everything stored at or before the checkpoint's time is durable in log, queues and index. The newest
segment that begins with such a record is the coarse answer (Apache's). In a large segment the consume
queues know a finer one: a unit whose record was stored at or before that time points at a place up to
which nothing needs to be walked.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable

from cometmq.protocol.record import MIN_SIZE
from cometmq.store.commit_log import CommitLog
from cometmq.store.consume_queue import UNIT_STRUCT, ConsumeQueue, file_name
from cometmq.store.disk import Disk
from cometmq.store.scan import Facts, record_facts

_QUEUES = 64  # asked at most; one busy queue is enough for a good answer
_WORTH_IT = 16 << 20  # bytes of a segment; smaller ones are walked as quickly


def trusted_segment(disk: Disk, log: CommitLog, segments: list[int], trusted_ms: int) -> int | None:
    """First position of the newest segment whose first record was stored at or before `trusted_ms`."""
    for base in reversed(segments):
        facts = _record_at(disk, log.path_of(base), 0, base)
        if facts is not None and 0 < facts.store_ms <= trusted_ms:
            return base
    return None


def later_start(
    disk: Disk, log: CommitLog, queues: Iterable[ConsumeQueue], base: int, trusted_ms: int
) -> int:
    """Position of a record in the segment from `base` on that was stored at or before `trusted_ms`, as
    late a one as the queues (loaded up to `base`) tell of; `base` if they know none."""
    best = base
    if log.segment_size < _WORTH_IT:
        return best
    for queue in itertools.islice(queues, _QUEUES):
        best = max(best, _latest(disk, log, queue, base, trusted_ms))
    return best


def _latest(disk: Disk, log: CommitLog, queue: ConsumeQueue, base: int, trusted_ms: int) -> int:
    """The same for one queue, looking at the file in which its first unit behind `base` lies."""
    position = queue.max_offset * 20
    file_base = position - position % queue.file_size
    if file_base not in queue.positions:
        return base
    best = base
    fd = disk.open(os.path.join(queue.path, file_name(file_base)), write=False)
    try:
        low, high = queue.max_offset, queue.next_file_offset(queue.max_offset)
        while low < high:
            middle = (low + high) // 2
            at, size, _ = UNIT_STRUCT.unpack(disk.pread(fd, 20, middle * 20 - file_base))
            facts = None
            if size >= MIN_SIZE and base <= at < base + log.segment_size:
                facts = _record_at(disk, log.path_of(base), at - base, at)
            if facts is not None and facts.queue_offset == middle and 0 < facts.store_ms <= trusted_ms:
                best, low = max(best, at), middle + 1
            else:
                high = middle
    finally:
        disk.close(fd)
    return best


def _record_at(disk: Disk, path: str, offset: int, position: int) -> Facts | None:
    fd = disk.open(path, write=False)
    try:
        size = max(0, int.from_bytes(disk.pread(fd, 4, offset), "big", signed=True))
        return record_facts(memoryview(disk.pread(fd, size, offset)), 0, position)
    finally:
        disk.close(fd)
