"""The rebalances of a member, in which it determines its share of the queues of the group's topics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from cometmq import logs
from cometmq.client.cluster.workers import call_hook, for_each
from cometmq.client.group.allocate import hashing, share_of
from cometmq.client.group.group import Group
from cometmq.errors import CometError, NoRouteError
from cometmq.message import MessageQueue
from cometmq.periodic import Periodic
from cometmq.protocol.codes import RETRY_PREFIX

_MAX_CONCURRENT_ASSIGNMENTS = 32
"""Maximum number of queues assigned concurrently. Each assignment takes one or two requests to a broker."""
_RETRY_TOPIC_PATIENCE = 10
"""Maximum number of rebalances at the short interval for a retry topic, which a broker may not create."""

log = logs.logger("cometmq.client.consumer.rebalance")

_UNBALANCED_INTERVAL_S = 1.0
"""Seconds between rebalances while a route, the members or an offset is missing, as in Java's 5.x."""


class Holder(Protocol):
    """The owner of the assigned queues, which rebalances assign and revoke."""

    @property
    def queues(self) -> Collection[MessageQueue]:
        """The assigned queues."""

    def expired(self, queue: MessageQueue) -> bool:
        """Return whether the answer to a pull was lost. The queue is then revoked and assigned again here."""

    async def claim(self, queues: Sequence[MessageQueue], *, alone: bool) -> Collection[MessageQueue]:
        """Return those of `queues`, this member's share, that it may consume now.

        A queue that another member still holds a lock on is left out, for example, and claimed by the next
        rebalance. `alone` tells whether the group has no other member.
        """

    async def assign(self, queue: MessageQueue) -> bool:
        """Start to consume a queue. Return False if that is not possible now, for example after a stop.

        Raises CometError if the start offset cannot be determined.
        """

    async def revoke(self, queues: Sequence[MessageQueue]) -> None:
        """Revoke assigned queues."""

    async def finish_rebalance(self) -> None:
        """Complete a rebalance after all its assignments."""


