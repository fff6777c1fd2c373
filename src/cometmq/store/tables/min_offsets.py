"""The minimum offsets that a purge, or the retention of a single topic, has raised.

The log keeps the hidden messages until their segment is deleted, and a rebuild of a queue from the log would
restore them. So the beginning of each such queue is stored in a separate table. Apache's broker does not use
this file: while it serves the store, the hidden messages can be read again until their segments are deleted.
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
    """The file `config/queueMinOffsets.json`: the first visible offset of a queue, by topic and queue id.

    Only the loop changes it; `save` may run in another thread. The dict `by_topic` is never modified: each
    change replaces it.
    """

    def __init__(self, disk: Disk, root: str) -> None:
        """Load the table. A damaged one counts as empty, so purged messages may reappear. Raises OSError."""
        self._table = JsonTable(os.path.join(root, "config", MIN_OFFSETS), disk)
        self._lock = threading.Lock()
        self.by_topic: Floors = MinOffsetTable.from_plain(self._table.load_or_empty()).min_offsets
        self._saved: Floors = self.by_topic

    def apply(self, queues: QueueTable) -> None:
        """Apply the stored minimum offsets to the queues when the store starts. Raises OSError.

        If a crash has shortened a queue so that it ends before its stored minimum, the minimum is lowered to
        the end, because a minimum after the end would hide new messages.
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
        """Raise minimum offsets of a topic, in memory only."""
        present = self.by_topic.get(topic, {})
        higher = {queue_id: max(offset, present.get(queue_id, 0)) for queue_id, offset in moved.items()}
        self.by_topic = {**self.by_topic, topic: {**present, **higher}}

    def undo(self, topic: str, moved: Mapping[int, int], before: Mapping[int, int]) -> None:
        """Restore `before` after `set_offsets(topic, moved)`, except in queues that were raised again."""
        kept = dict(self.by_topic.get(topic, {}))
        for queue_id, offset in moved.items():
            if kept.get(queue_id) == offset:
                kept[queue_id] = before.get(queue_id, 0)
        rest = {queue_id: offset for queue_id, offset in kept.items() if offset}
        others = {name: floors for name, floors in self.by_topic.items() if name != topic}
        self.by_topic = {**others, topic: rest} if rest else others

    def drop(self, topics: Iterable[str]) -> None:
        """Remove the minimum offsets of the given topics, in memory only."""
        gone = set(topics)
        self.by_topic = {topic: floors for topic, floors in self.by_topic.items() if topic not in gone}

    def save_without(self, topics: Iterable[str]) -> None:
        """Write the table after `drop` has removed `topics`. Any thread may call it. Raises OSError."""
        with self._lock:
            if not set(topics).isdisjoint(self._saved):
                self._write(self.by_topic)
                # The second write replaces the `.bak`, too. An old `.bak` still contains the minimum offsets
                # of the dropped topics, and could hide messages of a new topic with the same name.
                self._write(self.by_topic)

    def save(self) -> None:
        """Write the table of minimum offsets if it has changed. Any thread may call it. Raises OSError."""
        with self._lock:
            if self.by_topic != self._saved:
                self._write(self.by_topic)

    def _write(self, floors: Floors) -> None:
        self._table.save(
            {"minOffsets": {t: {str(q): end for q, end in f.items()} for t, f in floors.items()}}
        )
        self._saved = floors
