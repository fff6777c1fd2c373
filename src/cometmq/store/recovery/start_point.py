"""Where recovery after an unclean stop begins: as late as the checkpoint allows.

The checkpoint's mark gives the position itself. Without one (Apache's broker wrote last, or the checkpoint is
damaged) its times must do: everything stored at or before the smaller one is durable, and so everything
before the newest segment that begins with such a record.
"""

from __future__ import annotations

from cometmq.protocol.record.layout import BLANK_SIZE
from cometmq.protocol.record.one import Facts, encode_blank, record_facts
from cometmq.store.base.checkpoint import Mark
from cometmq.store.base.disk import Disk
from cometmq.store.log.commit_log import CommitLog

_WORTH_IT = 16 << 20  # bytes of a segment


def mark_holds(disk: Disk, log: CommitLog, segments: list[int], mark: Mark) -> bool:
    """Whether the log is still the one that the mark was made for: its last record is there. A mark that
    names none must have a record, or nothing at all, at its position."""
    position = mark.position
    base = position - position % log.segment_size
    if mark.last >= 0:
        at = mark.last % log.segment_size
        base = mark.last - at
        facts = _record_at(disk, log.path_of(base), at, mark.last) if base in segments else None
        return facts is not None and mark.last + facts.size <= position
    if base not in segments:
        return position == (segments[-1] + log.segment_size if segments else 0)
    at = position - base
    if _record_at(disk, log.path_of(base), at, position) is not None:
        return True
    fd = disk.open(log.path_of(base), write=False)
    try:
        head = disk.pread(fd, BLANK_SIZE, at)
    except OSError:
        return False
    finally:
        disk.close(fd)
    return head in (bytes(len(head)), encode_blank(log.segment_size - at))


def walk_from(mark: Mark, segment_size: int) -> int:
    """The mark's position. Small segments are walked as a whole: that costs nothing, and what has gone wrong
    in files that nobody should have touched comes right."""
    if segment_size >= _WORTH_IT:
        return mark.position
    last = max(0, mark.position - 1)
    return last - last % segment_size


def trusted_segment(disk: Disk, log: CommitLog, segments: list[int], trusted_ms: int) -> int | None:
    """First position of the newest segment whose first record was stored at or before `trusted_ms`."""
    for base in reversed(segments):
        facts = _record_at(disk, log.path_of(base), 0, base)
        if facts is not None and 0 < facts.store_ms <= trusted_ms:
            return base
    return None


def _record_at(disk: Disk, path: str, offset: int, position: int) -> Facts | None:
    """The valid record that begins there; None if there is none, or none that can be read."""
    fd = disk.open(path, write=False)
    try:
        size = max(0, int.from_bytes(disk.pread(fd, 4, offset), "big", signed=True))
        return record_facts(memoryview(disk.pread(fd, size, offset)), 0, position)
    except OSError:
        return None
    finally:
        disk.close(fd)
