"""Pops from lite topics: a client receives messages of those lite topics to which it has subscribed.

Each lite topic is ordered for each group: while a message of it is leased, the group receives no other. A
group whose settings make it ordered receives several messages of a lite topic at once, as its clients consume
them one after the other; other groups receive one. A message whose lease expires stays in its place and is
delivered again, up to the group's `retryMaxTimes`; then it is moved to the group's dead-letter queue.

Each subscriber has a list of lite topics that may have messages (`Subscriber.ready`), so a pop never
searches. A lite topic is added to it when a message arrives, and when the last lease of a message ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cometmq import logs
from cometmq.broker.base.times import mono_ms
from cometmq.broker.lite.lite_queues import LiteQueues
from cometmq.broker.lite.subscriptions import LiteSubscriptions, Subscriber
from cometmq.broker.pop.leases import LeasedQueue, Pop, QueueKey
from cometmq.broker.pop.polls import FOUND, POLLING_TIMEOUT, CheckedPop, PollKey, PopServer
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.protocol.lite import all_with
from cometmq.store import CACHED, NotInMemory, Reads

log = logs.logger(__name__)

DEAD_LETTER_MS = 60_000
"""The time, in ms, after which a message whose copy was not stored is moved to the dead letters once more."""
AGAIN_S = 0.02
"""The time after which a lite topic is offered again that could not be read although no message is leased."""
FAILED_S = 1.0
"""The time after which a lite topic is offered again whose reading has failed."""
MAX_READY = 10_000
"""The maximum number of lite topics in `Subscriber.ready` of a client of a wildcard group."""
Unit = tuple[int, int]


class PoppedMessage(NamedTuple):
    """A record, its offset in the queue of the lite topic, and the number of earlier deliveries."""

    record: bytes
    offset: int
    deliveries: int


@dataclass(slots=True, eq=False, kw_only=True)
class LitePop(CheckedPop):
    """A checked pop from lite topics.

    Attributes:
        per_topic: The maximum number of messages from one lite topic.
        found: The messages found so far, in the order of the response.
    """

    client_id: str
    parent: str
    per_topic: int
    found: list[PoppedMessage] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)


@dataclass(eq=False)
class LitePops(PopServer[LitePop]):
    """Serves the pops from lite topics."""

    groups: SubscriptionGroups
    queues: LiteQueues
    subscriptions: LiteSubscriptions

    def __post_init__(self) -> None:
        super().__post_init__()
        self._searching: set[Subscriber] = set()

    # -- serving

    def serve(self, request: LitePop) -> None:
        """Read messages for a pop, and answer or park it."""
        if self._stopping:
            request.answer(request, POLLING_TIMEOUT)
            return
        request.found, request.queues = [], []
        request.pop_ms = self.clock.time_ms()
        subscriber = self.subscriptions.find(request.client_id, request.group)
        if subscriber is not None and not request.owner.closed:
            subscriber.seen_ms = mono_ms(self.clock)
            if self._throttled(request):
                return
            self._prepare(request, subscriber)
            self._go_on(request, subscriber)
        elif not request.owner.closed:
            self._wait(request)

    def _prepare(self, request: LitePop, subscriber: Subscriber) -> None:
        """Add to `ready` what a restored subscriber lacks, and the queues of a pop that is repeated."""
        if not subscriber.checked and not subscriber.ready:
            if subscriber.wildcard:
                if subscriber not in self._searching:
                    self._searching.add(subscriber)
                    self._tasks.start(self._search(subscriber))
            else:
                subscriber.checked = True
                self.add_ready(subscriber, list(subscriber.lmqs))
        attempt, lmqs = subscriber.attempt
        if request.attempt_id and attempt == request.attempt_id:
            subscriber.ready = dict.fromkeys(lmqs) | subscriber.ready

    def add_ready(self, subscriber: Subscriber, lmqs: Sequence[str]) -> None:
        """Add those lite topics to a client's `ready` that have messages for its group."""
        group = subscriber.group
        for lmq in lmqs:
            if lmq == all_with(lmq):
                subscriber.checked = False  # The next pop searches for them
            elif self.queues.end(lmq) > max(self.queues.query(group, lmq, 0), 0):
                subscriber.ready[lmq] = None
        if subscriber.ready or not subscriber.checked:
            self._wake(subscriber)

    async def _search(self, subscriber: Subscriber) -> None:
        """Add the next lite topics with unconsumed messages to `ready` of a client of a wildcard group."""
        group, parent, cursor = subscriber.group, subscriber.parent, subscriber.cursor
        try:
            self.queues.flush()
            found = await asyncio.to_thread(self.queues.behind, group, parent, cursor, MAX_READY)
            subscriber.ready.update(dict.fromkeys(found))
            if len(found) == MAX_READY:
                subscriber.cursor = found[-1]
            else:
                subscriber.cursor, subscriber.checked, subscriber.missed = "", not subscriber.missed, False
        except self.queues.errors as error:
            log.error(
                "lite topics of %s with messages for %s could not be searched: %s", parent, group, error
            )
            return
        finally:
            self._searching.discard(subscriber)
        if subscriber.ready:
            self._wake(subscriber)

    def _go_on(self, request: LitePop, subscriber: Subscriber) -> None:
        try:
            while subscriber.ready and len(request.found) < request.count:
                lmq = next(iter(subscriber.ready))
                del subscriber.ready[lmq]
                try:
                    self._take(request, lmq)
                except NotInMemory as miss:
                    if not request.found:
                        give_back = self._hold_tokens(request)
                        self._tasks.start(self._take_uncached(request, subscriber, lmq, miss, give_back))
                        return
                    subscriber.ready[lmq] = None
                    break
        except Exception as error:
            self._failed(request, lmq, error)
        else:
            self._finish(request, subscriber)

    def _take(self, request: LitePop, lmq: str) -> None:
        """Lease messages of a lite topic, if there are any. Raises NotInMemory."""
        queue = self._enter(request, lmq)
        if queue is not None:
            try:
                units = self._units(request, queue)
                self._lease(request, queue, units, self._records(units, CACHED))
            finally:
                self.leases.settle(queue)

    async def _take_uncached(
        self,
        request: LitePop,
        subscriber: Subscriber,
        lmq: str,
        miss: NotInMemory,
        give_back: Callable[[], None],
    ) -> None:
        """Read from a lite topic in a thread, and then go on with the pop. Other pops skip it meanwhile."""
        queue = self._enter(request, lmq)
        if queue is None:
            give_back()
        else:
            queue.busy = True
            request.owner.hold()
            try:
                units = self._units(request, queue)
                try:
                    records = await self.store.executor.query(lambda reads: self._records(units, reads), miss)
                finally:
                    give_back()
                queue.busy = False
                if not request.owner.closed:
                    self._lease(request, queue, units, records)
            except Exception as error:
                self._failed(request, lmq, error)
                return
            finally:
                queue.busy = False
                self.leases.settle(queue)
                request.owner.release()
            if request.owner.closed:
                self.freed(queue.key)
                return
        self._go_on(request, subscriber)

    def _enter(self, request: LitePop, lmq: str) -> LeasedQueue | None:
        """Return the state of a lite topic if it can be read now."""
        key: QueueKey = (request.group, lmq, 0)
        queue = self.leases.find(key)
        if queue is None:
            stored, end = self.queues.query(*key), self.queues.end(lmq)
            offset = min(max(stored, 0), end)
            if offset != stored and not self.queues.commit(*key, offset):
                return None
            if offset == end:
                return None
            queue = self.leases.enter(key, offset)
        # The pop time identifies a lease, so a message is not leased twice with the same one. The clock may
        # have been set back since the last pop.
        if not request.found:
            request.pop_ms = max(request.pop_ms, queue.pop_ms + 1)
        if request.pop_ms > queue.pop_ms and self.leases.may_pop(queue, True, request.attempt_id):
            return queue
        self.leases.settle(queue)
        if not queue.leases and not queue.busy:
            self._loop.call_later(AGAIN_S, self.freed, key)
        return None

    def _units(self, request: LitePop, queue: LeasedQueue) -> list[Unit]:
        at_most = min(request.per_topic, request.count - len(request.found))
        log_begin = self.store.log.readable_min
        units = self.queues.units(queue.key[1], queue.head, at_most + len(queue.acked), log_begin)
        return [unit for unit in units if unit[0] not in queue.acked][:at_most]

    def _records(self, units: Sequence[Unit], reads: Reads) -> list[bytes | None]:
        return [self.store.lookups.record_at(position, reads) for _, position in units]

    def _lease(
        self, request: LitePop, queue: LeasedQueue, units: Sequence[Unit], records: Sequence[bytes | None]
    ) -> None:
        group, lmq, _ = queue.key
        settings = self.groups.table.get(group)
        most = settings.retry_max_times if settings is not None else 0
        start, dead = queue.head, list[PoppedMessage]()
        taken = list[PoppedMessage]()
        for (offset, _), record in zip(units, records, strict=True):
            if record is not None:
                deliveries = queue.deliveries.get(offset, 0)
                (dead if deliveries > most else taken).append(PoppedMessage(record, offset, deliveries))
        if dead:
            taken = [each for each in taken if each.offset < dead[0].offset]
        chosen = taken or dead[:1]
        following = chosen[-1].offset + 1 if chosen else (units[-1][0] + 1 if units else self.queues.end(lmq))
        invisible_ms = request.invisible_ms if taken else DEAD_LETTER_MS
        pop = Pop(request.pop_ms, start, invisible_ms, True, request.attempt_id if taken else "")
        offsets = [each.offset for each in chosen]
        if not self.leases.lease(queue, offsets, following, pop, mono_ms(self.clock)):
            return
        if taken:
            request.found += taken
            request.queues.append(lmq)
        elif dead:
            self.expiry.arm()
            self._bury(queue.key, dead[0], request.pop_ms)
        else:
            self.freed(queue.key)  # Nothing was readable, but later messages may be

    def _bury(self, key: QueueKey, message: PoppedMessage, pop_ms: int) -> None:
        """Move a message to the dead letters. If that fails, its lease expires and it is tried again."""

        def done(ok: bool) -> None:
            if ok:
                self.ack(key, message.offset, pop_ms)

        self.retries.to_dead_letters(key[0], message.record, done)

    def _failed(self, request: LitePop, lmq: str, error: Exception) -> None:
        """Answer a pop after an error, with the messages that are already leased for it.

        The lite topic that could not be read is offered again after a while.
        """
        self._loop.call_later(FAILED_S, self.freed, (request.group, lmq, 0))
        if self._log_limit.allows():
            where = request.parent, request.group
            log.error("pop from lite topics of %s for group %s failed", *where, exc_info=error)
        self.expiry.arm()
        request.answer(request, FOUND if request.found else POLLING_TIMEOUT)

    def _finish(self, request: LitePop, subscriber: Subscriber) -> None:
        count = len(request.found)
        if not count:
            self._wait(request)
            return
        subscriber.attempt = (request.attempt_id, request.queues)
        self._count_leased(request, request.parent, count, (each.record for each in request.found))
        request.answer(request, FOUND)
        if subscriber.ready:
            self._wake(subscriber)

    # -- waking

    def freed(self, key: QueueKey) -> None:
        """Offer a lite topic to the group's clients again, because none of its messages is leased."""
        if self._stopping:
            return
        group, lmq, _ = key
        queue = self.leases.find(key)
        head = self.queues.query(*key) if queue is None else queue.head
        if self.queues.end(lmq) > head:
            self.available(lmq, group)

    def available(self, lmq: str, group: str | None = None) -> None:
        """Add a lite topic to `ready` of its subscribers in `group`, or in all groups; wake one per group."""
        woken: set[str] = set()
        for subscriber in self.subscriptions.of(lmq, group):
            queue = self.leases.find((subscriber.group, lmq, 0))
            if queue is not None and queue.leases:
                continue  # `freed` follows when the leases end
            if len(subscriber.ready) >= MAX_READY and subscriber.wildcard:
                subscriber.missed, subscriber.checked = True, False
                continue
            subscriber.ready[lmq] = None
            if subscriber.group not in woken and self._wake(subscriber):
                woken.add(subscriber.group)

    def _wake(self, subscriber: Subscriber) -> bool:
        """Wake a parked pop of a client. Return False if there is none."""
        woken = self.polls.wake_group(subscriber.group, subscriber.client_id, -1)
        self.wake(woken)
        return bool(woken)

    def _wait(self, request: LitePop) -> None:
        self._park(request, PollKey(request.group, request.client_id, -1), (request.client_id,))
