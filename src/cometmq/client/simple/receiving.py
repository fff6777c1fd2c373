"""The choice of the brokers from which a consumer receives leased messages.

A request leases messages from all queues of a topic at one broker. With several topics or brokers, each is
asked in turn without waiting. If none has messages, all are asked at the same time to notify this consumer of
a message. A notification leases nothing. Apache's clients instead wait at one broker while messages arrive at
others.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Mapping

from cometmq import logs
from cometmq.client.group.group import Group
from cometmq.client.group.subscription import Subscription
from cometmq.client.producer.selectors import SlowBrokers
from cometmq.client.simple.leases import Leases, Target
from cometmq.errors import ClientStateError, CometError
from cometmq.message import MessageExt
from cometmq.periodic import Tasks
from cometmq.text import printable

log = logs.logger("cometmq.client.consumer")

_PAUSE_S = 0.2
"""The pause, in seconds, before the brokers are asked again during the wait of one call."""
_NOTIFICATION_S = 5.0
"""How long, in seconds, a broker holds a request for a notification."""
_SLOW_S = 1.0
"""The latency, in seconds, from which a request that fails shows that its broker hangs."""
_SHORT_S = 0.1
"""The remaining wait, in seconds, that is not worth another request."""


class Receiver:
    """Receives messages from the brokers of a group's topics, which may change at any time.

    Attributes:
        problems: The error of the last request that failed, by topic and broker, until a request succeeds.

    Args:
        parks: Whether the only broker of the only topic may hold a request until it has messages. False: no
            request leases messages after its caller has been cancelled for longer than a round trip.
    """

    def __init__(
        self, group: Group, leases: Leases, subscriptions: Mapping[str, Subscription], *, parks: bool = True
    ) -> None:
        self._group = group
        self._leases = leases
        self._subscriptions = subscriptions
        self._parks = parks
        self._loop = asyncio.get_running_loop()
        self._turns = itertools.count()
        self._slow = SlowBrokers()
        """The brokers that did not answer in time. While there are others, they are not asked for a while."""
        self._lost_attempts: dict[tuple[str, str], str] = {}
        """The ids of attempts whose responses were lost, by topic and broker."""
        self._notifications: dict[Target, asyncio.Task[bool]] = {}
        self._nudged: asyncio.Future[bool] = self._loop.create_future()
        """A future whose result ends all waits for notifications."""
        self._tasks = Tasks()
        self._requests = Tasks()
        """Requests that lease messages or give them back."""
        self._closed = False
        self.problems: dict[tuple[str, str], str] = {}

    async def close(self) -> None:
        """Cancel all requests. Calls of receive() raise ClientStateError."""
        self._closed = True
        await self._tasks.finish(cancel=True)
        await self._requests.finish(cancel=True)

    async def drain(self) -> None:
        """Wait until the messages of calls that were cancelled have been given back."""
        while self._requests:
            await self._requests.finish()

    async def wait(self, wait_s: float) -> bool:
        """Return whether a broker has a message, or may have one, within `wait_s` seconds. Leases nothing.

        Raises ClientStateError without a subscription or after close(), NoRouteError if no topic has a route.
        """
        return await self._notified(await self._targets(), self._nudged, self._loop.time() + wait_s)

    def nudge(self) -> None:
        """Have all waiting calls ask the brokers now: they may have messages that they do not announce."""
        self._nudged.set_result(True)
        self._nudged = self._loop.create_future()

    async def receive(self, count: int, invisible_s: float, wait_s: float) -> list[MessageExt]:
        """Return 1 to `count` messages, or none if there were none within `wait_s` seconds.

        Raises ClientStateError without a subscription or after close(), or the last failure if all requests
        failed.
        """
        try:
            return await self._receive(count, invisible_s, wait_s)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and caller is not None and not caller.cancelling():
                raise self._stopped() from None  # close() has cancelled the request, not the caller
            raise

    async def _receive(self, count: int, invisible_s: float, wait_s: float) -> list[MessageExt]:
        end = self._loop.time() + wait_s
        notified = False
        while True:
            targets, nudged = await self._targets(), self._nudged
            alone = self._parks and len(targets) == 1
            failure: CometError | None = None
            reached = False
            avoided = self._slow.avoided(self._loop.time())
            for target in [each for each in targets if each.broker_name not in avoided] or targets:
                begun = self._loop.time()
                left_s = max(0.0, end - begun)
                try:
                    found = await self._lease(target, count, invisible_s, left_s if alone else 0.0)
                except CometError as error:
                    failure, now = error, self._loop.time()
                    self._slow.note(target.broker_name, now - begun, now, failed=now - begun > _SLOW_S)
                    self._failed(target, error)
                    continue
                reached = True
                self.problems.pop(_key(target), None)
                if found:
                    return found
            if failure is not None and not reached:
                raise failure
            in_vain, notified = notified, not alone and await self._notified(targets, nudged, end)
            left_s = end - self._loop.time()
            if left_s < _SHORT_S and not notified:
                return []
            if in_vain or not notified:  # another member was faster, or no broker held the request
                await asyncio.sleep(min(_PAUSE_S, max(left_s, 0.0)))

    async def _targets(self) -> list[Target]:
        """Return the brokers of all topics, each call beginning at another one.

        Topics without a route are omitted: the client instance requests their routes periodically. Raises
        NoRouteError if no topic has a route.
        """
        if self._closed:
            raise self._stopped()
        instance, subscriptions = self._group.instance, list(self._subscriptions.values())
        if not subscriptions:
            raise ClientStateError(f"the consumer of group {self._group.name} has no subscription")
        if not any(instance.routes.get(each.topic) for each in subscriptions):
            await instance.read_queues(subscriptions[-1].topic)
        targets = [
            Target(subscription, queue.broker_name)
            for subscription in subscriptions
            if (route := instance.routes.get(subscription.topic)) is not None
            for queue in route.one_of_each_broker()
        ]
        first = next(self._turns) % max(len(targets), 1)
        return targets[first:] + targets[:first]

    async def _lease(self, target: Target, count: int, invisible_s: float, wait_s: float) -> list[MessageExt]:
        """Lease messages at one broker. If the caller is cancelled, the messages are given back."""
        attempt_id = self._lost_attempts.pop(_key(target), None) or uuid.uuid4().hex
        work = self._leases.lease(target, count, invisible_s, wait_s, attempt_id)
        request = self._requests.start(work, name=f"cometmq-lease-{target.queue}")
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            request.add_done_callback(self._give_back)
            raise
        except CometError:
            self._lost_attempts[_key(target)] = attempt_id
            raise

    def _give_back(self, request: asyncio.Task[list[MessageExt]]) -> None:
        """Give the messages of a request back that nobody waits for."""
        if not self._closed and not request.cancelled() and request.exception() is None:
            self._requests.start(self._leases.give_back(request.result()))

    async def _notified(self, targets: list[Target], nudged: asyncio.Future[bool], end: float) -> bool:
        """Wait until a broker has, or by nudge() may have, a message, until `end` at the latest."""
        waits: set[asyncio.Future[bool]] = {nudged, *map(self._notification, targets)}
        while len(waits) > 1 and (left_s := end - self._loop.time()) > _SHORT_S:
            done, waits = await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if any(each.exception() is None and each.result() for each in done):
                return True
        return False

    def _notification(self, target: Target) -> asyncio.Task[bool]:
        """Return the request that waits for a message at a broker, and send it if there is none.

        Calls share the request, and it remains when a call ends: a broker holds at most one for each target,
        and notifies only one waiting client of a message.
        """
        request = self._notifications.get(target)
        if request is None:
            work = self._leases.wait(target, _NOTIFICATION_S)
            request = self._tasks.start(work, name=f"cometmq-notification-{target.queue}")
            self._notifications[target] = request
            request.add_done_callback(lambda done: self._notification_ended(target, done))
        return request

    def _notification_ended(self, target: Target, request: asyncio.Task[bool]) -> None:
        del self._notifications[target]
        if not request.cancelled():
            request.exception()  # retrieve the exception, because asyncio would log an unretrieved one

    def _stopped(self) -> ClientStateError:
        return ClientStateError(f"the consumer of group {self._group.name} was stopped")

    def _failed(self, target: Target, error: CometError) -> None:
        text = printable(str(error))
        if self.problems.get(_key(target)) != text:
            log.warning("group %s cannot receive from %s: %s", self._group.name, target.queue, text)
        self.problems[_key(target)] = text
        self._group.instance.refresh_soon(target.subscription.topic)


def _key(target: Target) -> tuple[str, str]:
    return target.subscription.topic, target.broker_name
