"""The leases of popped messages. This module does no I/O and reads no clock.

A message that a consumer group has popped is leased: it is invisible to the group's other members until it is
acknowledged (acked) or its lease expires. A lease belongs to a queue of one group (group, topic, queue id)
and to one offset. The group's stored consumer offset is the queue's floor: all messages before it are done.
Pops continue at the queue's head. Between floor and head, exactly the leased messages are not done. So after
a crash the group continues at the floor: messages may be delivered again, but none is lost.

What happens to an expired lease depends on the pop. A message of an ordinary pop is passed to the caller,
which stores a copy in the group's retry topic and then calls `end`; until then the floor cannot pass the
message. The messages of an ordered pop become visible in place: the queue yields nothing else until they are
acked or expired, and then goes back to the first message that was not acked.

If the stored consumer offset changes elsewhere (a reset by an administrator, the commit of a pulling member),
the queue's leases are dropped, and pops continue at the new offset.

Deadlines are times in ms of a monotonic clock, so steps of the wall clock have no effect on them. The pop
time of a lease is wall-clock time; it is part of the receipt handle and identifies the lease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

MAX_LEASES = 500_000
"""The maximum number of leases of a broker. They take about 300 bytes each.

A group may have at most as many leases as are still free: half of them if it is the only one. So no group
can take the leases of all others.
"""
MIN_LEASES_PER_GROUP = 64
"""The number of leases that a group may have in any case, so that not even many groups stop the others."""
MAX_LEASES_PER_QUEUE = 20_000
"""The maximum number of leases of one group in one queue. At the limit, pops skip the queue."""
MAX_ACKED_AHEAD = 20_000
"""The maximum number of acked messages at or after the head of one queue."""
MAX_QUEUES = 100_000
"""The maximum number of queues with leases or with other state beside the stored offset."""
_MIN_STALE = 1_024  # Number of outdated entries that the heap of deadlines may have in any case

QueueKey = tuple[str, str, int]
"""A queue of a consumer group: group, topic (the retry topic for retried messages) and queue id."""


class Offsets(Protocol):
    """The stored consumer offsets of all groups."""

    def query(self, group: str, topic: str, queue_id: int) -> int:
        """Return the stored offset, or -1."""

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Store an offset. Return False if the table has no room for it."""


class Pop(NamedTuple):
    """What the leases of one pop from one queue have in common.

    Attributes:
        pop_ms: The wall-clock time of the pop. It identifies the leases.
        start: The offset at which the pop began to read. Receipt handles contain it.
        invisible_ms: The requested duration of the leases.
        ordered: Whether the queue yields no other messages while one of these is leased.
        attempt_id: The id that a repeated request has in common with the first one, or "".
    """

    pop_ms: int
    start: int
    invisible_ms: int
    ordered: bool = False
    attempt_id: str = ""


class Lease(msgspec.Struct, eq=False, gc=False):
    """A leased message.

    The garbage collector ignores leases, so that many of them do not delay the event loop. The reference to
    the queue, which refers to the lease, is removed when the lease ends.

    Attributes:
        queue: The queue of the message; None once the lease has ended.
        offset: The message's queue offset.
        pop: The pop that has received the message.
        deadline_ms: When the lease expires.
        heap_ms: The deadline in the newest entry of this lease in the heap; 0 without an entry.
        counts: Whether the delivery counts towards the group's maximum number of retries, and of an ordered
            message, among its deliveries.
        moving: Whether the lease has expired and the caller is storing a copy of the message.
    """

    queue: LeasedQueue | None
    offset: int
    pop: Pop
    deadline_ms: int
    heap_ms: int = 0
    counts: bool = True
    moving: bool = False

    def __lt__(self, other: Lease) -> bool:  # The heap compares leases with equal deadlines
        return self.offset < other.offset


