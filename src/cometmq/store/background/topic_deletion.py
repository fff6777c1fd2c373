"""Deleting topics: their queues leave the store at once, their files in a thread.

Three steps. The deletion is noted on the device (a thread syncs the tables). The topic's directory is moved
out of the way, and its queues are forgotten: one rename on the loop, from where on a new topic of the name
may begin. A thread removes the files. A crash after the first step leaves the rest to the next start.

A slave, or a follower, hears of a deletion later: by a record that begins a queue anew, or because its master
does not know the topic any more. Then the queues that were the deleted topic's go, in place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cometmq import logs
from cometmq.store.background.passes import Passes
from cometmq.store.base.disk import Disk
from cometmq.store.base.off_loop import OffLoop
from cometmq.store.derived.consume_queue import ConsumeQueue
from cometmq.store.derived.queue_ext import ExtFiles
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.log.commit_log import CommitLog
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.tables.min_offsets import MinOffsets
from cometmq.store.writing.appender import Appender

log = logs.logger(__name__)

TRIES = 3


@dataclass(eq=False, kw_only=True)
class TopicDeletion:
    """Deletes topics of one store. Loop thread only."""

    disk: Disk
    off_loop: OffLoop
    passes: Passes
    commit_log: CommitLog
    appender: Appender
    queues: QueueTable
    ext: ExtFiles
    deleted: DeletedTopics
    min_offsets: MinOffsets

    def __post_init__(self) -> None:
        # One at a time: they share the table of the deleted, which a thread writes, and the trash.
        self._turn = asyncio.Lock()

    async def delete(self, topics: Sequence[str]) -> int:
        """Destroy the queues of topics, those of this tick's messages included; the records go with their
        segments. Returns the number of queues. Raises OSError; then what is left of the topics goes on as if
        nothing had been asked for."""
        async with self._turn:
            left = list(dict.fromkeys(topics))
            deleted, floors = self.deleted.ends, self.min_offsets.by_topic
            gone = tries = 0
            self.deleted.under_way += 1
            try:
                while left:
                    tries += 1
                    gone += await self._attempt(left, tries)
            except OSError:
                self._restore(left, deleted, floors)
                raise
            finally:
                self.deleted.under_way -= 1
            await self._remove_files(topics)
            return gone

    async def keep(self, is_known: Callable[[str], bool]) -> list[str]:
        """Destroy the queues of all other topics, and return these topics. Raises OSError."""
        gone = [topic for topic in self.queues.topics() if not is_known(topic)]
        await self.delete(gone)
        return gone

    def begun_anew(self, queue: ConsumeQueue, position: int) -> None:
        """The record at `position` begins a queue anew, so its topic was deleted at the master before."""
        self.delete_before(queue.topic, queue.max_physical, position)

    def delete_before(self, topic: str, end: int, dispatched: int) -> None:
        """A master has deleted the topic's records before `end`. Destroy the queues that begin before that,
        and those that begin before the end of another one that is destroyed: all were there together. The
        loop waits for the device. dispatched: where the records begin that are in no queue yet. A failure is
        logged, and the queues stay."""
        kept = self.queues.of_topic(topic)
        count = len(kept)
        while old := [queue for queue in kept if queue.first_position() < end]:
            kept = [queue for queue in kept if queue not in old]
            end = max(end, *(queue.max_physical for queue in old))
        if not kept:
            end = max(end, dispatched)  # behind the checkpoint's mark, whose queues are not all there now
        before, floors = self.deleted.ends, self.min_offsets.by_topic
        self.min_offsets.drop([topic])
        try:
            self._note([topic], max(end, before.get(topic, 0)), self.commit_log.min_position)
            self.queues.move_to_trash(topic, {queue.queue_id for queue in kept})
        except OSError as failure:
            self._restore([topic], before, floors)
            log.error("topic %s, deleted at the master, could not be deleted: %s", topic, failure)
            return
        log.info("topic %s was deleted at the master: %d queues are gone", topic, count - len(kept))
        self.passes.begin("removal of deleted topics", self._empty_trash)

    def note_before(self, topics: Sequence[str], end: int) -> None:
        """The same of topics without any queue here, of which all records before `end` were dispatched: a
        recovery must not bring them back."""
        try:
            self._note(topics, end, self.commit_log.min_position)
        except OSError as failure:
            log.error("that topics were deleted at the master could not be noted: %s", failure)

    async def _empty_trash(self) -> None:
        async with self._turn:
            await self._remove_files([])

    async def _attempt(self, left: list[str], tries: int) -> int:
        """Remove those topics that get no message while their deletion is being noted, also from `left`;
        after some tries the loop waits for the device, so that none gets any. Returns the number of queues.
        Raises OSError."""
        wait = tries > TRIES
        if wait:
            await self.off_loop.tick_end()
        self.appender.encode_pending()
        seen = {topic: self.queues.next_offsets(topic) for topic in left}
        end, begin = self.commit_log.next, self.commit_log.min_position
        self.min_offsets.drop(left)
        if wait:
            self._note(left, end, begin)
        else:
            await self.off_loop.run(self._note, list(left), end, begin)
        self.appender.encode_pending()  # what came meanwhile
        if self.commit_log.end < end and tries <= 2 * TRIES:
            # A write failed, or may fail: what the topics get next would lie before `end`, and count as
            # deleted.
            return 0
        gone = 0
        for topic in list(left):
            if self.queues.next_offsets(topic) == seen[topic] and topic not in self.min_offsets.by_topic:
                gone += self.queues.move_to_trash(topic)
                left.remove(topic)
        return gone

    def _note(self, topics: Sequence[str], end: int, begin: int) -> None:
        """Make the deletion of all records before `end` last. Raises OSError. Any thread."""
        # What retention deleted must not come back with a power failure once its topics are forgotten here.
        for directory in self.commit_log.places.all:
            self.disk.fsync_dir(directory)
        self.deleted.add(topics, end, begin)
        self.min_offsets.save_without(topics)

    def _restore(
        self, topics: list[str], deleted: Mapping[str, int], floors: Mapping[str, Mapping[int, int]]
    ) -> None:
        for topic in topics:
            if topic in floors:
                self.min_offsets.note(topic, floors[topic])
        try:
            self.deleted.restore(topics, deleted)
            self.deleted.lower(self.commit_log.end)  # which may have been cut meanwhile
            self.min_offsets.save()
        except OSError as failure:
            log.error("the next start will finish the deletion of %s: %s", ", ".join(topics), failure)

    async def _remove_files(self, topics: Sequence[str]) -> None:
        try:
            await self.off_loop.run(self.queues.empty_trash)
            await self.off_loop.run(self.ext.remove, topics)  # a new topic of the name has none yet
        except OSError as failure:
            log.error("files of deleted topics stay until the next start: %s", failure)
        self.queues.drop_trash()
