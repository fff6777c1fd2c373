"""The messages that a pull consumer has prefetched or returned, and which of them count as consumed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from cometmq.client.cluster.traces import trace_polled
from cometmq.client.consumer.rebalance import Rebalance
from cometmq.client.group.group import Group
from cometmq.client.group.health import QueueHealth
from cometmq.client.group.member import Member
from cometmq.client.pull.reading_ahead import Fetched, Fetcher, PullAt
from cometmq.client.pull.schedule import Schedule
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.bodies import ConsumerRunningInfo, ProcessQueueInfo


class Polling:
    """Prefetches the messages of assigned queues, by `pull`, and delivers them to the caller (Holder).

    `schedule` manages the queues of scheduled topics, which are not prefetched. `ended` creates the exception
    for a caller that asks a stopped consumer. Without `auto_commit`, only commit() commits offsets.
    """

    def __init__(
        self,
        group: Group,
        schedule: Schedule,
        pull: PullAt,
        ended: Callable[[], Exception],
        *,
        auto_commit: bool,
    ) -> None:
        self.schedule = schedule
        self._group = group
        self._ended = ended
        self._fetcher = Fetcher(pull, self._count)
        self._auto_commit = auto_commit
        self._last_polled: Fetched | None = None
        """The batch of the last poll. The next poll counts it as consumed."""
        self._iterated: Fetched | None = None
        self._rest: deque[MessageExt] = deque()
        """The messages of the batch `_iterated` that the iteration has not returned yet."""
        self._last_iterated: tuple[MessageExt, ...] = ()
        """The message that the iteration returned last, until the caller requests the next message."""
        self._consumed: dict[MessageQueue, int] = {}
        """Without `auto_commit`: the offset up to which each queue is consumed but not yet committed."""

    async def close(self) -> None:
        await self._fetcher.close()
        await self.schedule.close()

    # -- assigned queues

    @property
    def queues(self) -> tuple[MessageQueue, ...]:
        return (*self._fetcher.queues, *self.schedule.queues)

    @property
    def problems(self) -> dict[MessageQueue, str]:
        return self._fetcher.problems | self.schedule.problems

    def health(self) -> tuple[QueueHealth, ...]:
        given: dict[MessageQueue, list[MessageExt]] = {}
        if self._last_polled is not None:
            given[self._last_polled.queue] = self._last_polled.messages
        elif self._iterated is not None:
            given[self._iterated.queue] = [*self._last_iterated, *self._rest]
        committed = self._group.offsets.memory
        return (*self._fetcher.health(committed, given), *self.schedule.health(committed))

    def pause(self, queue: MessageQueue) -> None:
        self._fetcher.pause(queue)

    def resume(self, queue: MessageQueue) -> None:
        self._fetcher.resume(queue)

    def expired(self, queue: MessageQueue) -> bool:
        del queue
        return False

    async def claim(self, queues: Sequence[MessageQueue], *, alone: bool) -> Collection[MessageQueue]:
        del alone
        return [queue for queue in queues if not self.schedule.is_ending(queue)]

    async def finish_rebalance(self) -> None:
        """Do nothing: this holder has nothing to complete after a rebalance."""

    async def assign(self, queue: MessageQueue) -> bool:
        """Read a queue from its committed offset, or as `consume_from_where` determines."""
        if self._fetcher.closed:
            return False
        if queue.topic in self.schedule.functions:
            self.schedule.start(queue)
            return True
        offsets = self._group.offsets
        self._fetcher.read(queue, await self._group.start_offset(queue, await offsets.committed(queue)))
        return not self._fetcher.closed

    async def revoke(self, queues: Sequence[MessageQueue]) -> None:
        scheduled = set(self.schedule.queues)
        for queue in queues:
            self._fetcher.drop(queue)
            self._forget_given(queue)
            self.schedule.stop(queue)
        await self._group.offsets.release(queue for queue in queues if queue not in scheduled)

    async def move(self, queue: MessageQueue, offset: int) -> None:
        self._forget_given(queue)
        self._group.offsets.update(queue, offset, increase_only=False)
        if queue.topic not in self.schedule.functions:
            self._fetcher.read(queue, offset)

    # -- delivery

    async def poll(self, timeout_s: float | None) -> list[MessageExt]:
        """Return the next messages of one queue, or an empty list after the timeout."""
        self._count_given()
        if self._rest:
            # The caller left an iteration within a batch, so return the rest of that batch.
            assert self._iterated is not None
            self._last_polled = self._iterated
            self._last_polled.messages = list(self._rest)
            self._rest.clear()
        else:
            self._last_polled = await self._next_batch(timeout_s)
        return [] if self._last_polled is None else self._last_polled.messages

    async def _next_batch(self, timeout_s: float | None) -> Fetched | None:
        begun_ns = time.time_ns()
        fetched = await self._fetcher.next_batch(timeout_s)
        if self._fetcher.closed:  # raise here, because a stopped consumer must not block the caller
            raise self._ended()
        traces = self._group.instance.traces
        if fetched is not None and traces is not None:
            trace_polled(traces, self._group.name, fetched.messages)
        telemetry = self._group.instance.options.telemetry
        if fetched is not None and telemetry is not None:
            telemetry.received(self._group.name, fetched.messages, begun_ns)
        return fetched

    async def each(self) -> AsyncIterator[MessageExt]:
        """Yield messages. A message counts as consumed when the caller requests the next message."""
        self._count_given()
        while True:
            while not self._rest:
                self._iterated = await self._next_batch(None)
                self._rest.extend(self._iterated.messages if self._iterated is not None else ())
            batch = self._iterated
            assert batch is not None
            message = self._rest.popleft()
            self._last_iterated = (message,)
            yield message
            self._last_iterated = ()
            if self._iterated is batch:  # false if the caller has used seek() or assign() after the yield
                batch.counted = not self._rest
                self._count(batch.queue, batch.next_offset if batch.counted else message.queue_offset + 1)

    def each_in_thread(
        self,
        poll: Callable[[], Coroutine[Any, Any, list[MessageExt]]],
        run: Callable[[Coroutine[Any, Any, list[MessageExt]]], list[MessageExt]],
        later: Callable[[Callable[[], None]], None],
    ) -> Iterator[MessageExt]:
        """Yield messages in the caller's thread, for SyncPullConsumer.

        The event loop's thread is used once per batch: `run` waits for a coroutine on it, `later` does not
        wait.
        """
        while True:
            messages = run(poll())
            for number, message in enumerate(messages):
                if self._last_polled is None or self._last_polled.messages is not messages:
                    break  # a seek or a new assignment has made the rest of this batch invalid
                try:
                    yield message
                except GeneratorExit:
                    # Do not wait: Python may close this iterator in any thread, or at exit, when the loop's
                    # thread has ended. The loop runs `_left_at` before any later request.
                    later(partial(self._left_at, messages, number))
                    raise

    def _left_at(self, messages: list[MessageExt], number: int) -> None:
        """Keep the messages after `number`, which was returned last and is not consumed yet."""
        given = self._last_polled
        if given is not None and given.messages is messages:
            self._last_polled, self._iterated = None, given
            self._count(given.queue, messages[number].queue_offset)
            self._rest.extend(messages[number + 1 :])

    # -- consumption

    def _count(self, queue: MessageQueue, offset: int) -> None:
        if self._auto_commit:
            self._group.offsets.update(queue, offset)
        else:
            self._consumed[queue] = max(offset, self._consumed.get(queue, 0))

    def _count_given(self) -> None:
        given, self._last_polled = self._last_polled, None
        self._last_iterated = ()
        if given is not None:
            given.counted = True
            self._count(given.queue, given.next_offset)

    def _forget_given(self, queue: MessageQueue) -> None:
        """Forget the returned messages of a queue, so that they no longer advance its offset."""
        self._consumed.pop(queue, None)
        if self._last_polled is not None and self._last_polled.queue == queue:
            self._last_polled = None
        if self._iterated is not None and self._iterated.queue == queue:
            self._iterated = None
            self._rest.clear()

    async def commit(self, offsets: Mapping[MessageQueue, int] | None) -> None:
        """Store the given offsets now. None: store the offsets of all returned messages."""
        store = self._group.offsets
        if offsets is not None:
            for queue, offset in offsets.items():
                store.update(queue, offset, increase_only=False)
            await store.persist(offsets)
            return
        self._count_given()
        consumed, self._consumed = self._consumed, {}
        for queue, offset in consumed.items():
            store.update(queue, offset)
        await store.persist()


class PullSession(Member):
    """The group membership of a pull consumer. Implements ConsumerPeer."""

    consume_type = "CONSUME_ACTIVELY"
    kind = "pull consumer"

    def __init__(self, group: Group, holder: Polling) -> None:
        super().__init__(group)
        self._holder = holder
        self.rebalance = Rebalance(group, holder)
        group.instance.register_consumer(group.name, self)

    async def join(self) -> None:
        """Announce the subscriptions in heartbeats, then rebalance the queues."""
        await self.group.instance.refresh_routes(self.group.subscriptions)
        await super().join()
        await self.rebalance.run()
        self.rebalance.start()

    def wake_rebalance(self) -> None:
        self.rebalance.wake()

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        """Apply an administrator's offset reset to the queues assigned to this member."""
        async with self.rebalance.lock:
            for queue in set(table).intersection(self._holder.queues):
                await self._holder.move(queue, table[queue])
            await self.group.offsets.try_persist(table)

    def running_info(self) -> ConsumerRunningInfo:
        memory = self.group.offsets.memory
        queues = self._holder.queues
        return self.info_of({queue: ProcessQueueInfo(commit_offset=memory(queue) or 0) for queue in queues})
