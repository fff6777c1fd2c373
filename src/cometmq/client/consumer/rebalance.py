"""Rounds in which a member finds out which queues of its group's topics are its own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from cometmq import logs
from cometmq.client.cluster.workers import call_hook, for_each
from cometmq.client.group.allocate import hashing, share_of
from cometmq.client.group.group import Group
from cometmq.errors import CometError, NoRouteError
from cometmq.message import MessageQueue
from cometmq.periodic import Periodic
from cometmq.protocol.codes import RETRY_PREFIX

__all__ = ["Holder", "Rebalance"]

_TAKEN_UP_AT_ONCE = 32
"""A member may hold thousands of queues, and each needs a question or two to its broker."""
_RETRY_TOPIC_PATIENCE = 10
"""Quick rounds that wait for the retry topic; a broker may be forbidden to create it."""

log = logs.logger("cometmq.client.consumer.rebalance")

_UNBALANCED_INTERVAL_S = 1.0
"""Between rounds while something is missing (a route, the member list, a start offset); 5.x does the same."""


class Holder(Protocol):
    """What takes queues up and gives them up as the rounds say."""

    @property
    def queues(self) -> Collection[MessageQueue]:
        """Those held now."""

    def expired(self, queue: MessageQueue) -> bool:
        """Whether a queue that is held has to be given up and taken up anew."""

    async def claim(self, queues: Sequence[MessageQueue], *, alone: bool) -> Collection[MessageQueue]:
        """Of queues that are ours by the members' shares: those that may be taken up now. alone: the group
        has no other member."""

    async def take_up(self, queue: MessageQueue) -> bool:
        """Whether the queue is held now. Raises CometError with what keeps it from that."""

    async def release(self, queues: Sequence[MessageQueue]) -> None:
        """Give up queues that are held."""

    async def settle(self) -> None:
        """A round has ended."""


class Rebalance:
    """The rounds of one member of a group."""

    def __init__(self, group: Group, holder: Holder) -> None:
        self._group = group
        self._holder = holder
        self._strategy, space = group.options.allocate_strategy, group.instance.namespace
        if space.name:
            self._strategy = hashing(self._strategy, space.wrap_queue)
        self.problems: dict[str, str] = {}
        """topic -> why its queues could not be shared out."""
        self._round = asyncio.Lock()
        self._balanced = False
        self._rounds = Periodic(
            asyncio.get_running_loop(), self._interval_s, self.run, name=f"rebalance of group {group.name}"
        )
        self._unlisted: set[str] = set()
        """Topics whose broker did not know us in the last round."""
        self._retry_topic_misses = 0
        self._told: dict[str, tuple[list[MessageQueue], list[MessageQueue]]] = {}
        """topic -> all queues and ours, as the queue listener knows them."""

    def start(self) -> None:
        self._rounds.start()
        self._rounds.soon()  # by now brokers may know us, and the retry topic

    def wake(self) -> None:
        """Rebalance now: members or subscriptions changed."""
        self._rounds.soon()

    def cancel(self) -> None:
        self._rounds.cancel()

    async def stop(self) -> None:
        await self._rounds.stop()

    @property
    def between_rounds(self) -> asyncio.Lock:
        """To be held by whoever changes what is held beside the rounds."""
        return self._round

    def _interval_s(self) -> float:
        interval_s = self._group.options.rebalance_interval_s
        return interval_s if self._balanced else min(interval_s, _UNBALANCED_INTERVAL_S)

    async def run(self) -> None:
        """One round. The next comes soon unless every topic is shared out and every queue of ours is held."""
        async with self._round:
            self._balanced = False
            group, holder = self._group, self._holder
            topics = list(group.subscriptions)
            before = set(holder.queues)
            results = [await self._rebalance_topic(topic) for topic in topics]
            await holder.release([queue for queue in holder.queues if queue.topic not in group.subscriptions])
            await holder.settle()
            for table in (self.problems, self._told):
                for topic in table.keys() - set(topics):
                    del table[topic]
            if before != set(holder.queues):
                log.info("group %s holds %d queues", group.name, len(holder.queues))
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
            # Nothing is known that would justify giving up what we hold.
            return self._note_problem(topic, error)
        if group.clustering and group.instance.client_id not in members:
            self.problems[topic] = f"the broker does not list this client in group {group.name} yet"
            group.instance.heartbeat_soon()
            if topic not in self._unlisted:
                # A broker that was restarted, or whose connection was lost, knows us again after the next
                # heartbeat. Until then we keep what we hold: giving it up and taking it up anew would repeat
                # messages.
                self._unlisted.add(topic)
                return False
        else:
            self._unlisted.discard(topic)
        held = {queue for queue in holder.queues if queue.topic == topic}
        kept = {queue for queue in held.intersection(mine) if not holder.expired(queue)}
        # First those that go: a queue is never pulled twice by one client.
        await holder.release(sorted(held - kept))
        new = sorted(set(mine) - kept)
        free = sorted(await holder.claim(new, alone=set(members) <= {group.instance.client_id}))
        taken_up = all(await for_each(free, self._take_up, _TAKEN_UP_AT_ONCE))
        self._tell(topic, queues, mine)
        if topic in self._unlisted:
            return False
        if len(free) < len(new):
            missing = len(new) - len(free)
            self.problems[topic] = (
                f"no lock yet for {missing} queues: another member has them, or died just now"
            )
            return False
        if taken_up:
            self.problems.pop(topic, None)
        return taken_up

    async def _take_up(self, queue: MessageQueue) -> bool:
        try:
            return await self._holder.take_up(queue)
        except CometError as error:
            self._note_problem(queue.topic, error)
            return False

    def _note_problem(self, topic: str, error: CometError) -> bool:
        """Keep it for health(); True if it is none that has to be looked after soon."""
        text = str(error)
        if isinstance(error, NoRouteError) and topic == RETRY_PREFIX + self._group.name:
            # The first heartbeat creates it; until then there is nothing to retry either.
            self.problems.pop(topic, None)
            self._retry_topic_misses += 1
            return self._retry_topic_misses > _RETRY_TOPIC_PATIENCE
        if self.problems.get(topic) != text:
            log.warning("group %s cannot share out %s: %s", self._group.name, topic, text)
        self.problems[topic] = text
        return False

    def _tell(self, topic: str, queues: list[MessageQueue], mine: list[MessageQueue]) -> None:
        """Let the user's listener know what has changed."""
        listener = self._group.options.queue_listener
        if listener is None or self._told.get(topic) == (queues, mine):
            return
        self._told[topic] = queues, mine
        try:
            call_hook(listener, topic, tuple(queues), tuple(mine))
        except Exception:
            log.exception("the queue listener of group %s failed for %s", self._group.name, topic)
