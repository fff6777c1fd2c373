"""Minimum offsets that were moved on purpose: by a purge, or by a topic's own retention.

The log keeps such messages until their segment is deleted, and queues can be rebuilt from the log; so the
beginning of each queue is stored in a separate table. Apache's broker does not have this file. If it serves
the store, such messages can be read again until their segments are deleted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping

from cometmq.store.base.disk import Disk
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.tables.table_checks import MIN_OFFSETS, MinOffsetTable

Floors = Mapping[str, Mapping[int, int]]


class MinOffsets:
    """The file `config/queueMinOffsets.json`: the first visible offset by topic and queue id.

    Only the loop changes it; `save` may run in another thread. `by_topic` is replaced, never changed.
    """

    __slots__ = ("_lock", "_saved", "_table", "by_topic")

    def __init__(self, disk: Disk, root: str) -> None:
        """Load the table. An unreadable one counts as empty, so purged messages may reappear.

        Raises OSError.
        """
        self._table = JsonTable(os.path.join(root, "config", MIN_OFFSETS), disk)
        self._lock = threading.Lock()
        self.by_topic: Floors = MinOffsetTable.from_plain(self._table.load_or_empty()).min_offsets
        self._saved: Floors = self.by_topic

    def apply(self, queues: QueueTable) -> None:
        """Raise the queues' minimum offsets after a start.

        A minimum after the end of a queue that has lost messages in a crash is lowered to the end, because it
        would hide the next ones. Raises OSError.
        """
        kept: dict[str, Mapping[int, int]] = {}
        for topic, floors in self.by_topic.items():
            for queue_id, floor in floors.items():
                queue = queues.find_queue(topic, queue_id)
                if queue is None:
                    continue
                floor = min(floor, queue.max_offset)
                queue.min_offset = max(queue.min_offset, floor)
                if floor:
                    kept[topic] = {**kept.get(topic, {}), queue_id: floor}
        self.by_topic = kept
        self.save()

    def set_offsets(self, topic: str, moved: Mapping[int, int]) -> None:
        """Set minimum offsets of a topic in memory."""
        present = self.by_topic.get(topic, {})
        higher = {queue_id: max(offset, present.get(queue_id, 0)) for queue_id, offset in moved.items()}
        self.by_topic = {**self.by_topic, topic: {**present, **higher}}

    def undo(self, topic: str, moved: Mapping[int, int], before: Mapping[int, int]) -> None:
        """Undo `set_offsets` for the queues whose minimum has not been raised further."""
        kept = dict(self.by_topic.get(topic, {}))
        for queue_id, offset in moved.items():
            if kept.get(queue_id) == offset:
                kept[queue_id] = before.get(queue_id, 0)
        rest = {queue_id: offset for queue_id, offset in kept.items() if offset}
        others = {name: floors for name, floors in self.by_topic.items() if name != topic}
        self.by_topic = {**others, topic: rest} if rest else others

    def drop(self, topics: Iterable[str]) -> None:
        """Remove the minimum offsets of topics in memory."""
        gone = set(topics)
        self.by_topic = {topic: floors for topic, floors in self.by_topic.items() if topic not in gone}

    def save_without(self, topics: Iterable[str]) -> None:
        """Write the table without these topics to the device. Any thread may call it. Raises OSError."""
        with self._lock:
            if not set(topics).isdisjoint(self._saved):
                self._write(self.by_topic)
                # The second write updates the backup, which could otherwise hide messages of a new topic with
                # that name.
                self._write(self.by_topic)

    def save(self) -> None:
        """Write changed minimum offsets to the device. Any thread may call it. Raises OSError."""
        with self._lock:
            if self.by_topic != self._saved:
                self._write(self.by_topic)

    def _write(self, floors: Floors) -> None:
        self._table.save(
            {"minOffsets": {t: {str(q): end for q, end in f.items()} for t, f in floors.items()}}
        )
        self._saved = floors
