"""The part of the log that belongs to deleted topics.

Deleting a topic removes its queues; its records stay in the log until their segments are deleted. A later
recovery must neither restore them nor count them as records of a new topic with that name. So each deletion
is stored with the end of the log at that moment, until the log begins after it. Apache's broker ignores this
file: there, deleted messages can reappear and hide new ones after a crash.

No stored position lies after the end of the log: if the log becomes shorter (by a power failure or a cut),
all records written from there on are new.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.record.many import RecordGroup
from cometmq.store.base.disk import Disk
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.tables.table_checks import DELETED, DeletedTopicTable

MAX_ANNOUNCED_DELETIONS = 1000
"""The maximum number of deletions, always the newest ones, that a slave receives at a time."""


class DeletedTopics:
    """The file `config/deletedTopics.json`.

    `ends` maps a topic to the log position before which its records are deleted. The table is replaced, never
    changed.
    """

    __slots__ = ("_lock", "_table", "ends", "under_way")

    def __init__(self, disk: Disk, root: str) -> None:
        """Load the table. An unreadable one counts as empty, so deleted messages may reappear.

        Raises OSError.
        """
        self._table = JsonTable(os.path.join(root, "config", DELETED), disk)
        self.ends = DeletedTopicTable.from_plain(self._table.load_or_empty()).deleted_topics
        self._lock = threading.Lock()  # the loop may cut the log while a thread records a deletion
        self.under_way = 0  # number of deletions that may be recorded here while their queues still exist

    def add(self, topics: Sequence[str], log_end: int, log_min: int) -> None:
        """Record a deletion on the device. Raises OSError without a change."""
        with self._lock:
            ends = {topic: end for topic, end in self.ends.items() if end > log_min}
            self._replace(ends | dict.fromkeys(topics, log_end))

    def restore(self, topics: list[str], before: Mapping[str, int]) -> None:
        """Undo a deletion and restore the entries `before`.

        Raises OSError; the next start then completes the deletion.
        """
        with self._lock:
            others = {topic: end for topic, end in self.ends.items() if topic not in topics}
            self.ends = others | {topic: before[topic] for topic in topics if topic in before}
            self._table.save({"deletedTopics": self.ends})

    def lower(self, log_end: int) -> None:
        """Lower the positions to `log_end` on the device: records after it belong to new topics.

        Raises OSError.
        """
        with self._lock:
            ends = {topic: min(end, log_end) for topic, end in self.ends.items()}
            if ends != self.ends:
                self._replace(ends)

    def _replace(self, ends: dict[str, int]) -> None:
        self._table.save({"deletedTopics": ends})
        self.ends = ends

    def newest(self, log_min: int, log_end: int) -> dict[str, int]:
        """Return the newest deletions whose messages a log from `log_min` to `log_end` may still hold.

        The recorded end of a deletion in progress may be later than the end of the log.
        """
        ends = sorted(((end, topic) for topic, end in self.ends.items() if end > log_min), reverse=True)
        return {topic: min(end, log_end) for end, topic in ends[:MAX_ANNOUNCED_DELETIONS]}

    def hides(self, topic: str, position: int) -> bool:
        """Return whether the record at `position` belongs to a deleted topic."""
        return position < self.ends.get(topic, 0)

    def hidden(self, group: RecordGroup) -> NDArray[np.bool_]:
        """Return for each record of a group whether it belongs to a deleted topic."""
        ends = [min(max(self.ends.get(name, 0), 0), 1 << 62) for name in group.names]
        return group.position < np.array(ends, np.int64)[group.topic]

    def any_since(self, position: int) -> bool:
        """Return whether a topic was deleted when the log ended at `position`, or later."""
        return any(end >= position for end in self.ends.values())

    def __bool__(self) -> bool:
        return bool(self.ends)
