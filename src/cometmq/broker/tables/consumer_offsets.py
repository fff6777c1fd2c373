"""Consumer offsets: each group's next offset in each queue. Their file is consumerOffset.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from cometmq import logs
from cometmq.protocol.bodies import DataVersion
from cometmq.protocol.codes import MAX_GROUP_LENGTH, MAX_STORED_TOPIC_LENGTH, is_legal_name

log = logs.logger(__name__)

SEPARATOR = "@"
# The maximum number of offsets: enough for 1,000 groups with 1,000 queues each, which take 130 MB. The limit
# is needed because 4.9 clients may store offsets for topics and queues that do not exist.
MAX_OFFSETS = 1_000_000
NOT_FOUND = -1


class ConsumerOffsets:
    """The offsets, by `topic@group` and queue id. Lower ones and those of unknown topics are stored, too."""

    def __init__(self) -> None:
        self.version: DataVersion | None = None
        """In a raft group: the version of the leader's offsets that this table contains."""
        self._table: dict[str, dict[int, int]] = {}
        # The topics in which each group has offsets, and the groups that have offsets in each topic.
        self._topics: dict[str, set[str]] = {}
        self._groups: dict[str, set[str]] = {}
        self._count = 0
        self._dirty = False

    def __len__(self) -> int:
        return self._count

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Store an offset. Return False if it would be a new entry beyond the limit MAX_OFFSETS."""
        key = topic + SEPARATOR + group
        queues = self._table.get(key)
        if queues is None or queue_id not in queues:
            if self._count >= MAX_OFFSETS:
                return False
            self._count += 1
            if queues is None:
                queues = self._new(key)
        queues[queue_id] = offset
        self._dirty = True
        return True

    def take_changes(self) -> bool:
        """Return whether the offsets have changed since the last call."""
        changed, self._dirty = self._dirty, False
        return changed

    def query(self, group: str, topic: str, queue_id: int) -> int:
        """Return the stored offset of a group in a queue, or -1 if none is stored."""
        queues = self._table.get(topic + SEPARATOR + group)
        return NOT_FOUND if queues is None else queues.get(queue_id, NOT_FOUND)

    def queues(self, group: str, topic: str) -> dict[int, int]:
        """Return a copy of a group's offsets in a topic, by queue id."""
        return dict(self._table.get(topic + SEPARATOR + group, {}))

    def topics_of(self, group: str) -> set[str]:
        """Return the topics in which the group has offsets."""
        return set(self._topics.get(group, ()))

    def groups_of(self, topic: str) -> set[str]:
        """Return the groups that have offsets in the topic."""
        return set(self._groups.get(topic, ()))

    def groups(self) -> set[str]:
        """Return the groups that have any offset."""
        return set(self._topics)

    def clone(self, source: str, target: str, topic: str) -> None:
        """Replace the offsets of the group `target` in a topic with those of the group `source`."""
        queues = self._table.get(topic + SEPARATOR + source)
        if queues is not None and source != target:
            key = topic + SEPARATOR + target
            if key in self._table:
                self._remove(*split_key(key))
            for queue_id, offset in queues.items():
                self.commit(target, topic, queue_id, offset)

    def lower(self, end_of: Callable[[str, int], int]) -> Iterator[tuple[str, list[tuple[int, int, int]]]]:
        """Lower offsets that are beyond the end of their queue, `end_of(topic, queue id)`, to that end.

        A crash may have removed the last messages of a queue. A group with a higher offset would skip the
        messages that are stored next. Yields each changed key with its (queue id, old offset, new offset).
        """
        for key, queues in self._table.items():
            topic, _ = split_key(key)
            lowered = [(q, was, end) for q, was in queues.items() if was > (end := end_of(topic, q))]
            if lowered:
                queues.update({queue_id: end for queue_id, _, end in lowered})
                self._dirty = True
                yield key, lowered

    def remove_group(self, group: str) -> None:
        """Remove all offsets of a group."""
        for topic in self.topics_of(group):
            self._remove(topic, group)

    def remove_topic(self, topic: str) -> None:
        """Remove the offsets of all groups in a topic."""
        for group in self.groups_of(topic):
            self._remove(topic, group)

    def _new(self, key: str) -> dict[int, int]:
        """Set the offsets under the key `topic@group` to an empty table, and return that table."""
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
        self._dirty = True

    def to_table(self) -> dict[str, Any]:
        """Return the content of consumerOffset.json. The response to GET_ALL_CONSUMER_OFFSET is the same."""
        table: dict[str, Any] = {"offsetTable": {key: dict(queues) for key, queues in self._table.items()}}
        if self.version is not None:
            table["dataVersion"] = msgspec.to_builtins(self.version)
        return table

    def replace(self, offsets: Mapping[str, Mapping[int, int]], version: DataVersion | None = None) -> None:
        """Replace all offsets with those of a master. Entries that are equal are not copied."""
        self.version = version
        for key in self._table.keys() - offsets.keys():
            self._remove(*split_key(key))
        for key, queues in offsets.items():
            known = self._table.get(key, {})
            if known != queues and _is_legal(key):
                self._count += len(queues) - len(known)
                self._new(key).update(queues)
                self._dirty = True

    def load(self, table: Mapping[str, Any]) -> None:
        """Replace all offsets with the content of a file. In the file, queue ids are strings."""
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
        self._dirty = False


def _is_legal(key: str) -> bool:
    topic, group = split_key(key)
    return is_legal_name(topic, MAX_STORED_TOPIC_LENGTH) and is_legal_name(group, MAX_GROUP_LENGTH)


def split_key(key: str) -> tuple[str, str]:
    """Split the key `topic@group` of an offset table at its first "@". No valid name contains "@"."""
    topic, _, group = key.partition(SEPARATOR)
    return topic, group
