"""Consumed offsets of a group: in memory first, persisted every few seconds, at the loss of a queue and at
the end; and where a consumer starts on a queue that has none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from cometmq import logs
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.routes import ReadTarget
from cometmq.client.cluster.workers import call_on_loop, for_each
from cometmq.client.group.options import ConsumeFromWhere, OffsetStorage
from cometmq.errors import CometError, Transient
from cometmq.message import MessageQueue, PullResult
from cometmq.protocol.codes import RETRY_PREFIX

__all__ = [
    "OffsetStore",
    "OwnOffsets",
    "RemoteOffsets",
    "commit_rounds",
    "default_start_time_ms",
    "start_offset",
    "warn_of_moved_offset",
]

log = logs.logger("cometmq.client.consumer.consumer_offsets")

_AT_ONCE = 64  # requests under way at a time; a member may hold thousands of queues
_HALF_HOUR_MS = 30 * 60 * 1000
_STORAGE_S = 10.0  # a storage that hangs must not hold a stop, or a queue that goes to another member

ReadOffset = Callable[[MessageQueue], Awaitable[int | None]]
WriteOffset = Callable[[dict[MessageQueue, int]], Awaitable[dict[MessageQueue, Exception]]]
"""Persist a table; answers what failed."""


@dataclass(slots=True, eq=False)
class OffsetStore:
    """read: the stored offset, None if there is none, or it raises; write: stores a table."""

    _read: ReadOffset
    _write: WriteOffset
    _offsets: dict[MessageQueue, int] = field(default_factory=dict)
    _dirty: set[MessageQueue] = field(default_factory=set)
    _persisting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def update(self, queue: MessageQueue, offset: int, *, increase_only: bool = True) -> None:
        current = self._offsets.get(queue)
        if current is None or offset > current or (not increase_only and offset != current):
            self._offsets[queue] = offset
            self._dirty.add(queue)

    def memory(self, queue: MessageQueue) -> int | None:
        return self._offsets.get(queue)

    async def stored(self, queue: MessageQueue) -> int | None:
        return await self._read(queue)

    async def committed(self, queue: MessageQueue) -> int | None:
        """Memory first, then the store."""
        offset = self._offsets.get(queue)
        return offset if offset is not None else await self._read(queue)

    def snapshot(self) -> dict[MessageQueue, int]:
        return dict(self._offsets)

    async def persist(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Store what changed since the last time (of `queues`, else of all). What fails stays due for the
        next time.

        Raises the first failure, after everything has been tried.
        """
        async with self._persisting:
            due = self._dirty if queues is None else self._dirty.intersection(queues)
            table = {queue: self._offsets[queue] for queue in sorted(due)}
            if not table:
                return
            failures = await self._write(table)
            for queue, offset in table.items():
                # An offset that moved while it was written stays dirty.
                if queue not in failures and self._offsets.get(queue, offset) == offset:
                    self._dirty.discard(queue)
            for queue, failure in failures.items():
                log.warning("offset %d of %s was not stored: %s", table[queue], queue, failure)
            if failures:
                raise next(iter(failures.values()))

    async def try_persist(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """As `persist`, but a failure is only logged: what is not stored is due the next time."""
        try:
            await self.persist(queues)
        except CometError:
            pass

    async def persist_last(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """`persist` of queues (None: all) that others read from now on, then ask whether the store still has
        it all, and store again what it lost.

        A pull carries its queue's offset, and a broker may serve one that was sent before only now: then an
        older offset replaces what was confirmed. A failure is only logged: what is not stored is consumed
        again.
        """

        async def lost(queue: MessageQueue) -> bool:
            try:
                stored = await self._read(queue)
            except CometError:
                return False
            return stored is None or stored < self._offsets.get(queue, 0)

        known = [queue for queue in (self._offsets if queues is None else queues) if queue in self._offsets]
        try:
            await self.persist(known)
            answers = await for_each(known, lost, _AT_ONCE)
            self._dirty.update(queue for queue, is_lost in zip(known, answers, strict=True) if is_lost)
            await self.persist(known)
        except CometError:
            pass  # logged

    async def release(self, queues: Iterable[MessageQueue]) -> None:
        """Persist and forget queues that somebody else reads from now on."""
        queues = list(queues)
        try:
            # If this fails, the next owner starts where the last persist left it and repeats the rest.
            await self.persist_last(queues)
        finally:
            for queue in queues:
                self.forget(queue)

    def forget(self, queue: MessageQueue) -> None:
        self._offsets.pop(queue, None)
        self._dirty.discard(queue)


class OffsetStorageError(CometError, Transient):
    """A storage of the user's own did not read or write offsets."""

    problem: str


@dataclass(slots=True)
class OwnOffsets:
    """The offsets of a group, in a storage of its own."""

    _storage: OffsetStorage

    async def read(self, queue: MessageQueue) -> int | None:
        try:
            async with asyncio.timeout(_STORAGE_S):
                offset = await call_on_loop(self._storage.read, queue)
            if offset is not None and not (isinstance(offset, int) and offset >= 0):
                raise TypeError(f"read() gives an offset or None, not {offset!r}")
        except CometError:
            raise
        except Exception as error:
            raise OffsetStorageError(f"no offset of {queue} from {self._name}: {error!r}") from error
        return offset

    async def write(self, table: dict[MessageQueue, int]) -> dict[MessageQueue, Exception]:
        try:
            async with asyncio.timeout(_STORAGE_S):
                await call_on_loop(self._storage.write, dict(table))
        except CometError as error:
            return dict.fromkeys(table, error)
        except Exception as error:
            return dict.fromkeys(table, OffsetStorageError(f"{self._name} took no offsets: {error!r}"))
        return {}

    @property
    def _name(self) -> str:
        return type(self._storage).__name__


@dataclass(slots=True)
class RemoteOffsets:
    """The offsets of a group, on the brokers that hold its queues."""

    _client: ClientInstance
    _group: str
    _strictly: bool = False
    """Tell "no offset" from 0, except in a retry topic, whose first messages are always the group's."""

    async def read(self, queue: MessageQueue) -> int | None:
        addr = await self._client.find_addr(queue)
        exact = self._strictly and not queue.topic.startswith(RETRY_PREFIX)
        return await self._client.brokers.consumer_offset(addr, self._group, queue, exact=exact)

    async def write(self, table: dict[MessageQueue, int]) -> dict[MessageQueue, Exception]:
        failures: dict[MessageQueue, Exception] = {}

        async def update(queue: MessageQueue) -> None:
            try:
                addr = await self._client.find_addr(queue)
                await self._client.brokers.update_consumer_offset(addr, self._group, queue, table[queue])
            except CometError as error:
                failures[queue] = error

        for queues in commit_rounds(table):
            await for_each(queues, update, _AT_ONCE)
        return failures


def commit_rounds(queues: Iterable[MessageQueue]) -> tuple[list[MessageQueue], list[MessageQueue]]:
    """The first queue of each topic, and the others, whose commits must wait for those of the first.

    Apache 4.9's broker makes a group's table of a topic when a commit finds none: of two commits that come
    together each makes one, and what went into the one that is replaced is lost, although it was confirmed.
    """
    first: dict[str, MessageQueue] = {}
    rest = [queue for queue in queues if first.setdefault(queue.topic, queue) is not queue]
    return list(first.values()), rest


async def start_offset(
    client: ClientInstance, queue: MessageQueue, stored: int | None, where: ConsumeFromWhere, time_ms: int
) -> int:
    """Where to begin with a queue whose offset the group has `stored` (None: it has none).

    A broker that still holds the first message of a queue answers 0 for an unknown group, so a new group on a
    young topic starts at 0 even with LAST_OFFSET, unless it starts strictly. A store that cannot be read is
    an error of the caller, never None: taking it for "none" would skip messages.
    """
    if stored is not None:
        return stored
    is_retry = queue.topic.startswith(RETRY_PREFIX)
    by_time = where is ConsumeFromWhere.TIMESTAMP
    if where is ConsumeFromWhere.FIRST_OFFSET or (is_retry and not by_time):
        return 0

    async def ask(target: ReadTarget) -> int:
        if by_time and not is_retry:
            return await client.brokers.offset_by_time(target.addr, queue, time_ms)
        return await client.brokers.max_offset(target.addr, queue)

    return await client.reads.run(queue, ask)


def default_start_time_ms() -> int:
    """The store time at which TIMESTAMP starts unless told otherwise."""
    return int(time.time() * 1000) - _HALF_HOUR_MS


def warn_of_moved_offset(queue: MessageQueue, offset: int, result: PullResult) -> None:
    """The broker does not have the offset that was pulled."""
    logs.logger("cometmq.client.consumer").warning(
        "%s: offset %d is outside the broker's %d to %d; going on at %d",
        queue, offset, result.min_offset, result.max_offset, result.next_begin_offset,
    )  # fmt: skip
