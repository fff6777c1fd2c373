"""Reads the queues of parent topics, and adds their messages to the queues of the lite topics.

New messages are read as soon as they are visible. If many messages are not in the database, as after the
first start with a store of Apache's broker, they are read in the background. Until then the parent topic is
not ready: it accepts no messages for lite topics, because their offsets are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from cometmq import logs
from cometmq.broker.lite.lite_queues import LiteQueues
from cometmq.broker.pop.pops import split
from cometmq.errors import RecordError
from cometmq.periodic import Tasks
from cometmq.protocol.lite import DISPATCH, QUEUE_OFFSET, is_lite_topic, lite_topic_of, lmq_name
from cometmq.protocol.properties.values import value_of
from cometmq.protocol.record.one import record_parts
from cometmq.store import CACHED, Buffer, MessageStore, NotInMemory, ReadResult, Reads

log = logs.logger(__name__)

MESSAGES_AT_ONCE = 64
READS_AT_ONCE = 8
"""The number of reads from a queue that the event loop waits for. Further messages are read in a task."""
REMOVED_AT_ONCE = 256
MAX_LOST = 1 << 16
"""The maximum number of offsets of a lite topic that no message has, because sends have failed."""
RETRY_MS = 1_000


class ParentQueues:
    """The queues of parent topics, and how far each has been read."""

    def __init__(
        self,
        store: MessageStore,
        queues: LiteQueues,
        watch: Callable[[str, int], None],
        on_message: Callable[[str], None],
    ) -> None:
        """Create the table of the queues that the database knows.

        `watch` is called with each queue of whose new messages `follow` must be called, `on_message` with the
        queue name of each lite topic that has a new message.
        """
        self._store = store
        self._queues = queues
        self._watch = watch
        self._on_message = on_message
        self._next = queues.followed()
        self._parents: Mapping[str, int] = {}
        self._behind: set[tuple[str, int]] = set()  # The queues that a task is reading
        self._removing: set[str] = set()
        self._watched: set[tuple[str, int]] = set()
        self._tasks = Tasks()
        self._log_limit = logs.LogLimiter()

    def is_ready(self, parent: str) -> bool:
        """Return whether all messages of a parent topic are in the database."""
        return (
            parent in self._parents
            and parent not in self._removing
            and not any(parent == topic for topic, _ in self._behind)
        )

    def are_ready(self, parents: Iterable[str]) -> bool:
        """Return whether all messages of these parent topics, and of all others, are in the database."""
        return not self._behind and all(map(self.is_ready, parents))

    def set_parents(self, parents: Mapping[str, int]) -> None:
        """Follow the queues of exactly these topics, given with their numbers of queues."""
        self._parents = parents
        for parent in {topic for topic, _ in self._next} - parents.keys() - self._removing:
            self._removing.add(parent)
            self._tasks.start(self._remove(parent))
        for parent, count in parents.items():
            if parent in self._removing:
                continue
            for queue_id in range(count):
                if (parent, queue_id) not in self._next:
                    self._next[parent, queue_id] = 0
                if (parent, queue_id) not in self._watched:
                    self._watched.add((parent, queue_id))
                    self._watch(parent, queue_id)
                self.follow(parent, queue_id)

    async def _remove(self, parent: str) -> None:
        """Remove the lite topics of a topic that was deleted, or that is no parent topic any more."""
        while found := self._queues.of_parent(parent, REMOVED_AT_ONCE):
            if not sum(self._queues.remove(lmq) for lmq in found):
                break  # Messages are being stored; the broker removes the rest once they have expired
            await self._store.executor.pause(0)
        self._queues.forget_parent(parent)
        for key in [key for key in self._next if key[0] == parent]:
            del self._next[key]
        self._removing.discard(parent)
        self.set_parents(self._parents)

    # -- reading

    def arrived(self, topic: str, queue_id: int, offset: int) -> None:
        """Add the new messages of a queue, of which the first has this offset, if its topic is a parent."""
        following = self._next.get((topic, queue_id))
        if following is None:
            return
        # A replica that has not deleted a topic whose queue was created again, or that replaces records that
        # a crash has removed from its log.
        self._next[topic, queue_id] = min(offset, following)
        self.follow(topic, queue_id)

    def follow(self, parent: str, queue_id: int) -> None:
        """Add the new messages of a parent queue."""
        if (parent, queue_id) in self._behind or parent in self._removing:
            return
        try:
            for _ in range(READS_AT_ONCE):
                offset = self._offset(parent, queue_id)
                if not self._take(parent, queue_id, offset, self._read(parent, queue_id, offset, CACHED)):
                    return
        except NotInMemory:
            pass
        except Exception as error:
            self._failed(parent, error)
        self._behind.add((parent, queue_id))
        self._tasks.start(self._catch_up(parent, queue_id))

    async def _catch_up(self, parent: str, queue_id: int) -> None:
        executor = self._store.executor
        while (offset := self._offset(parent, queue_id)) >= 0 and not executor.ending:
            try:
                got = await executor.query(partial(self._read, parent, queue_id, offset))
                if not self._take(parent, queue_id, offset, got):
                    break
                await executor.pause(0)
            except Exception as error:
                self._failed(parent, error)
                await executor.pause(RETRY_MS)
        self._behind.discard((parent, queue_id))

    def _failed(self, parent: str, error: Exception) -> None:
        if self._log_limit.allows():
            log.error("the lite topics of %s could not be updated, trying again: %s", parent, error)

    def _offset(self, parent: str, queue_id: int) -> int:
        """Return the offset of the next message to be read, or -1 if the queue must not be read any more."""
        following = self._next.get((parent, queue_id))
        if following is None or parent in self._removing:
            return -1
        return max(following, self._store.min_offset(parent, queue_id))

    def _read(self, parent: str, queue_id: int, offset: int, reads: Reads) -> ReadResult:
        return self._store.get_messages(parent, queue_id, offset, MESSAGES_AT_ONCE, reads=reads)

    def _take(self, parent: str, queue_id: int, offset: int, got: ReadResult) -> bool:
        """Add the messages of a read at `offset`. Return whether more may follow."""
        key, following = (parent, queue_id), got.next_begin_offset
        if offset != self._offset(*key):
            return True  # The queue was created again during the read
        if following == self._next[key]:
            return False
        for record in split(got.buffers):
            self._add(parent, record)
        self._queues.set_followed(parent, queue_id, following)
        self._next[key] = following
        return following < got.max_offset

    def _is_plausible(self, parent: str, offset: int) -> bool:
        """Return whether a lite topic of this parent can have a message at an offset."""
        queues = range(self._parents.get(parent, 0))
        return offset <= MAX_LOST + sum(self._store.max_offset(parent, queue_id) for queue_id in queues)

    def _add(self, parent: str, record: Buffer) -> None:
        try:
            head, _, _, _, topic_end = record_parts(record, 0)
        except RecordError:
            return  # The record is damaged, so its message is lost
        properties = bytes(record[topic_end + 2 :])
        lmq = value_of(properties, DISPATCH).decode("utf-8", "replace")
        text = value_of(properties, QUEUE_OFFSET)
        # A record from elsewhere can contain anything.
        if not text.isdigit() or len(text) > 18 or not is_lite_topic(name := lite_topic_of(lmq)):
            return
        offset, position, stored_ms = int(text), head[6], head[10]
        if (
            lmq == lmq_name(parent, name)
            and (offset <= MAX_LOST or self._is_plausible(parent, offset))
            and self._queues.add(lmq, offset, position, stored_ms)
        ):
            self._on_message(lmq)

    async def stop(self) -> None:
        """Wait until the reads in progress have ended."""
        await self._tasks.finish(cancel=True)
