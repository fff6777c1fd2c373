"""The rules of orderly consumption, without clock or socket (docs/reference/client.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from cometmq.client.group.process_queue import Batch, ProcessQueue
from cometmq.message import MessageExt, MessageQueue

LOCK_LIVE_S = 30.0
"""Validity of a lock in seconds, counted from the time of the request.

The broker keeps the lock for longer: 60 s from the time at which it handled the request. Client and broker
each use a clock that cannot be set and that continues while the machine is suspended.
"""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.01, 30.0


def suspension_s(wanted_s: object, usual_s: float) -> float:
    """Return the pause after a failure: `wanted_s`, if it is a number, or `usual_s`, from 0.01 to 30 s."""
    if not isinstance(wanted_s, int | float) or wanted_s != wanted_s:
        wanted_s = usual_s
    return min(max(wanted_s, _MIN_PAUSE_S), _MAX_PAUSE_S)


@dataclass(slots=True, eq=False)
class OrderlyQueue(ProcessQueue):
    """An assigned queue with at most one batch in progress.

    Its first batches are taken (delivered to the listener but not committed), the later batches are waiting.
    The offset to commit is the offset of the first batch, as in every process queue.
    """

    under_way: Batch | None = None
    """The batch that waits for the listener or is being consumed."""
    called: bool = False
    """Whether the listener has been called with the batch in progress."""
    _taken: int = 0

    @property
    def taken(self) -> tuple[int, int, int]:
        """The first offset, last offset and number of delivered, uncommitted messages; zeros for none."""
        batches = [self._batches[number] for number in range(self._taken)]
        if not batches:
            return 0, 0, 0
        last = batches[-1].messages[-1].queue_offset
        return batches[0].first_offset, last, sum(len(batch.messages) for batch in batches)

    def oldest_started_before(self, moment: float) -> Batch | None:
        """Return the batch in progress if its call began before `moment` (monotonic seconds)."""
        batch = self.under_way if self.called else None
        return batch if batch is not None and 0 < batch.started_at < moment else None

    def take(self) -> Batch | None:
        """Take the next batch. Return None if one is in progress, none waits, or the queue is revoked."""
        if self.dropped or self.leaving or self.under_way or self._taken == len(self._batches):
            return None
        self.under_way = self._batches[self._taken]
        self._taken += 1
        return self.under_way

    def begin(self) -> bool:
        """Record that the batch's listener call begins. Return False if the queue was revoked."""
        self.called = not (self.dropped or self.leaving)
        return self.called

    def put_back(self) -> None:
        """Move the batch in progress back to the front of the waiting batches, because it has no result."""
        self.called, self.under_way = False, None
        self._taken -= 1

    def commit(self) -> None:
        """Remove the committed batches: the batch in progress and all batches delivered before it."""
        self.mark_consumed()
        while self._taken:
            self.finish(self._batches[0])
            self._taken -= 1

    def mark_consumed(self) -> None:
        """Mark the batch in progress as consumed. The next commit removes it."""
        self.called, self.under_way = False, None

    def roll_back(self) -> None:
        """Return all delivered, uncommitted batches to the front of the waiting batches."""
        self.mark_consumed()
        self._taken = 0

    def count_failure(self, most: int) -> list[MessageExt]:
        """Count a failed attempt. Return the messages that had `most` retries: they are not tried again."""
        assert self.under_way is not None
        hopeless = []
        for message in self.under_way.messages:
            if message.reconsume_times >= most:
                hopeless.append(message)
            else:
                message.reconsume_times += 1
        return hopeless

    def remove_messages(self, messages: Collection[MessageExt]) -> bool:
        """Remove dead letters from the batch in progress. Return whether it still has other messages."""
        batch = self.under_way
        assert batch is not None
        offsets = {message.queue_offset for message in messages}
        kept = [message for message in batch.messages if message.queue_offset not in offsets]
        if kept:
            self.keep(batch, kept)
            return True
        self._batches.remove(batch)
        self._taken -= 1
        self.count -= len(batch.messages)
        self.body_bytes -= batch.size
        self.mark_consumed()
        return False


@dataclass(slots=True)
class LockTable:
    """The locks of queues that this member holds by its own table, with times of `boottime`."""

    _until: dict[MessageQueue, float] = field(default_factory=dict)

    @property
    def queues(self) -> tuple[MessageQueue, ...]:
        return tuple(self._until)

    def taken(self, queues: Iterable[MessageQueue], requested_at: float) -> None:
        """Record locks that a broker granted in answer to a request sent at `requested_at`."""
        self._until.update(dict.fromkeys(queues, requested_at + LOCK_LIVE_S))

    def renewed(
        self, asked: Collection[MessageQueue], got: Collection[MessageQueue], requested_at: float, now: float
    ) -> list[MessageQueue]:
        """Record a broker's answer to the renewal of locks.

        Return the queues whose locks were not renewed, or may have belonged to another member in the
        meantime. They are removed from the table.
        """
        lost = [queue for queue in asked if queue not in got or not self.holds(queue, now)]
        self.taken(asked, requested_at)
        self.forget(lost)
        return lost

    def expired(self, now: float) -> list[MessageQueue]:
        """Remove the locks whose last confirmation is too old, and return their queues."""
        over = [queue for queue in self._until if not self.holds(queue, now)]
        self.forget(over)
        return over

    def holds(self, queue: MessageQueue, now: float) -> bool:
        return now < self._until.get(queue, now)

    def last_confirmed(self, queue: MessageQueue) -> float | None:
        """Return the time of the request that acquired or renewed the lock."""
        until = self._until.get(queue)
        return None if until is None else until - LOCK_LIVE_S

    def forget(self, queues: Iterable[MessageQueue]) -> None:
        for queue in queues:
            self._until.pop(queue, None)
