"""Where recovery after an unclean stop begins: as late as the checkpoint allows.

The checkpoint's mark gives the position itself. Without one (Apache's broker wrote last, or the checkpoint is
damaged) its times must do: everything stored at or before the smaller one is durable, and so everything
before the newest segment that begins with such a record.
"""

from __future__ import annotations

from cometmq.protocol.record.layout import BLANK_SIZE
from cometmq.protocol.record.one import encode_blank
from cometmq.store.base.checkpoint import Mark
from cometmq.store.log.log_reader import LogReader

_WORTH_IT = 16 << 20  # bytes of a segment


def mark_holds(log: LogReader, segments: list[int], segment_size: int, mark: Mark) -> bool:
    """Whether the log is still the one that the mark was made for: its last record is there. A mark that
    names none must have a record, or nothing at all, at its position."""
    position = mark.position
    if mark.last >= 0:
        facts = log.facts(mark.last)
        return facts is not None and mark.last + facts.size <= position
    base = position - position % segment_size
    if base not in segments:
        return position == (segments[-1] + segment_size if segments else 0)
    if log.facts(position) is not None:
        return True
    head = log.bytes_at(position, BLANK_SIZE)
    return head is not None and head in (bytes(len(head)), encode_blank(base + segment_size - position))


def walk_from(mark: Mark, segment_size: int) -> int:
    """The mark's position. Small segments are walked as a whole: that costs nothing, and what has gone wrong
    in files that nobody should have touched comes right."""
    if segment_size >= _WORTH_IT:
        return mark.position
    last = max(0, mark.position - 1)
    return last - last % segment_size


def trusted_segment(log: LogReader, segments: list[int], trusted_ms: int) -> int | None:
    """First position of the newest segment whose first record was stored at or before `trusted_ms`."""
    for base in reversed(segments):
        facts = log.facts(base)
        if facts is not None and 0 < facts.store_ms <= trusted_ms:
            return base
    return None
