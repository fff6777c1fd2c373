"""Receives the messages that a worker leases, renews their leases, and settles them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cometmq import logs
from cometmq.client.cluster.workers import for_each
from cometmq.client.group.options import MAX_MESSAGES
from cometmq.client.producer.retry import RETRY_RESPONSE_CODES
from cometmq.errors import BrokerError, CometError, Transient
from cometmq.integrations.session import PAUSE_S, RETRY_S, QueueConsumer, Session, Settlement
from cometmq.message import MessageExt, MessageQueue
from cometmq.periodic import Tasks

log = logs.logger(__name__)

MAX_UNSETTLED = 1000
"""The maximum number of leased messages of a channel without a prefetch count."""
_CLOSE_S = 5.0
"""The maximum time, in seconds, for which the close of a channel waits for its settlements."""
_AT_ONCE = 32
"""The maximum number of concurrent requests of one kind."""


@dataclass(slots=True, eq=False)
class Held:
    """A leased message of a queue that is not settled yet.

    Attributes:
        until: The end of the lease, in seconds on the event loop's clock.
        delivered: Whether the framework has received the message.
        failed: Whether the framework has raised an error instead of processing the message.
    """

    queue: str
    consumer: QueueConsumer
    message: MessageExt
    until: float
    delivered: bool = False
    failed: bool = False


Deliver = Callable[[str, str, MessageExt], None]
"""Called on the event loop with queue, delivery tag ("" for a broadcast message) and message."""


class Inbox:
    """The leased messages of a channel: at most as many as its prefetch count allows."""

    def __init__(self, session: Session, deliver: Deliver) -> None:
        self.limit = MAX_UNSETTLED
        self._session = session
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._consumers: dict[str, QueueConsumer] = {}
        self._held: dict[str, Held] = {}
        self._settled: list[tuple[Settlement, Held]] = []
        """Settlements whose requests are not sent yet."""
        self._sending = 0
        """The number of messages of the requests in progress."""
        self._flushes = 0
        """The number of flushes that have begun to send requests."""
        self._tags = itertools.count(1)
        self._turns = itertools.count()
        self._room, self._work = asyncio.Event(), asyncio.Event()
        self._turn = asyncio.Lock()
        """Serializes renewals and settlements: a renewal invalidates the handle that a settlement uses."""
        self._fetching, self._restarting = Tasks(), asyncio.Lock()
        self._readers: dict[str, Tasks] = {}
        self._keeper = self._loop.create_task(self._keep(), name="cometmq-leases")

    async def close(self) -> None:
        """Release all messages, and wait up to 5 s until all settlements are sent."""
        self._consumers.clear()
        for tasks in (self._fetching, *self._readers.values()):
            await tasks.finish(cancel=True)
        self.release()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while not await self.flush():  # noqa: ASYNC110 - it waits for brokers
                    await asyncio.sleep(RETRY_S)
        self._keeper.cancel()

    # -- receiving

    async def consume(self, queue: str) -> None:
        """Begin to receive the messages of a queue."""
        self._consumers[queue] = await self._session.consumer(queue)
        await self._restart()

    def read(
        self,
        queue: str,
        offsets: dict[MessageQueue, int],
        tag: str,
        has_room: Callable[[], bool],
    ) -> None:
        """Deliver the messages of a broadcast topic (see `Session.read`) as messages of a queue."""

        def accept(message: MessageExt) -> bool:
            if has_room():
                self._deliver(queue, "", message)
                return True
            return False

        for each in offsets:
            self._readers.setdefault(queue, Tasks()).start(self._session.read(each, offsets, tag, accept))

    async def cancel(self, queue: str) -> None:
        """Stop receiving messages of a queue, and release those that the framework has not received."""
        await self._readers.pop(queue, Tasks()).finish(cancel=True)
        if self._consumers.pop(queue, None) is not None:
            await self._restart()
        for tag in [tag for tag, held in self._held.items() if held.queue == queue and not held.delivered]:
            self.settle(tag, Settlement.RELEASE)

    async def get(self, queue: str) -> tuple[str, MessageExt] | None:
        """Return one message of a queue with its delivery tag, or None if the queue is empty."""
        consumer = await self._session.consumer(queue)
        for message in await consumer.receive(1, wait_s=0):
            tag = self._hold(queue, consumer, message)
            self._held[tag].delivered = True
            return tag, message
        return None

    def take(self, tag: str) -> bool:
        """Mark a message as delivered to the framework. Return False if it was released before."""
        held = self._held.get(tag)
        if held is None:
            return False
        held.delivered = True
        return True

    def fail(self, tag: str) -> None:
        """Count the next release of a message as a retry: whoever receives it may fail again, for ever."""
        held = self._held.get(tag)
        if held is not None:
            held.failed = True

    def set_limit(self, prefetch: int) -> None:
        """Set the maximum number of messages that are not settled. 0 means MAX_UNSETTLED."""
        self.limit = prefetch if prefetch > 0 else MAX_UNSETTLED
        self._room.set()

    async def _restart(self) -> None:
        async with self._restarting:
            await self._fetching.finish(cancel=True)
            if self._consumers:
                self._fetching.start(self._fetch(dict(self._consumers)), name="cometmq-fetch")

    async def _fetch(self, consumers: dict[str, QueueConsumer]) -> None:
        while True:
            try:
                await self._fetch_on(consumers)
            except Exception:
                log.exception("messages cannot be received; trying again")
                await asyncio.sleep(RETRY_S)

    async def _fetch_on(self, consumers: dict[str, QueueConsumer]) -> None:
        """Receive messages until an unexpected error is raised."""
        notified = False
        while True:
            unsettled = len(self._held) + len(self._settled) + self._sending
            count = min(self.limit - unsettled, MAX_MESSAGES)
            if count <= 0:
                self._room.clear()
                await self._room.wait()
            elif await self._receive(consumers, count):
                notified = False
            else:
                in_vain, notified = notified, await self._has_any(consumers.values())
                if in_vain:  # another member has received the messages
                    await asyncio.sleep(PAUSE_S)

    async def _receive(self, consumers: dict[str, QueueConsumer], count: int) -> bool:
        """Receive messages of the first queue that has some. Each call begins with another queue.

        Return False if all queues are empty. Requests do not wait: after a cancel they would lease messages.
        """
        names = list(consumers)
        first = next(self._turns) % len(names)
        for queue in names[first:] + names[:first]:
            try:
                found = await consumers[queue].receive(count, wait_s=0)
            except CometError as error:  # the consumer logs a warning itself
                log.debug("queue %s cannot be received from: %s", queue, error)
                continue
            if found:
                for message in found:
                    self._deliver(queue, self._hold(queue, consumers[queue], message), message)
                return True
        return False

    async def _has_any(self, consumers: Iterable[QueueConsumer]) -> bool:
        waits = [asyncio.ensure_future(each.wait()) for each in consumers]
        try:
            for done in asyncio.as_completed(waits):
                if await done:
                    return True
            return False
        finally:
            for each in waits:
                each.cancel()

    def _hold(self, queue: str, consumer: QueueConsumer, message: MessageExt) -> str:
        tag = str(next(self._tags))
        self._held[tag] = Held(queue, consumer, message, self._loop.time() + self._session.visibility_s)
        return tag

    # -- settling

    def settle(self, tag: str, how: Settlement) -> None:
        """Schedule the settlement of a message. A message that is already settled is ignored."""
        held = self._held.pop(tag, None)
        if held is not None:
            self._settled.append((how, held))
            self._work.set()

    def drop(self, tag: str) -> None:
        """Stop renewing the lease of a message. It is delivered again, as a retry, when the lease ends.

        If its queue is no longer consumed, close() releases the message earlier.
        """
        held = self._held.get(tag)
        if held is not None and held.queue in self._consumers:
            del self._held[tag]
            self._room.set()

    def release(self) -> None:
        """Schedule the release of all messages that are not settled."""
        for tag, held in list(self._held.items()):
            self.settle(tag, Settlement.REQUEUE if held.failed else Settlement.RELEASE)

    async def flush(self) -> bool:
        """Send the requests of all settlements so far. Return False if some must be sent again.

        Concurrent calls share one flush. Otherwise each would try a broker that cannot be reached, and
        renewals would wait for all of them.
        """
        flushes = self._flushes
        async with self._turn:
            if self._flushes != flushes:
                return not self._settled
            self._flushes += 1
            unsent, self._settled = dict.fromkeys(self._settled), []
            self._sending = len(unsent)

            async def send(part: tuple[Settlement, list[Held]]) -> None:
                how, some = part
                again = set(await self._send(how, some))
                for held in some:
                    if held not in again:
                        del unsent[how, held]
                self._sending = len(unsent)

            try:
                await for_each(_parts(unsent), send, _AT_ONCE)
            finally:
                self._sending = 0
                self._settled[:0] = unsent
                self._room.set()
            return not unsent

    async def _send(self, how: Settlement, some: Sequence[Held]) -> Sequence[Held]:
        """Settle messages. If this fails, return those for which the request may succeed later."""
        try:
            await some[0].consumer.settle(how, [held.message for held in some])
            return ()
        except Exception as error:
            problem = error
            if isinstance(error, CometError):
                busy = isinstance(error, BrokerError) and error.code in RETRY_RESPONSE_CODES
                may_succeed = busy or isinstance(error, Transient)
            else:
                log.exception("%s of messages of queue %s failed", how.value, some[0].queue)
                may_succeed = True
        again = [held for held in some if may_succeed and held.until > self._loop.time()]
        if len(again) < len(some):
            log.warning("%s of messages of queue %s failed: %s", how.value, some[0].queue, problem)
        return again

    async def _keep(self) -> None:
        """Settle messages and renew leases, until cancelled."""
        interval_s = self._session.visibility_s / 4
        renewal = self._loop.time() + interval_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(renewal):
                    await self._work.wait()
            self._work.clear()
            if not await self.flush():
                await asyncio.sleep(RETRY_S)
                self._work.set()
            if self._loop.time() >= renewal:
                async with self._turn:
                    await for_each(list(self._held.values()), self._renew, _AT_ONCE)
                renewal = self._loop.time() + interval_s

    async def _renew(self, held: Held) -> None:
        session_s, now = self._session.visibility_s, self._loop.time()
        if held.until - now > 0.6 * session_s:
            return
        try:
            await held.consumer.change_invisibility(held.message, session_s)
        except Exception as error:
            if not isinstance(error, CometError):
                log.exception("a lease of queue %s cannot be renewed", held.queue)
            if now >= held.until:
                log.warning("the lease of a message of queue %s has expired: %s", held.queue, error)
                held.until = float("inf")
        else:
            held.until = now + session_s


def _parts(settled: Iterable[tuple[Settlement, Held]]) -> list[tuple[Settlement, list[Held]]]:
    """Group settlements into requests, which fail or succeed one by one."""
    parts: dict[object, tuple[Settlement, list[Held]]] = {}
    for how, held in settled:
        shared = how in (Settlement.ACK, Settlement.RELEASE)
        key = (how, held.consumer, held.message.broker_name) if shared else held
        parts.setdefault(key, (how, []))[1].append(held)
    return list(parts.values())
