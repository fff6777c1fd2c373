"""Deleting topics: their queues leave the store at once, their files in a thread.

Three steps. The deletion is noted on the device (a thread syncs the tables). The topic's directory is moved
out of the way, and its queues are forgotten: one rename on the loop, from where on a new topic of the name
may begin. A thread removes the files. A crash after the first step leaves the rest to the next start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cometmq import logs
from cometmq.store.derived.queue_ext import ExtFiles

if TYPE_CHECKING:
    from cometmq.store.message_store import MessageStore

log = logs.logger(__name__)

_TRIES = 3


class TopicDeletion:
    """Deletes topics of one store. Loop thread only."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._ext = ExtFiles(store.disk, store.config.root)
        # One at a time: they share the table of the deleted, which a thread writes, and the trash.
        self._turn = asyncio.Lock()

    async def delete(self, topics: Sequence[str]) -> int:
        """Destroy the queues of topics, those of this tick's messages included; the records go with their
        segments. Returns the number of queues. Raises OSError; then what is left of the topics goes on as if
        nothing had been asked for."""
        async with self._turn:
            return await self._delete(topics)

    async def _delete(self, topics: Sequence[str]) -> int:
        store = self._store
        left = list(dict.fromkeys(topics))
        deleted, floors = store.deleted.ends, store.floors.floors
        gone = tries = 0
        store.deleted.under_way += 1
        try:
            while left:
                tries += 1
                gone += await self._attempt(left, wait=tries > _TRIES)
        except OSError:
            self._take_back(left, deleted, floors)
            raise
        finally:
            store.deleted.under_way -= 1
        await self._remove_files(topics)
        return gone

    async def _attempt(self, left: list[str], *, wait: bool) -> int:
        """Take out those topics that get no message while their deletion is being noted, and out of `left`;
        with `wait` the loop waits for the device, so that none gets any. Returns the number of queues.
        Raises OSError."""
        store = self._store
        store.appender.encode_pending()
        seen = {topic: store.queues.next_offsets(topic) for topic in left}
        end, begin = store.log.next, store.log.min_position
        store.floors.drop(left)
        if wait:
            self._note(left, end, begin)
        else:
            await store.off_loop.run(self._note, list(left), end, begin)
        store.appender.encode_pending()  # what came meanwhile
        gone = 0
        for topic in list(left):
            if store.queues.next_offsets(topic) == seen[topic] and topic not in store.floors.floors:
                gone += store.queues.take_out(topic)
                left.remove(topic)
        return gone

    def _note(self, topics: list[str], end: int, begin: int) -> None:
        """Make the deletion of all records before `end` last. Raises OSError. Any thread."""
        store = self._store
        # What retention deleted must not come back with a power failure once its topics are forgotten here.
        for directory in store.config.commit_log_dirs:
            store.disk.fsync_dir(directory)
        store.deleted.add(topics, end, begin)
        store.floors.save_without(topics)

    def _take_back(
        self, topics: list[str], deleted: Mapping[str, int], floors: Mapping[str, Mapping[int, int]]
    ) -> None:
        store = self._store
        for topic in topics:
            if topic in floors:
                store.floors.note(topic, floors[topic])
        try:
            store.deleted.take_back(topics, deleted)
            store.floors.save()
        except OSError as failure:
            log.error("the next start will finish the deletion of %s: %s", ", ".join(topics), failure)

    async def _remove_files(self, topics: Sequence[str]) -> None:
        queues, off_loop = self._store.queues, self._store.off_loop
        try:
            await off_loop.run(queues.empty_trash)
            await off_loop.run(self._ext.remove, topics)  # a new topic of the name has none yet
        except OSError as failure:
            log.error("files of deleted topics stay until the next start: %s", failure)
        queues.drop_trash()
