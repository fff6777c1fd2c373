"""Deletion of topics: their queues leave the store immediately, and a thread removes their files later.

There are three steps. First, a thread records the deletion in a file and syncs the file. Then, on the loop,
one rename moves the directory of the topic to the trash, and the store drops the queues; from then on a new
topic of that name may begin. Last, a thread removes the files. After a crash that follows the first step, the
next start completes the deletion.

A slave or follower detects a deletion later: a record with queue offset 0 arrives for a queue that is not
empty, or the master no longer has the topic. Then the queues of the deleted topic are deleted, too, and the
first two steps block the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cometmq import logs
from cometmq.store.background.tasks import BackgroundTasks
from cometmq.store.base.disk import Disk
from cometmq.store.base.executor import StoreExecutor
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
    """Deletes topics of one store. For the loop thread only."""

    disk: Disk
    executor: StoreExecutor
    tasks: BackgroundTasks
    commit_log: CommitLog
    appender: Appender
    queues: QueueTable
    ext: ExtFiles
    deleted: DeletedTopics
    min_offsets: MinOffsets

    def __post_init__(self) -> None:
        # Only one deletion runs at a time, because all of them use the trash, and the table of deleted
        # topics, which a thread writes.
        self._lock = asyncio.Lock()

    async def delete(self, topics: Sequence[str]) -> int:
        """Delete the queues of topics, and return the number of deleted queues.

        Messages that the store has accepted but not yet written to the log count as deleted, too. All records
        stay in the log, without a queue, until retention deletes their segments. After an OSError, topics
        that have not been deleted yet continue as before.
        """
        async with self._lock:
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

    async def delete_unknown(self, is_known: Callable[[str], bool]) -> list[str]:
        """Delete the queues of all topics that `is_known` rejects. Return these topics. Raises OSError."""
        gone = [topic for topic in self.queues.topics() if not is_known(topic)]
        await self.delete(gone)
        return gone

    def on_restart(self, queue: ConsumeQueue, position: int) -> None:
        """Delete the topic's old queues, because the record at `position` begins `queue` at offset 0 again.

        The record shows that the master has deleted the topic and created it again.
        """
        self.delete_before(queue.topic, queue.max_physical, position)

    def delete_before(self, topic: str, end: int, dispatched: int) -> None:
        """Delete those queues of a topic whose first record is before log position `end`.

        The master has deleted these queues. If another queue's first record is before the last record of a
        deleted queue, it is deleted, too, because both queues existed at the same time. The event loop is
        blocked until the deletion is recorded on the disk. A failure is logged, and the queues then stay.

        `dispatched` is the log position of the first record that has not been added to its queue yet.
        """
        kept = self.queues.of_topic(topic)
        count = len(kept)
        while old := [queue for queue in kept if queue.first_position() < end]:
            kept = [queue for queue in kept if queue not in old]
            end = max(end, *(queue.max_physical for queue in old))
        if not kept:
            # All queues are old, so all records of the topic that have been added to a queue belong to the
            # deleted topic. They end at `dispatched`.
            end = max(end, dispatched)
        before, floors = self.deleted.ends, self.min_offsets.by_topic
        self.min_offsets.drop([topic])
        try:
            self._record([topic], max(end, before.get(topic, 0)), self.commit_log.min_position)
            self.queues.move_to_trash(topic, {queue.queue_id for queue in kept})
        except OSError as failure:
            self._restore([topic], before, floors)
            log.error("topic %s was deleted at the master, but could not be deleted here: %s", topic, failure)
            return
        log.info(
            "topic %s was deleted at the master: %d of its queues were deleted here", topic, count - len(kept)
        )
        self.tasks.begin("removal of deleted topics", self._empty_trash)

    def record_before(self, topics: Sequence[str], end: int) -> None:
        """Record the deletion of topics without queues, up to `end`, where the dispatched records end."""
        try:
            self._record(topics, end, self.commit_log.min_position)
        except OSError as failure:
            log.error("the deletion of topics at the master could not be recorded: %s", failure)

    async def _empty_trash(self) -> None:
        async with self._lock:
            await self._remove_files([])

    async def _attempt(self, left: list[str], tries: int) -> int:
        """Delete the topics in `left` that get no message during the deletion, and remove them from `left`.

        A thread records the deletion. If a topic gets a message meanwhile, it stays in `left`, and the caller
        tries again. After TRIES attempts, the event loop itself records the deletion. That blocks the loop,
        so no topic can get a message meanwhile. Return the number of deleted queues. Raises OSError.
        """
        wait = tries > TRIES
        if wait:
            await self.executor.tick_end()
        self.appender.encode_pending()
        seen = {topic: self.queues.next_offsets(topic) for topic in left}
        end, begin = self.commit_log.next, self.commit_log.min_position
        self.min_offsets.drop(left)
        if wait:
            self._record(left, end, begin)
        else:
            await self.executor.run(self._record, list(left), end, begin)
        # Assign offsets to the messages that have arrived since `seen` was computed. The comparison below
        # then detects these messages.
        self.appender.encode_pending()
        if self.commit_log.end < end and tries <= 2 * TRIES:
            # Do not delete the queues, because messages before `end` have not been written: their write has
            # failed or may fail. Later messages of the topics could then lie before `end`, and would count as
            # deleted.
            return 0
        gone = 0
        for topic in list(left):
            if self.queues.next_offsets(topic) == seen[topic] and topic not in self.min_offsets.by_topic:
                gone += self.queues.move_to_trash(topic)
                left.remove(topic)
        return gone

    def _record(self, topics: Sequence[str], end: int, begin: int) -> None:
        """Record durably that the records of `topics` before log position `end` are deleted. Raises OSError.

        Any thread may call this method.
        """
        # The log's directories are synced before the table of deleted topics is written. The new table no
        # longer lists topics whose records retention has deleted. If a power failure restored the segments of
        # these records, the topics would reappear.
        for directory in self.commit_log.directories.all:
            self.disk.fsync_dir(directory)
        self.deleted.add(topics, end, begin)
        self.min_offsets.save_without(topics)

    def _restore(
        self, topics: list[str], deleted: Mapping[str, int], floors: Mapping[str, Mapping[int, int]]
    ) -> None:
        for topic in topics:
            if topic in floors:
                self.min_offsets.set_offsets(topic, floors[topic])
        try:
            self.deleted.restore(topics, deleted)
            # The log may have become shorter. If the table of deleted topics kept a log position after the
            # end of the log, new records before that position would count as deleted.
            self.deleted.lower(self.commit_log.end)
            self.min_offsets.save()
        except OSError as failure:
            log.error("the deletion of %s will be finished at the next start: %s", ", ".join(topics), failure)

    async def _remove_files(self, topics: Sequence[str]) -> None:
        try:
            await self.executor.run(self.queues.empty_trash)
            # `remove` finds ext files by the name of the topic. It cannot delete data of a new topic with the
            # same name, because CometMQ writes no ext files.
            await self.executor.run(self.ext.remove, topics)
        except OSError as failure:
            log.error("files of deleted topics remain until the next start: %s", failure)
        self.queues.drop_trash()
