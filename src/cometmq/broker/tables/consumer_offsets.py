"""Consumer offsets: the next offset of each group in each queue, and the file consumerOffset.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from cometmq import logs
from cometmq.protocol.bodies import DataVersion
from cometmq.protocol.codes import MAX_GROUP_LENGTH, MAX_STORED_TOPIC_LENGTH, is_legal_name

log = logs.logger(__name__)

SEPARATOR = "@"
# The maximum number of offsets of all groups in all queues: 1,000 groups on 1,000 queues, 130 MB. Clients of
# 4.9 may store offsets for topics and queues that do not exist.
MAX_OFFSETS = 1_000_000
NOT_FOUND = -1


class ConsumerOffsets:
    """The next offset by `topic@group` and queue id.

    Any value is stored, also a lower offset or an offset in an unknown topic.
    """

    def __init__(self) -> None:
        self.version: DataVersion | None = None
        """In a raft group, the version of the leader's offsets that this table holds."""
        self._table: dict[str, dict[int, int]] = {}
        # The keys of the table by group and by topic, which many requests need.
        self._topics: dict[str, set[str]] = {}
        self._groups: dict[str, set[str]] = {}
        self._count = 0
        self.dirty = False

    def __len__(self) -> int:
        return self._count

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Store an offset. Return False if the table is full (MAX_OFFSETS)."""
        key = topic + SEPARATOR + group
        queues = self._table.get(key)
        if queues is None or queue_id not in queues:
            if self._count >= MAX_OFFSETS:
                return False
            self._count += 1
            if queues is None:
                queues = self._new(key)
        queues[queue_id] = offset
        self.dirty = True
        return True

    def query(self, group: str, topic: str, queue_id: int) -> int:
        """Return the stored offset, or -1."""
        queues = self._table.get(topic + SEPARATOR + group)
        return NOT_FOUND if queues is None else queues.get(queue_id, NOT_FOUND)

    def queues(self, group: str, topic: str) -> dict[int, int]:
        """Return a copy of one group's offsets in one topic, by queue id."""
        return dict(self._table.get(topic + SEPARATOR + group, {}))

    def topics_of(self, group: str) -> set[str]:
        """Return the topics in which the group has offsets."""
        return set(self._topics.get(group, ()))

    def groups_of(self, topic: str) -> set[str]:
        """Return the groups that have offsets in the topic."""
        return set(self._groups.get(topic, ()))

    def groups(self) -> set[str]:
        """Return the groups with an offset."""
        return set(self._topics)

    def clone(self, source: str, target: str, topic: str) -> None:
        """Copy the offsets of `source` in one topic to `target`."""
        queues = self._table.get(topic + SEPARATOR + source)
        if queues is not None and source != target:
            key = topic + SEPARATOR + target
            if key in self._table:
                self._remove(*split_key(key))
            for queue_id, offset in queues.items():
                self.commit(target, topic, queue_id, offset)

    def lower(self, end_of: Callable[[str, int], int]) -> Iterator[tuple[str, list[tuple[int, int, int]]]]:
        """Lower offsets beyond the end of a queue to that end, and yield each key with its changes.

        A crash may have removed the ends of queues; groups with higher offsets would skip the messages that
        follow.

        Args:
            end_of: Returns the end of a queue for a topic and a queue id.

        Yields:
            The key and a list of queue id, old offset and new offset.
        """
        for key, queues in self._table.items():
            topic, _ = split_key(key)
            lowered = [(q, was, end) for q, was in queues.items() if was > (end := end_of(topic, q))]
            if lowered:
                queues.update({queue_id: end for queue_id, _, end in lowered})
                self.dirty = True
                yield key, lowered

    def remove_group(self, group: str) -> None:
        """Remove all offsets of a group."""
        for topic in self.topics_of(group):
            self._remove(topic, group)

    def remove_topic(self, topic: str) -> None:
        """Remove all offsets in a topic."""
        for group in self.groups_of(topic):
            self._remove(topic, group)

    def _new(self, key: str) -> dict[int, int]:
        """Create an empty entry for a key and replace an existing one."""
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
        """Return the content of the file, which GET_ALL_CONSUMER_OFFSET returns, too."""
        table: dict[str, Any] = {"offsetTable": {key: dict(queues) for key, queues in self._table.items()}}
        if self.version is not None:
            table["dataVersion"] = msgspec.to_builtins(self.version)
        return table

    def replace(self, offsets: Mapping[str, Mapping[int, int]], version: DataVersion | None = None) -> None:
        """Replace the offsets by a master's. Equal entries are not touched."""
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
        """Replace the offsets by a file's content, in which integer keys may be text."""
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
            log.warning("consumer offsets with invalid names are ignored: %s", ", ".join(illegal))
        self._count = sum(map(len, self._table.values()))
        self.dirty = False


def _is_legal(key: str) -> bool:
    topic, group = split_key(key)
    return is_legal_name(topic, MAX_STORED_TOPIC_LENGTH) and is_legal_name(group, MAX_GROUP_LENGTH)


def split_key(key: str) -> tuple[str, str]:
    """Return topic and group of a key. The first separator divides them: no valid name contains one."""
    topic, _, group = key.partition(SEPARATOR)
    return topic, group