class Rebalance:
    """Runs the rebalances of one member of a group.

    `pulled_topics` returns the topics whose queues are divided among the members, by default all topics.
    """

    def __init__(
        self,
        group: Group,
        holder: Holder,
        pulled_topics: Callable[[], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        self._group = group
        self._holder = holder
        self._pulled_topics = pulled_topics
        self._strategy, space = group.options.allocate_strategy, group.instance.namespace
        if space.name:
            self._strategy = hashing(self._strategy, space.wrap_queue)
        self.problems: dict[str, str] = {}
        """By topic: the reason why the topic was not rebalanced or one of its queues was not assigned."""
        self._lock = asyncio.Lock()
        self._balanced = False
        self._periodic = Periodic(
            asyncio.get_running_loop(), self._interval_s, self.run, name=f"rebalance of group {group.name}"
        )
        self._unlisted: set[str] = set()
        """The topics whose broker did not list this member at the last rebalance."""
        self._retry_topic_misses = 0
        self._reported: dict[str, tuple[list[MessageQueue], list[MessageQueue]]] = {}
        """By topic: all queues and this member's share, as in the last call of the user's queue listener."""

    def start(self) -> None:
        self._periodic.start()
        # The first rebalance may have been too early: brokers may not have listed this member yet, or may not
        # have created the group's retry topic. Therefore rebalance a second time now.
        self._periodic.soon()

    def wake(self) -> None:
        """Rebalance now, because members or subscriptions have changed."""
        self._periodic.soon()

    async def stop(self) -> None:
        await self._periodic.stop(cancel=True)

    @property
    def lock(self) -> asyncio.Lock:
        """The lock that must be held to change the assigned queues outside a rebalance."""
        return self._lock

    def _interval_s(self) -> float:
        interval_s = self._group.options.rebalance_interval_s
        return interval_s if self._balanced else min(interval_s, _UNBALANCED_INTERVAL_S)

    async def run(self) -> None:
        """Rebalance once. Unless all topics and queues could be assigned, the next one follows soon."""
        async with self._lock:
            self._balanced = False
            group, holder = self._group, self._holder
            pulled = self._pulled_topics
            topics = list(group.subscriptions if pulled is None else await pulled())
            before = set(holder.queues)
            results = [await self._rebalance_topic(topic) for topic in topics]
            await holder.revoke([queue for queue in holder.queues if queue.topic not in topics])
            await holder.finish_rebalance()
            for table in (self.problems, self._reported):
                for topic in table.keys() - set(topics):
                    del table[topic]
            if before != set(holder.queues):
                log.info("group %s now holds %d queues", group.name, len(holder.queues))
            self._balanced = all(results)

    async def _rebalance_topic(self, topic: str) -> bool:
        group, holder = self._group, self._holder
        try:
            queues = sorted(await group.instance.read_queues(topic))
            if group.clustering:
                members = await group.instance.consumer_ids(topic, group.name)
                mine = share_of(self._strategy, group.instance.client_id, queues, members)
            else:
                members = []
                mine = queues
        except CometError as error:
            # Keep all assigned queues of the topic, because its queues or the group's members are unknown.
            return self._store_problem(topic, error)
        if group.clustering and group.instance.client_id not in members:
            self.problems[topic] = f"the broker does not list this client in group {group.name} yet"
            group.instance.heartbeat_soon()
            if topic not in self._unlisted:
                # After a restart or a lost connection, a broker lists this member again only after the next
                # heartbeat. Until then the queues stay assigned, because revoking and reassigning them would
                # repeat messages.
                self._unlisted.add(topic)
                return False
        else:
            self._unlisted.discard(topic)
        held = {queue for queue in holder.queues if queue.topic == topic}
        kept = {queue for queue in held.intersection(mine) if not holder.expired(queue)}
        # Revoke before assigning, because a client must never pull a queue twice at the same time.
        await holder.revoke(sorted(held - kept))
        new = sorted(set(mine) - kept)
        free = sorted(await holder.claim(new, alone=set(members) <= {group.instance.client_id}))
        all_assigned = all(await for_each(free, self._assign, _MAX_CONCURRENT_ASSIGNMENTS))
        self._report(topic, queues, mine)
        if topic in self._unlisted:
            return False
        if len(free) < len(new):
            missing = len(new) - len(free)
            self.problems[topic] = (
                f"no lock yet for {missing} queues: another member has them, or has just failed"
            )
            return False
        if all_assigned:
            self.problems.pop(topic, None)
        return all_assigned

    async def _assign(self, queue: MessageQueue) -> bool:
        try:
            return await self._holder.assign(queue)
        except CometError as error:
            self._store_problem(queue.topic, error)
            return False

    def _store_problem(self, topic: str, error: CometError) -> bool:
        """Store the problem of a topic for health(). Return whether the usual interval applies."""
        text = str(error)
        if isinstance(error, NoRouteError) and topic == RETRY_PREFIX + self._group.name:
            # A missing retry topic is no problem: the first heartbeat creates it, and until then it has no
            # messages.
            self.problems.pop(topic, None)
            self._retry_topic_misses += 1
            return self._retry_topic_misses > _RETRY_TOPIC_PATIENCE
        if self.problems.get(topic) != text:
            log.warning("group %s could not rebalance topic %s: %s", self._group.name, topic, text)
        self.problems[topic] = text
        return False

    def _report(self, topic: str, queues: list[MessageQueue], mine: list[MessageQueue]) -> None:
        """Notify the user's queue listener if a topic's queues or this member's share have changed."""
        listener = self._group.options.queue_listener
        if listener is None or self._reported.get(topic) == (queues, mine):
            return
        self._reported[topic] = queues, mine
        try:
            call_hook(listener, topic, tuple(queues), tuple(mine))
        except Exception:
            log.exception("the queue listener of group %s failed for %s", self._group.name, topic)
