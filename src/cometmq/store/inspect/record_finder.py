"""Searches a store for records, without a broker: by position, id, key, or a range of a queue or the log.

A broker may be using the directory. Keys are searched for in the entries of the index files, because the
slots of the newest file are written late. Records that are not indexed yet are searched for in the log.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Self, Unpack

import numpy as np

from cometmq.errors import StoreError
from cometmq.message import MessageExt
from cometmq.protocol.ids import IdError, decode_offset_id
from cometmq.protocol.properties.values import index_hash, index_keys
from cometmq.protocol.record.one import Facts, decode_record
from cometmq.store.base.disk import Disk
from cometmq.store.base.files import ReadOnlyFiles
from cometmq.store.derived.consume_queue import FILLER_SIZE
from cometmq.store.inspect.findings import Findings
from cometmq.store.inspect.index_check import IndexFiles
from cometmq.store.inspect.log_walk import LogWalk, committed_end, why_no_record
from cometmq.store.inspect.unit_files import UnitFiles
from cometmq.store.inspect.verify import Progress, no_progress
from cometmq.store.log.log_reader import LogReader
from cometmq.store.recovery.store_layout import Look, read_layout
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.tables.table_checks import TOPICS


class RecordFinder:
    """Finds single records in a store directory. A context manager, which closes the files at the end.

    The constructor raises StoreError if there is no store.
    """

    def __init__(
        self, root: str, *, disk: Disk | None = None, progress: Progress = no_progress, **look: Unpack[Look]
    ) -> None:
        self._disk = disk or Disk()
        self.layout = read_layout(self._disk, root, **look)
        self._files = ReadOnlyFiles(self._disk)
        self._log = LogReader(self._files, self.layout.config)
        self._progress = progress
        self._committed = committed_end(self.layout, self._files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def at(self, position: int) -> MessageExt | None:
        """Return the message whose record begins at a log position, or None. A raft log's is committed."""
        record = self._log.record(position) if position < self._committed else b""
        return decode_record(record) if record else None

    def why_not_at(self, position: int) -> str:
        """Return why no message begins at a log position."""
        size = self.layout.config.mapped_file_size_commit_log
        segments = self.layout.segments
        if not segments:
            return "the log is empty"
        if position < self.layout.log_min:
            return f"the log begins at {self.layout.log_min}; what was before has been deleted"
        if position >= segments[-1].base + size:
            return f"the last segment ends at {segments[-1].base + size}"
        if position >= self._committed:
            return f"the log of this raft member is known to be committed up to {self._committed} only"
        walk = LogWalk(self._disk, self.layout, Findings())
        for group in walk.groups(position):
            if group.end > position:
                row = int(np.searchsorted(group.position, position, side="right")) - 1
                if row < 0 or group.position[row] + group.size[row] <= position:
                    break
                return f"it is inside the record that begins at {group.position[row]}"
        for file in segments:
            if file.base <= position < file.base + size:
                return why_no_record(self._disk, file, position)
        return "the segment that held it is missing"

    def why_not_id(self, message_id: str) -> str:
        """Return why no message has the id `message_id`."""
        try:
            position = decode_offset_id(message_id).physical_offset
        except IdError:
            return "it is no offset id, and no message has it as its unique key or among its keys"
        found = self.at(position)
        if found is not None:
            return f"the message at log position {position} has the offset id {found.offset_msg_id}"
        return (
            "no message has it as its unique key; as an offset id it means log position "
            f"{position}: {self.why_not_at(position)}"
        )

    def by_id(self, message_id: str, *, scan: bool = False) -> list[MessageExt]:
        """Return the messages with an id: an offset id if a record confirms that, otherwise a unique key."""
        try:
            named = decode_offset_id(message_id)
        except IdError:
            named = None
        if named is not None:
            found = self.at(named.physical_offset)
            if found is not None and found.offset_msg_id == message_id.upper():
                return [found]
        return self.by_key(message_id, None, scan=scan)

    def by_key(self, key: str, topic: str | None, *, scan: bool = False) -> list[MessageExt]:
        """Return the messages with this key (unique key or one of KEYS), oldest first.

        Args:
            topic: The topic, or None for all topics.
            scan: Whether to read the whole log instead of the index.

        Raises StoreError if nothing matches and the topic does not exist.
        """
        topics = {topic} if topic is not None else self._topics()
        hashes = {index_hash(f"{name}#{key}") for name in topics}
        positions, indexed = self._indexed(hashes) if not scan else ([], self.layout.log_min)
        known = (facts for facts in map(self._log.facts, positions) if facts is not None)
        found = dict.fromkeys(
            facts.position
            for facts in chain(known, self._walk(indexed))
            if (topic is None or facts.topic == topic) and key.encode() in index_keys(facts.properties)
        )
        if not found and topic is not None and topic not in self._topics():
            raise StoreError(f"topic {topic} does not exist", self.layout.root)
        return list(self._messages(found))

    def _topics(self) -> set[str]:
        """Return every topic that has queues in the store or is in the topic table."""
        try:
            table = JsonTable(os.path.join(self.layout.root, "config", TOPICS), self._disk).load()
        except StoreError:
            table = {}
        known = table.get("topicConfigTable")
        return {queue.topic for queue in self.layout.queues} | {
            str(name) for name in (known if isinstance(known, dict) else {})
        }

    def _indexed(self, hashes: set[int]) -> tuple[list[int], int]:
        """Return the positions of records by key hashes, ascending, and the position where the index ends.

        The second is the beginning of the log if files of the index are damaged or missing.
        """
        positions: set[int] = set()
        known = self.layout.log_min
        wanted = np.array(sorted(hashes), np.int64)
        index = IndexFiles(self.layout, self._files, Findings())
        complete = 0 < len(index.readable) == len(self.layout.index_files)
        for number, (file, header) in enumerate(index.readable):
            begin = header.begin_position
            if number == 0 and header.next_number > 1 and begin > known and self._unindexed_before(begin):
                complete = False
            for _, entries in index.chunks(file, header):
                hit = np.isin(entries["hash"].astype(np.int64), wanted)
                positions.update(entries["position"][hit].astype(np.int64).tolist())
            known = max(known, header.end_position)
        return sorted(positions), known if complete else self.layout.log_min

    def _unindexed_before(self, position: int) -> bool:
        """Return whether a record with keys lies before the first indexed record, which is at `position`."""
        for facts in self._walk(self.layout.log_min):
            if facts.position >= position:
                return False
            if index_keys(facts.properties):
                return True
        return False

    def _walk(self, start: int) -> Iterator[Facts]:
        walk = LogWalk(self._disk, self.layout, Findings())
        size = self.layout.config.mapped_file_size_commit_log
        total = len(self.layout.segments) * size
        at = 0
        for facts in chain.from_iterable(group.facts() for group in walk.groups(start)):
            if facts.position - at > size // 64:
                at = facts.position
                self._progress(at - self.layout.log_min, total)
            if facts.position >= start:
                yield facts

    def of_log(self, start: int = 0) -> Iterator[MessageExt]:
        """Yield the messages in the order of the log, from the first record at or after `start` on."""
        return self._messages(facts.position for facts in self._walk(start))

    def of_queue(self, topic: str, queue_id: int, start: int = 0) -> Iterator[MessageExt]:
        """Yield the messages of a queue from an offset on. Raises StoreError if there is no such queue."""
        queues = {queue.queue_id: queue for queue in self.layout.queues if queue.topic == topic}
        queue = queues.get(queue_id)
        if queue is None:
            known = ", ".join(map(str, sorted(queues)))
            has = f"topic {topic} has {known}" if queues else f"topic {topic} has none"
            raise StoreError(f"queue {topic}/{queue_id} does not exist: {has}", self.layout.root)
        units = UnitFiles(self._files, queue, self.layout.config.consume_queue_file_size)
        if start >= units.end:
            raise StoreError(f"queue {topic}/{queue_id} ends at offset {units.end}", self.layout.root)
        for _, chunk in units.chunks(max(start, units.first), units.end):
            sizes = chunk["size"]
            yield from self._messages(chunk["position"][(sizes > 0) & (sizes != FILLER_SIZE)].tolist())

    def _messages(self, positions: Iterable[int]) -> Iterator[MessageExt]:
        for position in positions:
            message = self.at(position)
            if message is not None:
                yield message