class LeasedQueue:
    """The leases of one queue of a group.

    Attributes:
        head: The offset at which the next pop begins to read.
        leases: The leases by offset, in ascending order, all of them before the head.
        acked: Offsets that are acked already, so that pops skip them: those at or after the head and, in a
            queue with ordered pops, those between floor and head.
        busy: Whether a pop is reading from the queue at present, so that other pops skip the queue.
        deliveries: For ordered pops, how often each message from the floor on has been delivered.
        pop_ms: The pop time of the last ordered pop. That of the next one must be later, because the pop time
            identifies a lease.
    """

    __slots__ = (
        "_ascending", "acked", "busy", "deliveries", "floor", "head", "key", "leases", "open", "pop_ms",
        "rewound",
    )  # fmt: skip

    def __init__(self, key: QueueKey, offset: int) -> None:
        self.key = key
        self.floor = self.head = offset
        self.leases: dict[int, Lease] = {}
        self._ascending: deque[int] = deque()  # Offsets of the leases and of some leases that have ended
        self.acked: set[int] = set()
        self.busy = False
        self.deliveries: dict[int, int] = {}
        self.pop_ms = 0
        self.open = 0  # Number of ordered leases that have not expired
        self.rewound = offset  # Offset before which all messages have been popped in this run of the broker

    def add(self, lease: Lease) -> None:
        self.leases[lease.offset] = lease
        self._ascending.append(lease.offset)

    def remove_all(self) -> int:
        """End all leases. Return their number."""
        count = len(self.leases)
        for lease in self.leases.values():
            lease.queue = None
        self.leases.clear()
        self._ascending.clear()
        self.open = 0
        return count

    def first_open(self) -> int:
        """Return the offset of the first message that is not done: leased, or not yet popped."""
        ascending, leases = self._ascending, self.leases
        while ascending and ascending[0] not in leases:
            ascending.popleft()
        return ascending[0] if ascending else self.head

    def ready(self, end: int) -> int:
        """Return the number of messages that are neither popped nor acked. `end` is the queue's end."""
        return max(0, end - self.head - sum(offset >= self.head for offset in self.acked))

    def skip_acked(self) -> None:
        """Move the head behind messages that are already acked."""
        while self.head in self.acked:
            self.head += 1

    @property
    def first_pop(self) -> Pop | None:
        """The pop of the first lease, or None without leases. An ordered pop has all leases of its queue."""
        return next(iter(self.leases.values())).pop if self.leases else None

    @property
    def ordered(self) -> bool:
        """Whether the present leases are those of an ordered pop."""
        pop = self.first_pop
        return pop is not None and pop.ordered

    @property
    def idle(self) -> bool:
        """Whether the queue has no state beside the stored offset, so that it can be forgotten."""
        return not (self.leases or self.acked or self.busy or self.deliveries)


