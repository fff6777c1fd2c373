"""The base of the consume modes: everything that differs between concurrent and orderly consumption."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Generic, Protocol, TypeVar

from cometmq.client.consumer.retry_topic import RetryTopic
from cometmq.client.group.group import ConsumerGroup
from cometmq.client.group.process_queue import Batch, ProcessQueue
from cometmq.message import MessageQueue
from cometmq.periodic import Tasks

C = TypeVar("C")
S = TypeVar("S", bound=Enum)


class ModeUser(Protocol):
    """The methods of a consumer that its consume mode calls."""

    @property
    def concurrency(self) -> int:
        """The maximum number of concurrent listener calls."""

    def made_room(self, queue: ProcessQueue) -> None:
        """Continue to pull a queue, from which messages were removed, if its flow limits permit a pull."""

    def consume(self, batches: list[Batch]) -> None:
        """Call the listener with batches, in their order."""

    def lost(self, queues: Collection[MessageQueue]) -> None:
        """Drop queues that another member may already consume."""


class ConsumeMode(Generic[C, S]):
    """The base of a consume mode. C: the context of a listener call, S: the results of listeners."""

    success: S
    """The listener result for consumed messages."""
    later: S
    """The result that is assumed if the listener raises an exception."""
    handled: Collection[S]
    """The listener results after which messages count as consumed."""
    repeats = False
    """Whether the consume mode delivers a batch again by itself if the acknowledgement of the batch fails."""

    def __init__(self, group: ConsumerGroup, user: ModeUser) -> None:
        self._group = group
        self._user = user
        self.retry_topic = RetryTopic(group.instance, group.name, group.options.most_reconsume_times)
        self._pauses = Tasks()

    # -- batches

    def submit(self, batches: list[Batch]) -> None:
        """Pass pulled batches on to the listener, in the order that the mode requires."""

    def begin(self, batch: Batch) -> C | None:
        """Return the context for the listener call that consumes `batch`, None if the call must not start."""

    async def acknowledge(self, batch: Batch, status: S, context: C) -> None:
        """Commit the messages of a batch, or have them consumed again, according to the listener's result."""

    def acknowledge_soon(self, batch: Batch, status: S, context: C) -> bool:  # noqa: ARG002
        """Acknowledge a batch without a wait for the result. Return False if `acknowledge` must be called.

        If the broker does not accept it, this is only logged.
        """
        return False

    def postpone(self, context: C, delay_level: int) -> S:
        """Return the listener result that requests another delivery. Raises ConfigError for a bad level."""
        raise NotImplementedError

    async def handle_overdue(self, queues: Iterable[ProcessQueue], timeout_s: float) -> None:
        """Log listener calls that take longer than `timeout_s`. Send back their messages if possible."""

    # -- queues

    async def pulled_topics(self) -> Collection[str]:
        """Return the topics whose queues are divided among the members. Called before each rebalance."""
        return self._group.subscriptions

    def start(self) -> None:
        """Start to renew the locks of queues. A consume mode without locks does nothing."""

    async def claim(self, queues: Sequence[MessageQueue], *, alone: bool) -> Collection[MessageQueue]:
        """Return those of `queues` that this member may consume now, see `Holder.claim`."""
        raise NotImplementedError

    def new_queue(self, queue: MessageQueue, offset: int, now: float) -> ProcessQueue | None:
        """Return the process queue for an assigned queue, None if the queue may no longer be pulled."""
        return ProcessQueue(queue, offset, now)

    def drop(self, queue: ProcessQueue) -> None:
        """Ignore the results of a queue's batches from now on."""
        queue.dropped = True

    async def revoke(self, queues: Sequence[ProcessQueue]) -> None:
        """Stop consuming revoked queues, store their offsets, and release their locks if there are any."""

    async def finish_rebalance(self, held: Collection[MessageQueue]) -> None:
        """Complete a rebalance. `held` contains the queues that are assigned to this member now."""

    def locked_at(self, queue: MessageQueue) -> float | None:
        """Return the time (`boottime`) at which the broker last confirmed the queue's lock.

        None if this member does not hold the lock, and in a mode whose locks are not reported.
        """

    def holds(self, queue: MessageQueue) -> bool:
        """Return whether the queue is locked for this member."""
        return self.locked_at(queue) is not None

    def drop_expired(self) -> None:
        """Drop the queues whose lock has expired."""

    def wake(self) -> None:
        """Renew locks soon, because brokers may have lost them."""

    async def close(self) -> None:
        """Release all queues and locks."""
