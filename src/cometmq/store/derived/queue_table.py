"""All consume queues of a store, by topic and queue id. Their units are written in batches."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Container, Iterator

from cometmq import logs
from cometmq.errors import StoreError
from cometmq.protocol.codes import MAX_STORED_TOPIC_LENGTH, is_legal_name
from cometmq.store.base.config import CONSUME_QUEUES, StoreConfig
from cometmq.store.base.disk import NO_FILE, Disk, is_numbered
from cometmq.store.base.files import StoreFiles
from cometmq.store.base.refusal import QueueRefused
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.text import is_utf8

log = logs.logger(__name__)

TRASH = ".deleted"
"""The directory that holds the files of deleted topics until they are removed: gone-<n>/<queue id>/...

Apache's broker ignores the directory, because its subdirectories are not named by queue ids.
"""
_MAX_NAME_BYTES = 255  # maximum length of a directory's name in bytes
_MAX_UNWRITTEN_UNITS = 256  # A queue is written immediately once it has this number of unwritten units


def names_a_directory(topic: str) -> bool:
    """Return whether the topic of a record, which can be any text, can be the name of a directory."""
    return (
        topic not in ("", ".", "..", TRASH)
        and "/" not in topic
        and "\0" not in topic
        and is_utf8(topic)
        and len(topic.encode()) <= _MAX_NAME_BYTES
    )


class QueueTable:
    """The consume queues of one store. For the loop thread only."""

    def __init__(self, files: StoreFiles, config: StoreConfig) -> None:
        self._files = files
        self.directory = config.location(CONSUME_QUEUES)
        self._trash = os.path.join(self.directory, TRASH)
        self._gone = 0
        self.file_size = config.consume_queue_file_size
        # Queues by topic and queue id. Other modules may read this table, but must not change it.
        self.by_key: dict[tuple[str, int], ConsumeQueue] = {}
        self._topics: dict[str, dict[int, ConsumeQueue]] = {}
        self._dirty: deque[ConsumeQueue] = deque()  # Queues with unwritten units, the longest waiting first

    def __len__(self) -> int:
        return len(self.by_key)

    def __iter__(self) -> Iterator[ConsumeQueue]:
        return iter(self.by_key.values())

    def find_queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self.by_key.get((topic, queue_id))

    def get_or_make(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return a queue, created in memory if necessary. Raises QueueRefused for an invalid name."""
        queue = self.by_key.get((topic, queue_id))
        if queue is None:
            if not (topic in self._topics or is_legal_name(topic, MAX_STORED_TOPIC_LENGTH)) or queue_id < 0:
                raise QueueRefused(topic, queue_id)
            queue = self._add(topic, queue_id)
        return queue

    def of_record(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue of a record that another broker may have written, created if necessary.

        Raises QueueRefused if the topic or queue id of the record cannot be the name of a directory.
        """
        if not names_a_directory(topic) or queue_id < 0:
            raise QueueRefused(topic, queue_id)
        return self._add(topic, queue_id)

    def _add(self, topic: str, queue_id: int) -> ConsumeQueue:
        queue = self.by_key.get((topic, queue_id))
        if queue is None:
            topic = sys.intern(topic)  # All queues of the topic share one string, which saves memory accesses
            path = os.path.join(self.directory, topic, str(queue_id))
            queue = ConsumeQueue(self._files, path, topic, queue_id, self.file_size)
            self.by_key[topic, queue_id] = queue
            self._topics.setdefault(topic, {})[queue_id] = queue
        return queue

    def topics(self) -> list[str]:
        """Return the topics that have queues in this store, even if all their messages have expired."""
        return sorted(
            topic for topic, queues in self._topics.items() if any(q.max_offset for q in queues.values())
        )

    def of_topic(self, topic: str) -> list[ConsumeQueue]:
        return [queue for _, queue in sorted(self._topics.get(topic, {}).items())]

    @property
    def max_physical(self) -> int:
        """The log position after the last record that has a unit in any queue."""
        return max((queue.max_physical for queue in self), default=0)

    @property
    def offset_sum(self) -> int:
        """The sum of the maximum offsets of all queues, according to their files."""
        return sum(queue.max_offset or queue.begin for queue in self)

    # -- writing ----------------------------------------------------------------------------------

    def add_dirty(self, queue: ConsumeQueue) -> None:
        """Register that the queue has unwritten units."""
        queue.dirty = True
        self._dirty.append(queue)

    @property
    def waiting(self) -> int:
        """The number of queues with unwritten units."""
        return len(self._dirty)

    def write_eager(self) -> None:
        """Write the queues that have many unwritten units. Raises OSError."""
        for queue in self._dirty:
            if queue.max_offset - queue.written >= _MAX_UNWRITTEN_UNITS:
                queue.write()

    def write_dirty(self, limit: int | None = None) -> bool:
        """Write up to `limit` queues with unwritten units. Return True if no such queue is left.

        After an OSError, the next call begins with the queue that could not be written.
        """
        dirty = self._dirty
        count = len(dirty) if limit is None else min(limit, len(dirty))
        for _ in range(count):
            queue = dirty[0]
            queue.write()
            queue.dirty = False
            dirty.popleft()
        return not dirty

    def collect_unsynced(self) -> tuple[list[str], list[str]]:
        """Return the files and the directories that have changed since the last call and must be synced."""
        paths: list[str] = []
        directories: set[str] = set()
        for queue in self:
            if queue.unsynced_files:
                paths += map(queue.path_of, queue.unsynced_files)
                queue.unsynced_files.clear()
            if queue.new_names:
                directories.update((queue.path, os.path.dirname(queue.path), self.directory))
                queue.new_names = False
        return paths, sorted(directories)

    # -- loading, deleting ------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop every queue from memory. The files stay."""
        self.by_key.clear()
        self._topics.clear()
        self._dirty.clear()

    def load(self, log_end: int) -> list[str]:
        """Load every queue directory and return notes about damage.

        Raises StoreError for a link in place of a directory: its files would be deleted outside the store.
        """
        notes: list[str] = []
        disk = self._files.disk
        self._refuse_link(self._trash)
        self.empty_trash()
        self.drop_trash()
        for topic in disk.listdir(self.directory):
            if topic == TRASH:
                continue
            topic_dir = os.path.join(self.directory, topic)
            self._refuse_link(topic_dir)
            if not disk.is_dir(topic_dir) or not names_a_directory(topic):
                notes.append(f"{topic_dir}: not a topic directory, left alone")
                continue
            for name in disk.listdir(topic_dir):
                path = os.path.join(topic_dir, name)
                self._refuse_link(path)
                if not (name.isascii() and name.isdecimal() and str(int(name)) == name and disk.is_dir(path)):
                    notes.append(f"{path}: not a queue directory, left alone")
                    continue
                notes += self._add(topic, int(name)).load(log_end)
        return notes

    def _refuse_link(self, path: str) -> None:
        if self._files.disk.is_link(path):
            raise StoreError(NO_FILE, path)

    def delete_topic(self, topic: str, keep: Container[int] = ()) -> int:
        """Delete the queues of a topic with their files, except the ids in `keep`. Return their number."""
        count = self.move_to_trash(topic, keep)
        self.empty_trash()
        self.drop_trash()
        return count

    def next_offsets(self, topic: str) -> dict[int, int]:
        """Return the offset of the topic's next message, by queue id."""
        return {queue_id: queue.next_offset for queue_id, queue in self._topics.get(topic, {}).items()}

    def move_to_trash(self, topic: str, keep: Container[int] = ()) -> int:
        """Drop the queues of a topic and move their files to the trash, except the queue ids in `keep`.

        Returns the number of queues moved. After an OSError with an empty `keep`, nothing has changed.
        """
        disk = self._files.disk
        queues = self._topics.get(topic, {})
        gone = [queue_id for queue_id in queues if queue_id not in keep]
        topic_dir = os.path.join(self.directory, topic)
        if names_a_directory(topic) and disk.is_dir(topic_dir):
            disk.makedirs(self._trash)
            while disk.is_dir(target := os.path.join(self._trash, f"gone-{self._gone}")):
                self._gone += 1
            if len(gone) == len(queues):
                disk.rename(topic_dir, target)
            else:
                self._move_each(topic_dir, target, gone)
        for queue_id in gone:
            del self.by_key[topic, queue_id]
            # The queue may still be in `_dirty`. Once it is marked, writing the queue does nothing.
            queues.pop(queue_id).mark_deleted()
        if not queues:
            self._topics.pop(topic, None)
        return len(gone)

    def _move_each(self, topic_dir: str, target: str, queue_ids: list[int]) -> None:
        disk = self._files.disk
        disk.makedirs(target)
        for name in map(str, queue_ids):
            if disk.is_dir(path := os.path.join(topic_dir, name)):
                disk.rename(path, os.path.join(target, name))
        disk.fsync_dir(topic_dir)

    def empty_trash(self) -> None:
        """Remove the files of deleted topics permanently. Raises OSError. Any thread may call it."""
        disk = self._files.disk
        if not disk.is_dir(self._trash) or disk.is_link(self._trash):
            return
        # The renames that moved directories to the trash must be durable before files are removed. Otherwise
        # a power failure could put the directory of a topic back in its place with only half of its files,
        # which would look like damage.
        disk.fsync_dir(self.directory)
        disk.fsync_dir(self._trash)
        for name in disk.listdir(self._trash):
            topic_dir = os.path.join(self._trash, name)
            if disk.is_link(topic_dir):
                disk.unlink(topic_dir)  # Removes the symbolic link; its target is not part of the store
                continue
            for queue_id in disk.listdir(topic_dir):
                self._remove_files(os.path.join(topic_dir, queue_id))
            _remove_if_empty(disk, topic_dir)

    def _remove_files(self, queue_dir: str) -> None:
        disk = self._files.disk
        if disk.is_link(queue_dir):
            disk.unlink(queue_dir)
        elif disk.is_dir(queue_dir):
            for name in disk.listdir(queue_dir):
                if is_numbered(name, 20):
                    disk.unlink(os.path.join(queue_dir, name))
            _remove_if_empty(disk, queue_dir)

    def drop_trash(self) -> None:
        """Remove the trash directory if it is empty."""
        if self._files.disk.is_dir(self._trash):
            _remove_if_empty(self._files.disk, self._trash)


def _remove_if_empty(disk: Disk, path: str) -> None:
    try:
        disk.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError:
        log.warning("directory %s is not empty and is not removed", path)
