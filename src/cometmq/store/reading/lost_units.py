"""The reconstruction of queue units that the device cannot read, from the records themselves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np

from cometmq.store.base.disk import Disk
from cometmq.store.base.off_loop import OffLoop
from cometmq.store.derived.consume_queue import FILLER, FILLER_SIZE, UNIT_DTYPE, ConsumeQueue
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.log.scan import SegmentScan


async def lost_units(
    commit_log: CommitLog,
    disk: Disk,
    off_loop: OffLoop,
    queue: ConsumeQueue,
    first: int,
    count: int,
    *,
    start: int,
    code_of: Callable[[bytes], int],
) -> bytes:
    """Return the units of `count` queue offsets from `first` on, with fillers for missing records.

    `start` is the log position of an earlier record. `code_of` returns a tags code for a record's properties.
    Raises OSError.
    """
    start -= commit_log.framing.gap
    units = np.frombuffer(bytearray(FILLER * count), UNIT_DTYPE)
    size = commit_log.segment_size
    for base in list(commit_log.segments):
        if base + size <= start:
            continue
        scan = SegmentScan(
            disk, commit_log.path_of(base), base, size, check_crc=False, framing=commit_log.framing
        )
        try:
            with closing(scan.runs(max(start, base))) as runs:
                while (run := await off_loop.run(partial(next, runs, None))) is not None:
                    offsets = run.queue_offset - first
                    named = np.array([name == queue.topic for name in run.names])[run.topic]
                    ours = named & (run.queue_id == queue.queue_id) & (offsets >= 0)
                    for row in np.flatnonzero(ours & (offsets < count)).tolist():
                        if units["size"][offsets[row]] == FILLER_SIZE:
                            code = code_of(run.properties[row])
                            units[offsets[row]] = run.position[row], run.size[row], code
                    if np.any(ours & (offsets >= count - 1)):
                        return units.tobytes()
        except FileNotFoundError:
            continue  # retention has deleted it meanwhile
    return units.tobytes()
