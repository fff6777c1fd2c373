"""The consumer offsets of a group in memory, their storage, and the start offset of a queue.

Offsets are stored every few seconds, when a queue is revoked, and when the consumer stops.
"""

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
from cometmq.errors import CometError, ConnectError, Transient
from cometmq.message import MessageQueue, PullResult
from cometmq.protocol.codes import RETRY_PREFIX

log = logs.logger("cometmq.client.consumer.consumer_offsets")

_AT_ONCE = 64  # maximum number of concurrent requests, because a member may have thousands of queues
_HALF_HOUR_MS = 30 * 60 * 1000
_STORAGE_S = 10.0
"""Timeout of a call of the user's offset storage, in seconds, so that it blocks no stop and no handoff."""

ReadOffset = Callable[[MessageQueue], Awaitable[int | None]]
WriteOffset = Callable[[dict[MessageQueue, int]], Awaitable[dict[MessageQueue, Exception]]]
"""A function that stores a table of offsets and returns the failures by queue."""


@dataclass(slots=True, eq=False)
class OffsetStore:
    """The offsets in memory. `stored` returns a stored offset or None, `write` stores a table of offsets."""

    stored: ReadOffset
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

    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the offset in memory, or the stored offset if there is none in memory."""
        offset = self._offsets.get(queue)
        return offset if offset is not None else await self.stored(queue)

    def snapshot(self) -> dict[MessageQueue, int]:
        return dict(self._offsets)

    async def persist(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Store the changed offsets of `queues`, or of all queues.

        After all were tried, the first failure is raised. The next call stores what could not be stored.
        """
        async with self._persisting:
            due = self._dirty if queues is None else self._dirty.intersection(queues)
            table = {queue: self._offsets[queue] for queue in sorted(due)}
            if not table:
                return
            failures = await self._write(table)
            for queue, offset in table.items():
                # An offset that has changed during the write must be written again, so it stays marked as
                # changed.
                if queue not in failures and self._offsets.get(queue, offset) == offset:
                    self._dirty.discard(queue)
            for queue, failure in failures.items():
                log.warning("offset %d of %s could not be stored: %s", table[queue], queue, failure)
            if failures:
                raise next(iter(failures.values()))

    async def try_persist(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Store offsets as `persist` does, but only log failures."""
        try:
            await self.persist(queues)
        except CometError:
            pass

    async def persist_last(self, queues: Iterable[MessageQueue] | None = None) -> None:
        """Store and verify the offsets of queues (None: all) that other members will consume from now on.

        A pull request contains its queue's offset, so a broker that serves an earlier pull late overwrites
        the confirmed offset with an older offset. The stored offsets are therefore read back, and stored
        again if they were overwritten. Failures are only logged; the messages are then consumed again.
        """

        async def lost(queue: MessageQueue) -> bool:
            try:
                stored = await self.stored(queue)
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
            pass  # nothing to do, because `persist` has logged the error

    async def release(self, queues: Iterable[MessageQueue]) -> None:
        """Store and forget the offsets of queues that another member will consume from now on."""
        queues = list(queues)
        try:
            # If the offsets cannot be stored, the next owner starts at the last stored offset, so the
            # messages after that offset are consumed again.
            await self.persist_last(queues)
        finally:
            for queue in queues:
                self.forget(queue)

    def forget(self, queue: MessageQueue) -> None:
        self._offsets.pop(queue, None)
        self._dirty.discard(queue)


class OffsetStorageError(CometError, Transient):
    """A user-defined storage failed to read or write offsets."""

    problem: str


@dataclass(slots=True)
class OwnOffsets:
    """The offsets of a group in a user-defined storage."""

    _storage: OffsetStorage

    async def read(self, queue: MessageQueue) -> int | None:
        try:
            async with asyncio.timeout(_STORAGE_S):
                offset = await call_on_loop(self._storage.read, queue)
            if offset is not None and not (isinstance(offset, int) and offset >= 0):
                raise TypeError(f"read() must return an offset or None, not {offset!r}")
        except CometError:
            raise
        except Exception as error:
            raise OffsetStorageError(
                f"could not read an offset of {queue} from {self._name}: {error!r}"
            ) from error
        return offset

    async def write(self, table: dict[MessageQueue, int]) -> dict[MessageQueue, Exception]:
        try:
            async with asyncio.timeout(_STORAGE_S):
                await call_on_loop(self._storage.write, dict(table))
        except CometError as error:
            return dict.fromkeys(table, error)
        except Exception as error:
            return dict.fromkeys(table, OffsetStorageError(f"{self._name} stored no offsets: {error!r}"))
        return {}

    @property
    def _name(self) -> str:
        return type(self._storage).__name__


@dataclass(slots=True)
class RemoteOffsets:
    """The offsets of a group on the brokers of its queues."""

    _client: ClientInstance
    _group: str
    _strictly: bool = False
    """Whether `read` returns None for a queue without a stored offset, even if its broker answers 0 for it.

    Queues of a retry topic are excepted: only one group reads the topic, and it starts at 0 in either case.
    """

    async def read(self, queue: MessageQueue) -> int | None:
        exact = self._strictly and not queue.topic.startswith(RETRY_PREFIX)
        addr = await self._client.find_addr(queue)
        try:
            return await self._client.brokers.consumer_offset(addr, self._group, queue, exact=exact)
        except ConnectError:
            # The known route may still list a master that has stopped, so refresh the route. If the name
            # server also still lists that master, raise the error: the offsets on a replica may be older.
            await self._client.refresh_routes([queue.topic])
            other = await self._client.find_addr(queue)
            if other == addr:
                raise
            return await self._client.brokers.consumer_offset(other, self._group, queue, exact=exact)

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
    """Split queues into the first queue of each topic and the other queues, which must be committed later.

    For each group and topic, Apache 4.9's broker creates a table of offsets at the first commit. Of two
    concurrent first commits, each creates a table, and the second table replaces the first. The offset in the
    replaced table is lost, although the broker confirmed its commit.
    """
    first: dict[str, MessageQueue] = {}
    rest = [queue for queue in queues if first.setdefault(queue.topic, queue) is not queue]
    return list(first.values()), rest


async def start_offset(
    client: ClientInstance, queue: MessageQueue, stored: int | None, where: ConsumeFromWhere, time_ms: int
) -> int:
    """Return the start offset of a queue. `stored` is the group's stored offset, None if there is none.

    A broker that still has the first message of a queue answers 0 for an unknown group, so a new group on a
    young topic starts at 0 even with LAST_OFFSET, unless `start_strictly` is set. If the stored offset cannot
    be read, the caller must raise an error, because `stored=None` would skip messages.
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
    """Return the default start time, half an hour ago, in ms since 1970."""
    return int(time.time() * 1000) - _HALF_HOUR_MS


def warn_of_moved_offset(queue: MessageQueue, offset: int, result: PullResult) -> None:
    """Log that the broker no longer has, or does not have yet, the offset from which this client pulled."""
    logs.logger("cometmq.client.consumer").warning(
        "%s: offset %d is outside the broker's %d to %d; continuing at %d",
        queue, offset, result.min_offset, result.max_offset, result.next_begin_offset,
    )  # fmt: skip
