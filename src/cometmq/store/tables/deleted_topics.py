"""Which part of the log belongs to topics that have been deleted.

Deleting a topic removes its queues; its records stay in the log until their segments go. A later recovery
must neither bring them back nor take them for records of a new topic of that name. So each deletion is kept,
with the end of the log at that moment, until the log begins behind it. Apache's broker ignores this file:
there, deleted messages can come back and hide new ones after a crash.

No such position lies behind the end of the log: when the log ends earlier (after a power failure, or cut),
what comes behind it is new.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.record.many import Run
from cometmq.store.base.disk import Disk
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.tables.table_checks import DELETED, DeletedTopicTable

MOST_TOLD = 1000
"""The most that a slave is told of at once, the newest: what it lacks of others it finds out by itself."""


class DeletedTopics:
    """`config/deletedTopics.json`: `ends`, topic -> log position before which its records do not count; the
    table is replaced, never changed."""

    __slots__ = ("_lock", "_table", "ends", "under_way")

    def __init__(self, disk: Disk, root: str) -> None:
        """Raises OSError. A table that cannot be read counts as empty: deleted messages may come back."""
        self._table = JsonTable(os.path.join(root, "config", DELETED), disk)
        self.ends = DeletedTopicTable.from_plain(self._table.load_or_empty()).deleted_topics
        self._lock = threading.Lock()  # a cut, in the loop, may meet a deletion that a thread notes
        self.under_way = 0  # deletions that may be noted here already while their queues are still there

    def add(self, topics: Sequence[str], log_end: int, log_min: int) -> None:
        """Keep a deletion, on the device when this returns. Raises OSError; then nothing is kept."""
        with self._lock:
            ends = {topic: end for topic, end in self.ends.items() if end > log_min}
            self._replace(ends | dict.fromkeys(topics, log_end))

    def restore(self, topics: list[str], before: Mapping[str, int]) -> None:
        """Take a deletion back: what was kept of these topics `before` counts again. Raises OSError; the next
        start then finishes the deletion."""
        with self._lock:
            others = {topic: end for topic, end in self.ends.items() if topic not in topics}
            self.ends = others | {topic: before[topic] for topic in topics if topic in before}
            self._table.save({"deletedTopics": self.ends})

    def lower(self, log_end: int) -> None:
        """The log ends at `log_end` now: what comes behind it is of new topics. On the device when this
        returns. Raises OSError."""
        with self._lock:
            ends = {topic: min(end, log_end) for topic, end in self.ends.items()}
            if ends != self.ends:
                self._replace(ends)

    def _replace(self, ends: dict[str, int]) -> None:
        self._table.save({"deletedTopics": ends})
        self.ends = ends

    def newest(self, log_min: int, log_end: int) -> dict[str, int]:
        """The newest deletions of which a log from `log_min` to `log_end` may still hold messages. One that
        is being noted may be for an end that the log has not reached."""
        ends = sorted(((end, topic) for topic, end in self.ends.items() if end > log_min), reverse=True)
        return {topic: min(end, log_end) for end, topic in ends[:MOST_TOLD]}

    def hides(self, topic: str, position: int) -> bool:
        """Whether the record at `position` belongs to a deleted topic."""
        return position < self.ends.get(topic, 0)

    def hidden(self, run: Run) -> NDArray[np.bool_]:
        """Which records of a run belong to deleted topics."""
        ends = [min(max(self.ends.get(name, 0), 0), 1 << 62) for name in run.names]
        return run.position < np.array(ends, np.int64)[run.topic]

    def any_since(self, position: int) -> bool:
        """Whether a topic was deleted when the log ended at `position`, or later."""
        return any(end >= position for end in self.ends.values())

    def __bool__(self) -> bool:
        return bool(self.ends)
