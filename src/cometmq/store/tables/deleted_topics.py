"""The table of deleted topics, with the part of the log in which each topic's records are deleted.

Deleting a topic removes its queues; its records stay in the log until their segments are deleted. A later
recovery must neither restore these records nor count them as records of a new topic with the same name. So
each deletion is stored with the position at which the log ended at that time. The entry is no longer needed
once the log begins at or after that position. Apache's broker ignores this file: if it recovers the store
after a crash, deleted messages can reappear and hide new ones.

No stored position lies after the end of the log: if a power failure or a truncation shortens the log, all
records written from its new end on are new.
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
"""The maximum number of topic deletions that a master reports to a slave: only the newest are reported."""


class DeletedTopics:
    """The file `config/deletedTopics.json`.

    `ends` maps a topic to the log position before which its records are deleted. The dict is never modified:
    each change replaces it.
    """

    def __init__(self, disk: Disk, root: str) -> None:
        """Load the table. A damaged one counts as empty, so deleted messages may reappear. Raises OSError."""
        self._table = JsonTable(os.path.join(root, "config", DELETED), disk)
        self.ends = DeletedTopicTable.from_plain(self._table.load_or_empty()).deleted_topics
        self._lock = threading.Lock()  # `add` in a thread and `lower` in the loop both replace `ends`
        # Number of deletions in progress. Their topics are already in the table, but their queues may still
        # exist.
        self.under_way = 0

    def add(self, topics: Sequence[str], log_end: int, log_min: int) -> None:
        """Record the deletion of topics durably. An OSError leaves the table unchanged."""
        with self._lock:
            ends = {topic: end for topic, end in self.ends.items() if end > log_min}
            self._replace(ends | dict.fromkeys(topics, log_end))

    def restore(self, topics: list[str], before: Mapping[str, int]) -> None:
        """Undo a deletion with the table before it. After an OSError, the next start completes it."""
        with self._lock:
            others = {topic: end for topic, end in self.ends.items() if topic not in topics}
            self.ends = others | {topic: before[topic] for topic in topics if topic in before}
            self._table.save({"deletedTopics": self.ends})

    def lower(self, log_end: int) -> None:
        """Lower the stored positions to the new end of a truncated log, durably. Raises OSError."""
        with self._lock:
            ends = {topic: min(end, log_end) for topic, end in self.ends.items()}
            if ends != self.ends:
                self._replace(ends)

    def _replace(self, ends: dict[str, int]) -> None:
        self._table.save({"deletedTopics": ends})
        self.ends = ends

    def newest(self, log_min: int, log_end: int) -> dict[str, int]:
        """Return the newest `MAX_ANNOUNCED_DELETIONS` entries that concern the log [log_min, log_end).

        While a deletion is in progress, its position may lie after `log_end`, and is limited to it.
        """
        ends = sorted(((end, topic) for topic, end in self.ends.items() if end > log_min), reverse=True)
        return {topic: min(end, log_end) for end, topic in ends[:MAX_ANNOUNCED_DELETIONS]}

    def hides(self, topic: str, position: int) -> bool:
        """Return whether the record of `topic` at `position` is deleted with its topic."""
        return position < self.ends.get(topic, 0)

    def hidden(self, group: RecordGroup) -> NDArray[np.bool_]:
        """Return, for each record of a group, whether the record is deleted with its topic."""
        ends = [min(max(self.ends.get(name, 0), 0), 1 << 62) for name in group.names]
        return group.position < np.array(ends, np.int64)[group.topic]

    def any_since(self, position: int) -> bool:
        """Return whether any topic was deleted after the log had grown to `position`."""
        return any(end >= position for end in self.ends.values())

    def __bool__(self) -> bool:
        return bool(self.ends)