class Leases:
    """All leases of a broker."""

    def __init__(self, offsets: Offsets, born_ms: int) -> None:
        """Create a table without leases.

        The floor of each queue is stored in `offsets`. `born_ms` is the wall-clock time of the start: handles
        with an earlier pop time are those of leases that a crash may have destroyed.
        """
        self._offsets = offsets
        self.born_ms = born_ms
        self._queues: dict[QueueKey, LeasedQueue] = {}
        self._heap: list[tuple[int, Lease]] = []
        self._count = 0
        self._by_group: dict[str, int] = {}  # The number of leases of each group that has any
        self.dirty = False
        """Whether leases have changed since this attribute was last set to False."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[LeasedQueue]:
        return iter(list(self._queues.values()))

    def clear(self) -> None:
        """Forget all leases. The stored offsets stay, so their messages will be delivered again."""
        for queue in list(self._queues.values()):
            self._drop(queue)
        self._heap.clear()

    def find(self, key: QueueKey) -> LeasedQueue | None:
        """Return the state of a queue, or None if the stored offset is all there is.

        If the stored offset has been changed elsewhere, the leases are dropped.
        """
        queue = self._queues.get(key)
        if queue is not None and queue.floor != self._offsets.query(*key):
            self._drop(queue)
            return None
        return queue

    def enter(self, key: QueueKey, offset: int) -> LeasedQueue:
        """Return the state of a queue for a pop. If there is none, create it with the stored `offset`.

        The caller must have stored that offset. If the pop leases nothing, it must call `settle`.
        """
        queue = self.find(key)
        if queue is None:
            queue = self._queues[key] = LeasedQueue(key, offset)
        return queue

    def has_room(self, group: str) -> bool:
        """Return whether a group may have more leases."""
        return self._by_group.get(group, 0) < max(MAX_LEASES - self._count, MIN_LEASES_PER_GROUP)

    def may_pop(self, queue: LeasedQueue, ordered: bool, attempt_id: str = "") -> bool:
        """Return whether a pop may read from a queue now.

        A repeated ordered pop, recognised by its attempt id, takes the messages of the first one back, so
        that it receives them once more.
        """
        if queue.busy or len(queue.leases) >= MAX_LEASES_PER_QUEUE or not self.has_room(queue.key[0]):
            return False
        if len(self._queues) > MAX_QUEUES and queue.idle:
            return False
        pop = queue.first_pop
        if pop is None or (not ordered and not pop.ordered):
            return True
        if ordered and pop.ordered and attempt_id and attempt_id == pop.attempt_id:
            for lease in queue.leases.values():
                lease.counts = False
            self._rewind(queue)
            return True
        return False

    def lease(
        self, queue: LeasedQueue, offsets: Iterable[int], following: int, pop: Pop, now_ms: int
    ) -> bool:
        """Lease messages that a pop has read, and move the queue's head.

        Return False if the stored offset was changed elsewhere during the read. Then nothing is leased, and
        the pop must not deliver the messages.

        Args:
            queue: The queue, for which `may_pop` has returned True.
            offsets: The offsets of the messages, ascending, from the head on. None is in `queue.acked`.
            following: The offset behind the last message that the pop has examined.
            pop: The pop.
            now_ms: The present time of the monotonic clock.
        """
        if self.find(queue.key) is not queue:
            return False
        self.dirty = True
        before, deadline_ms = queue.head, now_ms + pop.invisible_ms
        if pop.ordered:
            queue.pop_ms = pop.pop_ms
        for offset in offsets:
            self._add(Lease(queue, offset, pop, deadline_ms), queue)
            if pop.ordered:
                queue.deliveries[offset] = queue.deliveries.get(offset, 0) + 1
        queue.head = following
        queue.rewound = max(queue.rewound, following)
        queue.skip_acked()
        if queue.acked and not pop.ordered:  # An ordered pop may be rewound, and must skip them once more
            _discard(queue.acked, range(before, queue.head))
        self.settle(queue)
        return True

    def restore(
        self,
        key: QueueKey,
        head: int,
        pops: Iterable[tuple[int, Pop, int, bool]],
        acked: Iterable[int] = (),
        deliveries: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Create the state of a queue that an earlier run of the broker has saved.

        Args:
            key: The queue.
            head: The offset at which pops continue, unless the stored offset is greater.
            pops: The leases in ascending order of their offsets, none before the stored offset: offset, pop,
                deadline, and whether the delivery counts towards the maximum number of retries.
            acked: With ordered leases, the messages between the first lease and the head that are acked.
            deliveries: With ordered leases, how often each leased message was delivered.
        """
        queue = self._queues[key] = LeasedQueue(key, self._offsets.query(*key))
        queue.head = queue.rewound = max(head, queue.floor)
        queue.acked = {offset for offset in acked if offset > queue.floor}
        queue.deliveries.update(deliveries)
        for offset, pop, deadline_ms, counts in pops:
            if offset < queue.head:
                self._add(Lease(queue, offset, pop, deadline_ms, counts=counts), queue)
        self.settle(queue)

    # -- requests of consumers

    def ack(self, key: QueueKey, offset: int, pop_ms: int) -> bool:
        """Mark a message as done. `pop_ms` is the pop time in the receipt handle.

        Return False if the handle is not that of a present lease: the message was acked before, or its lease
        has expired.
        """
        queue = self.find(key)
        lease = None if queue is None else queue.leases.get(offset)
        if queue is None or lease is None:
            return self._ack_ahead(key, queue, offset, pop_ms)
        if lease.pop.pop_ms != pop_ms or lease.moving:
            return False
        if lease.pop.ordered and offset != queue.floor:
            queue.acked.add(offset)  # If the queue is rewound, pops must skip this message
        self.end(lease)
        return True

    def ack_run(self, key: QueueKey, offsets: Iterable[int], pop_ms: int) -> list[int]:
        """Mark messages of one pop as done. Return the offsets for which `ack` must decide."""
        queue = self.find(key)
        if queue is None or queue.ordered:
            return list(offsets)
        left, leases, before = list[int](), queue.leases, len(queue.leases)
        for offset in offsets:
            lease = leases.get(offset)
            if lease is None or lease.pop.pop_ms != pop_ms or lease.moving:
                left.append(offset)
            else:
                lease.queue = None
                del leases[offset]
        if len(leases) < before:
            self.dirty = True
            self._ended(queue, before - len(leases))
            self.settle(queue)
        return left

    def _ack_ahead(self, key: QueueKey, queue: LeasedQueue | None, offset: int, pop_ms: int) -> bool:
        """Mark a message at or after the head as done.

        This is possible if the message has been popped before: by an ordered pop whose leases have expired,
        or in an earlier run of the broker.
        """
        stored = self._offsets.query(*key)
        head = stored if queue is None else queue.head
        popped = pop_ms < self.born_ms or (queue is not None and offset < queue.rewound)
        if not popped or stored < 0 or offset < head:
            return False
        queue = self.enter(key, stored)
        if len(queue.acked) >= MAX_ACKED_AHEAD or offset in queue.acked:
            return False
        queue.acked.add(offset)
        if not queue.busy:
            queue.skip_acked()
        self.settle(queue)
        return True

    def renew(
        self, key: QueueKey, offset: int, pop_ms: int, now_ms: int, invisible_ms: int, counts: bool = True
    ) -> bool:
        """Let a lease expire `invisible_ms` from now. Its handle stays the same.

        With `counts=False`, the delivery does not count as one of the group's retries. Return False if the
        handle is not that of a present lease.
        """
        queue = self.find(key)
        lease = None if queue is None else queue.leases.get(offset)
        if queue is None or lease is None or lease.pop.pop_ms != pop_ms or lease.moving:
            return False
        if lease.pop.ordered and not lease.heap_ms:
            queue.open += 1  # The lease had expired, but another one has kept the queue blocked
        self.dirty = True
        lease.counts = counts
        lease.deadline_ms = now_ms + invisible_ms
        self._schedule(lease)
        return True

    # -- expiry

    def next_deadline_ms(self) -> int | None:
        """Return the time at which `expired` must be called next, or None without leases."""
        return self._heap[0][0] if self._heap else None

    def expired(self, now_ms: int, at_most: int) -> tuple[list[Lease], list[QueueKey]]:
        """Return up to `at_most` leases whose deadline has passed, and queues that have become visible.

        The messages of the leases must be copied to the retry topic: `end` or `postpone` must follow. The
        queues are those of ordered pops.
        """
        found, freed, heap = list[Lease](), list[QueueKey](), self._heap
        while heap and heap[0][0] <= now_ms and len(found) + len(freed) < at_most:
            heap_ms, lease = heappop(heap)
            queue = lease.queue
            if queue is None or heap_ms != lease.heap_ms:
                continue  # The lease has ended, or has a newer entry
            lease.heap_ms = 0
            if lease.deadline_ms > now_ms:
                self._schedule(lease)
            elif self.find(queue.key) is not queue:
                continue
            elif not lease.pop.ordered:
                lease.moving = True
                found.append(lease)
            else:
                queue.open -= 1
                if not queue.open:
                    self._rewind(queue)
                    freed.append(queue.key)
        return found, freed

    def end(self, lease: Lease) -> None:
        """End a lease: its message was acked, or a copy of it is stored. Does nothing if it has ended."""
        queue = lease.queue
        if queue is None or self.find(queue.key) is not queue:
            return
        self.dirty = True
        lease.queue = None
        del queue.leases[lease.offset]
        self._ended(queue, 1)
        if lease.pop.ordered:
            queue.deliveries.pop(lease.offset, None)
            queue.open -= bool(lease.heap_ms)
            if queue.leases and not queue.open:
                self._rewind(queue)
        self.settle(queue)

    def postpone(self, lease: Lease, until_ms: int) -> None:
        """Let an expired lease expire once more at `until_ms`, because no copy could be stored."""
        if lease.queue is not None:
            lease.moving = False
            lease.deadline_ms = until_ms
            self._schedule(lease)

    # -- internal

    def _rewind(self, queue: LeasedQueue) -> None:
        """Make the messages of an ordered pop visible in place: go back to the first that was not acked.

        A delivery that does not count is not counted among the message's deliveries.
        """
        for lease in queue.leases.values():
            queue.deliveries[lease.offset] -= not lease.counts
        first = queue.first_open()
        self._ended(queue, queue.remove_all())
        queue.head = first
        queue.acked = {offset for offset in queue.acked if offset >= first}
        if len(queue.acked) > MAX_ACKED_AHEAD:
            queue.acked.clear()  # Deliver them again rather than let one message fill the memory

    def settle(self, queue: LeasedQueue) -> None:
        """Store the queue's floor, and forget the queue if it has no other state.

        Nothing happens if the queue was dropped, because the stored offset was changed elsewhere.
        """
        if self._queues.get(queue.key) is not queue:
            return
        floor = queue.first_open()
        if floor != queue.floor:
            done = range(queue.floor, floor)
            queue.floor = floor
            self._offsets.commit(*queue.key, floor)
            _discard(queue.acked, done)
            for offset in [each for each in queue.deliveries if each < floor]:
                del queue.deliveries[offset]
        if queue.idle:
            del self._queues[queue.key]

    def _drop(self, queue: LeasedQueue) -> None:
        self.dirty = True
        self._ended(queue, queue.remove_all())
        del self._queues[queue.key]

    def _add(self, lease: Lease, queue: LeasedQueue) -> None:
        group = queue.key[0]
        queue.add(lease)
        if lease.pop.ordered:
            queue.open += 1
            queue.pop_ms = lease.pop.pop_ms
        self._count += 1
        self._by_group[group] = self._by_group.get(group, 0) + 1
        self._schedule(lease)

    def _ended(self, queue: LeasedQueue, count: int) -> None:
        """Record that `count` leases of a queue have ended."""
        group = queue.key[0]
        self._count -= count
        left = self._by_group[group] = self._by_group.get(group, 0) - count
        if not left:
            del self._by_group[group]

    def _schedule(self, lease: Lease) -> None:
        """Enter a lease in the heap, unless it has an entry with an earlier time, which will do."""
        if lease.heap_ms and lease.heap_ms <= lease.deadline_ms:
            return
        lease.heap_ms = max(lease.deadline_ms, 1)
        heappush(self._heap, (lease.heap_ms, lease))
        if len(self._heap) > 2 * self._count + _MIN_STALE:
            self._heap = [
                entry for entry in self._heap if entry[1].queue is not None and entry[0] == entry[1].heap_ms
            ]
            heapify(self._heap)


def _discard(offsets: set[int], done: range) -> None:
    """Remove the offsets of a range from a set, at the cost of the smaller of both."""
    small = [each for each in offsets if each in done] if len(offsets) < len(done) else done
    offsets.difference_update(small)
