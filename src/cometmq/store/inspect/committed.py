"""How far the log of a raft member that nobody runs is known to be committed.

Three tell it: the member's checkpoint by the index of an entry, the mark of the store, and each queue by its
last unit. A queue never gets units of other entries.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from cometmq.store.base.checkpoint import FILE_SIZE, checkpoint_position_of
from cometmq.store.base.config import CHECKPOINT
from cometmq.store.base.disk import OsDisk
from cometmq.store.base.read_only_files import ReadOnlyFiles
from cometmq.store.derived.consume_queue import FILLER_SIZE, UNIT_DTYPE
from cometmq.store.inspect.unit_files import UnitFiles
from cometmq.store.ledger.entry_index import place_on_disk
from cometmq.store.ledger.member_files import read_mark
from cometmq.store.log.log_reader import LogReader
from cometmq.store.recovery.store_layout import QueueFiles, StoreLayout, read_layout

_UNITS = 4096  # that are looked at before a queue counts as one with fillers only


class MemberLog(NamedTuple):
    """Where a raft member's segments lie, and the log position behind what is known to be committed."""

    directories: tuple[str, ...]
    committed: int


def member_log(root: str) -> MemberLog | None:
    """The log of the raft member in `root`; None for another store. Raises StoreError, OSError."""
    layout = read_layout(OsDisk(), root)
    if not layout.config.enable_d_leger_commit_log:
        return None
    with ReadOnlyFiles(OsDisk()) as files:
        return MemberLog(layout.config.commit_log_dirs, committed_end(layout, files))


def committed_end(layout: StoreLayout, files: ReadOnlyFiles) -> int:
    """The log position behind the last entry that is known to be committed. Raises StoreError, OSError."""
    directory = layout.config.ledger_dir
    place = place_on_disk(files, os.path.join(directory, "index"), read_mark(files.disk, directory).committed)
    mark = checkpoint_position_of(files.read(layout.config.location(CHECKPOINT), FILE_SIZE, 0))
    ends = [_queue_end(layout, files, queue) for queue in layout.queues]
    return max(
        layout.log_min, place.end if place is not None else 0, mark.position if mark is not None else 0, *ends
    )


def _queue_end(layout: StoreLayout, files: ReadOnlyFiles, queue: QueueFiles) -> int:
    """Behind the record of a queue's last unit, if that record is there; else 0."""
    units = UnitFiles(files, queue, layout.config.consume_queue_file_size)
    last = np.frombuffer(units.read(max(units.first, units.end - _UNITS), units.end), UNIT_DTYPE)
    last = last[last["size"] != FILLER_SIZE][-1:]
    if not len(last):
        return 0
    position, size = int(last["position"][0]), int(last["size"][0])
    facts = LogReader(files, layout.config).facts(position)
    return position + size if facts is not None and facts.size == size else 0
