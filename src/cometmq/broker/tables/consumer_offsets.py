"""Consumer offsets: the next offset each group wants of each queue, and its file consumerOffset.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from cometmq import logs
from cometmq.protocol.bodies import DataVersion
from cometmq.protocol.codes import GROUP_LENGTH_MAX, STORED_LENGTH_MAX, is_legal_name

log = logs.logger(__name__)

SEPARATOR = "@"
# Offsets of all groups in all queues: clients of 4.9 may store them for topics and queues that do not exist.
# 1,000 groups on 1,000 queues; 130 MB.
MOST_OFFSETS = 1_000_000
NOT_FOUND = -1


class ConsumerOffsets:
    """`topic@group` -> queue id -> next offset. Anything is stored: lower offsets and unknown topics too."""

    def __init__(self) -> None:
        self.version: DataVersion | None = None
        """In a raft group: which state of its leader's offsets these are."""
        self._table: dict[str, dict[int, int]] = {}
        # The keys of the table by group and by topic: requests often ask for those of one.
        self._topics: dict[str, set[str]] = {}
        self._groups: dict[str, set[str]] = {}
        self._count = 0
        self.dirty = False

    def __len__(self) -> int:
        return self._count

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Store an offset; False if there is no room for one more (MOST_OFFSETS)."""
        key = topic + SEPARATOR + group
        queues = self._table.get(key)
        if queues is None or queue_id not in queues:
            if self._count >= MOST_OFFSETS:
                return False
            self._count += 1
            if queues is None:
                queues = self._new(key)
        queues[queue_id] = offset
        self.dirty = True
        return True

    def query(self, group: str, topic: str, queue_id: int) -> int:
        """The stored offset, or -1."""
        queues = self._table.get(topic + SEPARATOR + group)
        return NOT_FOUND if queues is None else queues.get(queue_id, NOT_FOUND)

    def queues(self, group: str, topic: str) -> dict[int, int]:
        """queue id -> offset of one topic and group (a copy)."""
        return dict(self._table.get(topic + SEPARATOR + group, {}))

    def topics_of(self, group: str) -> set[str]:
        """Topics in which the group has stored offsets (a copy)."""
        return set(self._topics.get(group, ()))

    def groups_of(self, topic: str) -> set[str]:
        """Groups that have stored offsets in the topic (a copy)."""
        return set(self._groups.get(topic, ()))

    def groups(self) -> set[str]:
        """Every group with an offset."""
        return set(self._topics)

    def clone(self, source: str, target: str, topic: str) -> None:
        """Give `target` the offsets of `source` in one topic."""
        queues = self._table.get(topic + SEPARATOR + source)
        if queues is not None and source != target:
            key = topic + SEPARATOR + target
            if key in self._table:
                self._remove(*split_key(key))
            for queue_id, offset in queues.items():
                self.commit(target, topic, queue_id, offset)

    def lower(self, end_of: Callable[[str, int], int]) -> Iterator[tuple[str, list[tuple[int, int, int]]]]:
        """After a crash took the ends of queues: bring offsets beyond them down to them, lest the messages
        that follow be passed over. end_of(topic, queue id): the queue's end. Yields each key with its
        changes (queue id, offset, new offset)."""
        for key, queues in self._table.items():
            topic, _ = split_key(key)
            lowered = [(q, was, end) for q, was in queues.items() if was > (end := end_of(topic, q))]
            if lowered:
                queues.update({queue_id: end for queue_id, _, end in lowered})
                self.dirty = True
                yield key, lowered

    def remove_group(self, group: str) -> None:
        """Forget every offset of a group."""
        for topic in self.topics_of(group):
            self._remove(topic, group)

    def remove_topic(self, topic: str) -> None:
        """Forget every offset in a topic."""
        for group in self.groups_of(topic):
            self._remove(topic, group)

    def _new(self, key: str) -> dict[int, int]:
        """An empty entry in the place of whatever the key had."""
        topic, group = split_key(key)
        self._topics.setdefault(group, set()).add(topic)
        self._groups.setdefault(topic, set()).add(group)
        queues = self._table[key] = {}
        return queues

    def _remove(self, topic: str, group: str) -> None:
        self._count -= len(self._table.pop(topic + SEPARATOR + group))
        for index, one, other in ((self._topics, group, topic), (self._groups, topic, group)):
            index[one].discard(other)
            if not index[one]:
                del index[one]
        self.dirty = True

    def to_table(self) -> dict[str, Any]:
        """The content of the file, and of the answer to GET_ALL_CONSUMER_OFFSET."""
        table: dict[str, Any] = {"offsetTable": {key: dict(queues) for key, queues in self._table.items()}}
        if self.version is not None:
            table["dataVersion"] = msgspec.to_builtins(self.version)
        return table

    def replace(self, offsets: Mapping[str, Mapping[int, int]], version: DataVersion | None = None) -> None:
        """Take a master's offsets in the place of these; what is equal is not touched."""
        self.version = version
        for key in self._table.keys() - offsets.keys():
            self._remove(*split_key(key))
        for key, queues in offsets.items():
            known = self._table.get(key, {})
            if known != queues and _is_legal(key):
                self._count += len(queues) - len(known)
                self._new(key).update(queues)
                self.dirty = True

    def load(self, table: Mapping[str, Any]) -> None:
        """Replace everything by a file's content; integer keys may come as text."""
        for index in (self._table, self._topics, self._groups):
            index.clear()
        illegal = []
        for key, queues in (table.get("offsetTable") or {}).items():
            if not _is_legal(str(key)):
                illegal.append(str(key))
            elif isinstance(queues, Mapping):
                self._new(str(key)).update(
                    {int(queue_id): int(offset) for queue_id, offset in queues.items()}
                )
        if illegal:
            log.warning("offsets of illegal names are left out: %s", ", ".join(illegal))
        self._count = sum(map(len, self._table.values()))
        self.dirty = False


def _is_legal(key: str) -> bool:
    topic, group = split_key(key)
    return is_legal_name(topic, STORED_LENGTH_MAX) and is_legal_name(group, GROUP_LENGTH_MAX)


def split_key(key: str) -> tuple[str, str]:
    """(topic, group) of a table key. Neither may hold the separator, so the first one is it."""
    topic, _, group = key.partition(SEPARATOR)
    return topic, group
