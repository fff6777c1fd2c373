"""The pull consumer: the caller decides what is read, from where, and when an offset counts as consumed.

    async with PullConsumer("group") as consumer:
        for queue in await consumer.fetch_queues("TopicTest"):
            result = await consumer.pull(queue, await consumer.min_offset(queue))

or, reading ahead and keeping offsets:

        await consumer.assign_topic("TopicTest")
        async for message in consumer:
            ...
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from cometmq.client.cluster.instance import Client, ClientInstance
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.cluster.requests import pull_request
from cometmq.client.consumer.reading_ahead import Fetched, Fetcher
from cometmq.client.group.filter_servers import Pulls
from cometmq.client.group.offsets import OffsetStore, RemoteOffsets, default_start_time_ms, start_offset
from cometmq.client.group.options import PullOptions
from cometmq.client.group.subscription import Expression, Subscription, as_subscription, sql92
from cometmq.client.group.traces import trace_polled
from cometmq.errors import ClientStateError
from cometmq.message import MessageExt, MessageQueue, PullResult
from cometmq.periodic import Periodic
from cometmq.protocol.codes import check_group_name

__all__ = ["PullConsumer"]

_MOST_CHECKED = 1_000


class PullConsumer(Client):
    """Reads as `group`, without joining it: queues are not shared out, whoever calls chooses them.

    So it never takes queues from the group's push consumers, and brokers do not list it. `client`: an
    instance to share; else the consumer has its own towards `namesrv`.

    A start asks nothing of any server. A stop ends the reading ahead and stores the offsets of what was
    consumed.
    """

    def __init__(
        self,
        group: str,
        *,
        namesrv: str | Sequence[str] | None = None,
        options: PullOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        check_group_name(group)
        super().__init__(f"pull consumer of group {group}", namesrv, client, client_options)
        self.group = group
        self.options = options if options is not None else PullOptions()
        self._expressions: dict[MessageQueue, Subscription] = {}
        self._checked: set[tuple[str, str, str]] = set()
        """Broker, topic and expression of the SQL92 filters that brokers have compiled."""
        self._offsets: OffsetStore | None = None
        self._pulls: Pulls | None = None
        self._fetcher = Fetcher(self._pull_assigned)
        self._given: Fetched | None = None
        """The batch given out by the last poll; the next poll counts it as consumed."""
        self._iterated: Fetched | None = None
        self._rest: deque[MessageExt] = deque()
        """Of the batch that is being iterated: what was not given out yet."""
        self._persisting: Periodic | None = None

    # -- life

    async def _begin(self) -> None:
        client = await self._start_client()
        self._pulls = Pulls(client, self.group)
        remote = RemoteOffsets(client, self.group)
        self._offsets = OffsetStore(remote.read, remote.write)
        self._persisting = Periodic(
            asyncio.get_running_loop(),
            self.options.persist_interval_s,
            self._offsets.try_persist,
            name=f"offsets of group {self.group}",
        )
        self._persisting.start()

    async def _end(self, *, drain: bool) -> None:
        try:
            if self._persisting is not None:
                self._persisting.cancel()
                await self._persisting.stop()
            await self._fetcher.close()
            if drain:
                await self._store.try_persist()
        finally:
            await self._close_client()

    def _running(self) -> ClientInstance:
        if self._state != "stopping":  # what was begun before may end
            self._check_running()
        return self.client

    @property
    def _store(self) -> OffsetStore:
        self._running()
        assert self._offsets is not None
        return self._offsets

    # -- queues and their bounds

    async def fetch_queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic. Raises NoRouteError."""
        return list(await self._running().read_queues(topic))

    async def min_offset(self, queue: MessageQueue) -> int:
        """First offset that is still stored."""
        return await self._running().brokers.min_offset(await self._master(queue), queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        """The offset that the next message will get."""
        return await self._running().brokers.max_offset(await self._master(queue), queue)

    async def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Offset by store time in ms: in 4.9 the nearest message, in 5.x the first one not older."""
        return await self._running().brokers.offset_by_time(await self._master(queue), queue, timestamp_ms)

    # -- single pulls

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        max_count: int | None = None,
        expression: Expression = "*",
        timeout_s: float | None = None,
    ) -> PullResult:
        """At most `max_count` messages (brokers give 32) from `offset` on; waits for nothing."""
        subscription = as_subscription(queue.topic, expression)
        limit = self.options.pull_timeout_s if timeout_s is None else timeout_s
        return await self._pull(queue, offset, max_count, subscription, 0.0, limit)

    async def pull_blocking(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        max_count: int | None = None,
        expression: Expression = "*",
    ) -> PullResult:
        """As pull, but the broker waits up to `broker_suspend_s` for a message to come."""
        subscription = as_subscription(queue.topic, expression)
        options = self.options
        return await self._pull(
            queue, offset, max_count, subscription, options.broker_suspend_s, options.suspend_timeout_s
        )

    async def _pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_count: int | None,
        subscription: Subscription,
        suspend_s: float,
        timeout_s: float,
    ) -> PullResult:
        if offset < 0 or (max_count is not None and max_count <= 0):
            raise ValueError(
                f"offset {offset} and max_count {max_count}: the one must be 0 or more, the other positive"
            )
        addr = await self._master(queue)
        await self._check(addr, subscription)
        request = pull_request(
            self.group,
            queue,
            offset,
            self.options.pull_batch_size if max_count is None else max_count,
            subscription.expression,
            expression_type=subscription.expression_type,
            sub_version=subscription.version,
            suspend_s=suspend_s,
            class_filter=subscription.source is not None,
        )
        assert self._pulls is not None
        result = await self._pulls.pull(addr, queue, subscription, request, timeout_s, self.options.max_body)
        if not subscription.tags:
            return result
        return msgspec.structs.replace(result, messages=subscription.filter(result.messages))

    async def _check(self, addr: str, subscription: Subscription) -> None:
        """Ask a broker once about each SQL92 expression: Apache's gives every message to a pull with one that
        it cannot compile. Raises BrokerError with its words."""
        asked = addr, subscription.topic, subscription.expression
        if subscription.expression_type == "TAG" or asked in self._checked:
            return
        client = self._running()
        await client.brokers.check_client_config(addr, client.client_id, self.group, subscription.data())
        if len(self._checked) >= _MOST_CHECKED:
            self._checked.clear()
        self._checked.add(asked)

    # -- reading ahead

    async def assign(self, queues: Iterable[MessageQueue], *, expression: Expression = "*") -> None:
        """Read exactly these queues from now on; a new one starts at its committed offset or as
        `consume_from_where` says. Raises BrokerError when a broker refuses an SQL92 expression; then nothing
        has changed."""
        self._running()
        wanted = set(queues)
        for queue in sorted(wanted) if isinstance(expression, sql92) else ():
            await self._check(await self._master(queue), as_subscription(queue.topic, expression))
        for queue in set(self._fetcher.queues) - wanted:
            self._fetcher.drop(queue)
            self._forget_given(queue)
            await self._store.release(queue)
        for queue in wanted:
            self._expressions[queue] = as_subscription(queue.topic, expression)
        for queue in sorted(wanted.difference(self._fetcher.queues)):
            self._fetcher.read(queue, await self._start_offset(queue))

    async def assign_topic(self, topic: str, *, expression: Expression = "*") -> None:
        """Read all queues that the topic has now."""
        await self.assign(await self.fetch_queues(topic), expression=expression)

    @property
    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues that are read ahead."""
        return self._fetcher.queues

    @property
    def problems(self) -> dict[MessageQueue, str]:
        """Assigned queues whose last pull failed, and why; they are tried again by themselves."""
        return dict(self._fetcher.problems)

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on reading an assigned queue at `offset`. Raises ValueError outside [min, max]."""
        if queue not in self._fetcher.queues:
            raise ClientStateError(f"{queue} is not assigned")
        low, high = await self.min_offset(queue), await self.max_offset(queue)
        if not low <= offset <= high:
            raise ValueError(f"offset {offset} of {queue} is outside {low} to {high}")
        self._forget_given(queue)
        self._store.update(queue, offset, increase_only=False)
        self._fetcher.read(queue, offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Go on reading an assigned queue at its first stored message."""
        await self.seek(queue, await self.min_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Go on reading an assigned queue behind its last message."""
        await self.seek(queue, await self.max_offset(queue))

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Read these assigned queues no further; what was read ahead is still given out."""
        for queue in queues:
            self._fetcher.pause(queue)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Read paused queues again."""
        for queue in queues:
            self._fetcher.resume(queue)

    async def poll(self, timeout_s: float | None = 5.0) -> list[MessageExt]:
        """The next messages of one assigned queue, an empty list when none come in time (None: wait for
        ever).

        The call says that the messages of the poll before were consumed: their offset is stored with the next
        persist.
        """
        self._running()
        self._count_given()
        if not self._rest:
            fetched = await self._next_batch(timeout_s)
            if fetched is None:
                return []
            self._given = fetched
            return fetched.messages
        # An iteration was left in the middle of a batch: here is what it has not given out.
        assert self._iterated is not None
        self._given = Fetched(self._iterated.queue, list(self._rest), self._iterated.next_offset)
        self._rest.clear()
        return self._given.messages

    async def _next_batch(self, timeout_s: float | None) -> Fetched | None:
        fetched = await self._fetcher.next_batch(timeout_s)
        if self._fetcher.closed:  # nobody waits for ever for a consumer that was stopped meanwhile
            raise self._not_running()
        if fetched is not None and self.client.traces is not None:
            trace_polled(self.client.traces, self.group, fetched.messages)
        return fetched

    async def __aiter__(self) -> AsyncIterator[MessageExt]:
        """Messages of the assigned queues for ever; each counts as consumed when the next is asked for."""
        self._running()
        self._count_given()
        while True:
            while not self._rest:
                self._iterated = await self._next_batch(None)
                self._rest.extend(self._iterated.messages if self._iterated is not None else ())
            batch = self._iterated
            assert batch is not None
            message = self._rest.popleft()
            yield message
            if self._iterated is batch:  # no seek and no new assignment in between
                offset = message.queue_offset + 1 if self._rest else batch.next_offset
                self._store.update(batch.queue, offset)

    def _iterate_in_thread(
        self, run: Callable[[Coroutine[Any, Any, list[MessageExt]]], list[MessageExt]]
    ) -> Iterator[MessageExt]:
        """The iteration of the blocking face. The loop is asked once for a batch, not for each message.

        `run` runs a coroutine on the loop and waits for it.
        """
        while True:
            messages = run(self.poll())
            for number, message in enumerate(messages):
                if self._given is None or self._given.messages is not messages:
                    break  # a seek or a new assignment came in between
                try:
                    yield message
                except GeneratorExit:
                    # Not waited for: Python may close this iterator in any thread, or at its exit, when the
                    # loop's thread does not run any more. What is asked of the loop next comes after it.
                    if self._state == "running" and self._loop is not None:
                        self._loop.call_soon_threadsafe(self._left_at, messages, number)
                    raise

    def _left_at(self, messages: list[MessageExt], number: int) -> None:
        """The one given out last is not known to be consumed; those after it are the next to be given out."""
        given = self._given
        if given is not None and given.messages is messages:
            self._given, self._iterated = None, given
            self._store.update(given.queue, messages[number].queue_offset)
            self._rest.extend(messages[number + 1 :])

    def _count_given(self) -> None:
        given, self._given = self._given, None
        if given is not None:
            self._store.update(given.queue, given.next_offset)

    def _forget_given(self, queue: MessageQueue) -> None:
        """What was given out of a queue must not move its offset any more."""
        if self._given is not None and self._given.queue == queue:
            self._given = None
        if self._iterated is not None and self._iterated.queue == queue:
            self._iterated = None
            self._rest.clear()

    async def _pull_assigned(self, queue: MessageQueue, offset: int) -> PullResult:
        options = self.options
        return await self._pull(
            queue, offset, None, self._expressions[queue], options.broker_suspend_s, options.suspend_timeout_s
        )

    async def _start_offset(self, queue: MessageQueue) -> int:
        options = self.options
        time_ms = options.consume_timestamp_ms
        return await start_offset(
            self._running(),
            queue,
            await self._store.committed(queue),
            options.consume_from_where,
            time_ms if time_ms is not None else default_start_time_ms(),
        )

    # -- offsets of the group

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's offset: as updated here, else as the broker has it; None: never stored."""
        return await self._store.committed(queue)

    def update_offset(self, queue: MessageQueue, offset: int) -> None:
        """Set the group's offset (also backwards); stored every few seconds, by commit() and by stop()."""
        self._store.update(queue, offset, increase_only=False)

    async def commit(self) -> None:
        """Store the offsets now, the last poll's included. Raises if one could not be stored."""
        self._count_given()
        await self._store.persist()

    async def _master(self, queue: MessageQueue) -> str:
        return await self._running().find_master(queue)
