"""The ends of the consume queues, and the lengths of the files, at the last clean stop.

A queue whose newest sector, file or directory is lost looks like a shorter queue, and would assign offsets
that its messages already have. So a clean stop writes the ends of all queues to a small table. If a start
finds a queue that ends earlier, it rebuilds the queues from the log. Apache's broker does not use this file;
if it has served the store since, the stored ends are lower bounds. A damaged table counts as empty, and its
`.bak` is not used: a wrong end would move a queue, while a missing end only leaves damage undetected.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from cometmq.store.base.config import StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.index_file import file_length
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.tables.table_checks import ENDS, QueueEndTable


def sizes_of(config: StoreConfig) -> tuple[int, int, int]:
    """Return the lengths in bytes of a segment, a queue file and an index file."""
    of_index = file_length(config.max_hash_slot_num, config.max_index_num)
    return config.mapped_file_size_commit_log, config.consume_queue_file_size, of_index


class CleanEnds:
    """The file `config/consumeQueueEnds.json`: the end of each queue, by topic and queue id.

    `sizes` holds the lengths in bytes of a segment, a queue file and an index file, each 0 if unknown.
    """

    def __init__(self, disk: Disk, root: str) -> None:
        """Load the table of queue ends. Raises OSError."""
        self._table = JsonTable(os.path.join(root, "config", ENDS), disk)
        found = QueueEndTable.from_plain(self._table.load_or_empty(backup=False))
        self.log_end = found.log_end
        self.ends = found.queue_ends
        self.sizes = found.segment_size, found.queue_file_size, found.index_file_size

    def save(self, queues: Iterable[ConsumeQueue], log_end: int, config: StoreConfig) -> None:
        """Write the ends of the queues and the log, and the lengths of the files. Raises OSError."""
        sizes = sizes_of(config)
        ends: dict[str, dict[int, int]] = {}
        for queue in queues:
            if queue.max_offset:
                ends.setdefault(queue.topic, {})[queue.queue_id] = queue.max_offset
        if (ends, log_end, sizes) != (self.ends, self.log_end, self.sizes):
            self._save(ends, log_end, sizes)

    def _save(self, ends: dict[str, dict[int, int]], log_end: int, sizes: tuple[int, int, int]) -> None:
        texts = {topic: {str(q): end for q, end in of_topic.items()} for topic, of_topic in ends.items()}
        names = "segmentSize", "queueFileSize", "indexFileSize"
        self._table.save({"logEnd": log_end, "queueEnds": texts, **dict(zip(names, sizes, strict=True))})
        self.ends, self.log_end, self.sizes = ends, log_end, sizes

    def forget(self) -> None:
        """Empty the table durably, because the queues are about to change. Raises OSError."""
        self._save({}, -1, self.sizes)

    def shorter(self, queues: QueueTable, deleted: DeletedTopics) -> list[tuple[str, int, int]]:
        """Return (topic, queue id, former end) of queues, not of deleted topics, that were longer then."""
        found = []
        for topic, ends in self.ends.items():
            if deleted.ends.get(topic, -1) >= self.log_end:
                continue
            for queue_id, end in ends.items():
                queue = queues.find_queue(topic, queue_id)
                if queue is None or queue.max_offset < end:
                    found.append((topic, queue_id, end))
        return found
