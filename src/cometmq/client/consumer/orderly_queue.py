"""What decides when a queue is consumed in order: which batch is next, what a listener's answer changes, and
how long a lock may be believed. Neither clock nor sockets (docs/reference/client.md, Orderly consumption)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from cometmq.client.group.process_queue import Batch, ProcessQueue
from cometmq.message import MessageExt, MessageQueue

__all__ = ["LOCK_LIVE_S", "LockTable", "OrderlyQueue", "suspension_s"]

LOCK_LIVE_S = 30.0
"""How long a lock is believed, from the moment it was asked for. Brokers keep one for 60 s, from a later
moment. Both count sleep, by clocks that nobody sets."""
_SHORTEST_S, _LONGEST_S = 0.01, 30.0


def suspension_s(wanted_s: object, usual_s: float) -> float:
    """How long a queue rests after a failure: what is wanted, within 10 ms and 30 s; usual_s for what is no
    number, None above all."""
    if not isinstance(wanted_s, int | float) or wanted_s != wanted_s:
        wanted_s = usual_s
    return min(max(wanted_s, _SHORTEST_S), _LONGEST_S)


@dataclass(slots=True, eq=False)
class OrderlyQueue(ProcessQueue):
    """A held queue of which one batch at a time is under way.

    Its first batches are taken (given to the listener, not committed yet), the others wait. So the offset to
    commit is that of the first batch, as in every process queue.
    """

    under_way: Batch | None = None
    """In line for the listener, or with it."""
    called: bool = False
    """The listener has the batch that is under way."""
    _taken: int = 0

    @property
    def taken(self) -> tuple[int, int, int]:
        """(first offset, last offset, messages) of what was taken and is not committed, 0 without any."""
        batches = [self._batches[number] for number in range(self._taken)]
        if not batches:
            return 0, 0, 0
        last = batches[-1].messages[-1].queue_offset
        return batches[0].first_offset, last, sum(len(batch.messages) for batch in batches)

    def oldest_started_before(self, moment: float) -> Batch | None:
        """Return the batch under way, if its call began before `moment` (monotonic seconds)."""
        batch = self.under_way if self.called else None
        return batch if batch is not None and 0 < batch.started_at < moment else None

    def take(self) -> Batch | None:
        """The next batch, None while another is under way, when none waits, or when the queue is given up."""
        if self.dropped or self.leaving or self.under_way or self._taken == len(self._batches):
            return None
        self.under_way = self._batches[self._taken]
        self._taken += 1
        return self.under_way

    def begin(self) -> bool:
        """The listener's turn has come; False if the queue was given up meanwhile."""
        self.called = not (self.dropped or self.leaving)
        return self.called

    def put_back(self) -> None:
        """The batch under way comes first again, without an answer."""
        self.called, self.under_way = False, None
        self._taken -= 1

    def commit(self) -> None:
        """The batch under way is done, and so is all that was taken before."""
        self.go_on()
        while self._taken:
            self.finish(self._batches[0])
            self._taken -= 1

    def go_on(self) -> None:
        """The batch under way was handled and waits for a commit."""
        self.called, self.under_way = False, None

    def roll_back(self) -> None:
        """All that was taken and not committed comes again, the oldest first."""
        self.go_on()
        self._taken = 0

    def count_failure(self, most: int) -> list[MessageExt]:
        """Note one more try of the batch under way, and return those of its messages that had `most` before:
        they get no other."""
        assert self.under_way is not None
        hopeless = []
        for message in self.under_way.messages:
            if message.reconsume_times >= most:
                hopeless.append(message)
            else:
                message.reconsume_times += 1
        return hopeless

    def take_out(self, messages: Collection[MessageExt]) -> bool:
        """These messages of the batch under way went to the dead letters; whether others are left of it."""
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
        self.go_on()
        return False


@dataclass(slots=True)
class LockTable:
    """The locks that this member has, as far as it may know. Times are those of `boottime`."""

    _until: dict[MessageQueue, float] = field(default_factory=dict)

    @property
    def queues(self) -> tuple[MessageQueue, ...]:
        return tuple(self._until)

    def taken(self, queues: Iterable[MessageQueue], asked_at: float) -> None:
        """The broker answered a request of `asked_at` that these are ours."""
        self._until.update(dict.fromkeys(queues, asked_at + LOCK_LIVE_S))

    def renewed(
        self, asked: Collection[MessageQueue], got: Collection[MessageQueue], asked_at: float, now: float
    ) -> list[MessageQueue]:
        """The answer to a renewal; those that are somebody else's now, or may have been since the last one.
        They are forgotten."""
        lost = [queue for queue in asked if queue not in got or not self.holds(queue, now)]
        self.taken(asked, asked_at)
        self.forget(lost)
        return lost

    def expired(self, now: float) -> list[MessageQueue]:
        """Those that nobody has confirmed for too long, which are forgotten."""
        over = [queue for queue in self._until if not self.holds(queue, now)]
        self.forget(over)
        return over

    def holds(self, queue: MessageQueue, now: float) -> bool:
        return now < self._until.get(queue, now)

    def last_confirmed(self, queue: MessageQueue) -> float | None:
        """When the request was sent that got or renewed the lock."""
        until = self._until.get(queue)
        return None if until is None else until - LOCK_LIVE_S

    def forget(self, queues: Iterable[MessageQueue]) -> None:
        for queue in queues:
            self._until.pop(queue, None)
