"""Leases of popped messages: random operations against a naive model, and single rules."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from cometmq.broker.pop import leases as module
from cometmq.broker.pop.leases import Leases, Pop
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets

KEY = ("G", "Orders", 0)
BORN_MS = 1_000_000


@dataclass
class Message:
    """A message of the model. It is `done` if it was acked, or if a copy was stored after its expiry."""

    done: bool = False
    pop_ms: int = 0
    deadline_ms: int = -1  # -1: visible
    deliveries: int = 0


@dataclass
class World:
    """The leases of one queue, and a model of it. Handles are pairs of offset and pop time."""

    rng: random.Random
    ordered: bool
    now_ms: int = 5_000
    wall_ms: int = BORN_MS
    messages: list[Message] = field(default_factory=list)
    handles: list[tuple[int, int]] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.offsets = ConsumerOffsets()
        self.offsets.commit(*KEY, 0)
        self.born_ms = self.wall_ms
        self.leases = Leases(self.offsets, self.born_ms)

    def visible(self) -> list[int]:
        """Return the offsets that a pop may deliver, in the order in which it must."""
        if self.ordered and any(not m.done and m.deadline_ms > self.now_ms for m in self.messages):
            return []
        return [
            offset
            for offset, m in enumerate(self.messages)
            if not m.done and (m.deadline_ms == -1 or (self.ordered and m.deadline_ms <= self.now_ms))
        ]

    def pop(self) -> None:
        self.expire()
        most, wanted = self.rng.randint(1, 4), self.visible()
        queue = self.leases.enter(KEY, self.offsets.query(*KEY))
        if not self.leases.may_pop(queue, self.ordered):
            assert not wanted
            return
        end = len(self.messages)
        found = [offset for offset in range(queue.head, end) if offset not in queue.acked][:most]
        assert found == wanted[:most]
        if not found:
            self.leases.settle(queue)
            return
        invisible_ms = self.rng.choice([1, 50, 500, 5_000])
        self.wall_ms = max(self.wall_ms, queue.pop_ms + 1)
        pop = Pop(self.wall_ms, queue.head, invisible_ms, self.ordered)
        assert self.leases.lease(queue, found, found[-1] + 1, pop, self.now_ms)
        for offset in found:
            message = self.messages[offset]
            message.pop_ms, message.deadline_ms = pop.pop_ms, self.now_ms + invisible_ms
            message.deliveries += 1
            self.handles.append((offset, pop.pop_ms))
            if self.ordered:
                assert queue.deliveries[offset] == message.deliveries

    def ack(self) -> None:
        self.expire()
        if self.handles:
            self._ack(*self.rng.choice(self.handles))

    def _ack(self, offset: int, pop_ms: int) -> None:
        message = self.messages[offset]
        leased = not message.done and message.pop_ms == pop_ms and message.deadline_ms != -1
        if self.leases.ack(KEY, offset, pop_ms):
            assert not message.done
            # Messages of an earlier run, and those that have become visible in place, can be acked late.
            assert leased or pop_ms < self.born_ms or message.deadline_ms <= self.now_ms
            message.done = True
        else:
            assert not leased

    def ack_run(self) -> None:
        """Ack several messages of one pop, or some of them and others."""
        self.expire()
        if not self.handles:
            return
        pop_ms = self.rng.choice(self.handles)[1]
        popped = sorted({offset for offset, of_ms in self.handles if of_ms == pop_ms})
        offsets = sorted(self.rng.sample(popped, min(len(popped), 5)))
        left = self.leases.ack_run(KEY, offsets, pop_ms)
        assert left == [each for each in offsets if each in left]
        for offset in set(offsets) - set(left):
            message = self.messages[offset]
            assert not message.done
            assert message.pop_ms == pop_ms
            assert message.deadline_ms != -1
            message.done = True
        for offset in left:
            self._ack(offset, pop_ms)

    def renew(self) -> None:
        self.expire()
        if self.handles:
            offset, pop_ms = self.rng.choice(self.handles)
            message, invisible_ms = self.messages[offset], self.rng.choice([0, 30, 3_000])
            renewed = self.leases.renew(KEY, offset, pop_ms, self.now_ms, invisible_ms)
            if renewed:
                assert not message.done
                assert message.pop_ms == pop_ms
                message.deadline_ms = self.now_ms + invisible_ms

    def expire(self) -> None:
        expired, _ = self.leases.expired(self.now_ms, 1_000)
        for lease in expired:
            message = self.messages[lease.offset]
            assert not message.done
            assert message.deadline_ms <= self.now_ms
            assert self.offsets.query(*KEY) <= lease.offset
            if self.rng.random() < 0.2:
                message.deadline_ms = self.now_ms + 40
                self.leases.postpone(lease, message.deadline_ms)
            else:
                self.leases.end(lease)
                message.done = True
                self.copies.append(lease.offset)

    def wait(self) -> None:
        self.now_ms += self.rng.choice([1, 20, 200, 2_000])

    def step_the_wall_clock(self) -> None:
        self.wall_ms += self.rng.choice([-3_600_000, -5, 5, 3_600_000])

    def send(self) -> None:
        self.messages += [Message() for _ in range(self.rng.randint(1, 5))]

    def crash(self) -> None:
        """Lose the leases. Only the stored offset survives."""
        self.wall_ms = max([self.wall_ms, *(pop_ms for _, pop_ms in self.handles)]) + 1
        self.born_ms = self.wall_ms
        self.leases = Leases(self.offsets, self.born_ms)
        floor = self.offsets.query(*KEY)
        for message in self.messages[floor:]:
            message.done, message.deadline_ms, message.deliveries = False, -1, 0

    def check(self) -> None:
        queue = self.leases.find(KEY)
        floor = self.offsets.query(*KEY)
        assert all(message.done for message in self.messages[:floor])
        assert len(self.leases) == (0 if queue is None else len(queue.leases))
        if queue is not None:
            assert floor <= queue.head <= len(self.messages)
            assert queue.first_open() == floor
            assert list(queue.leases) == sorted(queue.leases)
            undone = sum(not message.done for message in self.messages)
            assert queue.ready(len(self.messages)) + len(queue.leases) == undone

    def drain(self) -> None:
        """Consume everything that is left."""
        for _ in range(200):
            self.now_ms += 10_000
            self.pop()
            for offset, message in enumerate(self.messages):
                if not message.done and message.deadline_ms > self.now_ms:
                    assert self.leases.ack(KEY, offset, message.pop_ms)
                    message.done = True
            if all(message.done for message in self.messages):
                break
        assert self.offsets.query(*KEY) == len(self.messages)
        assert (len(self.leases), self.leases.find(KEY), list(self.leases)) == (0, None, [])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("block", range(10))
def test_no_message_is_lost_or_visible_while_leased(ordered, block):
    for seed in range(block * 150, block * 150 + 150):
        rng = random.Random(seed)
        world = World(rng, ordered)
        steps = (
            [world.pop] * 4
            + [world.ack] * 5
            + [world.ack_run]
            + [world.send, world.wait, world.wait, world.renew]
        )
        steps += [world.step_the_wall_clock]
        for _ in range(rng.randint(10, 120)):
            world.crash() if rng.random() < 0.01 else rng.choice(steps)()
            world.check()
        world.drain()


@pytest.fixture
def offsets():
    table = ConsumerOffsets()
    table.commit(*KEY, 0)
    return table


@pytest.fixture
def leases(offsets):
    return Leases(offsets, BORN_MS)


def pop(leases, offsets, following=None, *, at_ms=BORN_MS, now_ms=0, **more):
    queue = leases.enter(KEY, 0)
    popped = Pop(at_ms, queue.head, 1_000, **more)
    assert leases.lease(queue, offsets, following or offsets[-1] + 1, popped, now_ms)
    return queue


def test_the_floor_is_the_first_message_that_is_not_acked(leases, offsets):
    pop(leases, [0, 1, 2])
    assert leases.ack(KEY, 1, BORN_MS)
    assert offsets.query(*KEY) == 0
    assert leases.ack(KEY, 0, BORN_MS)
    assert offsets.query(*KEY) == 2
    assert leases.ack(KEY, 2, BORN_MS)
    assert offsets.query(*KEY) == 3


def test_messages_that_a_filter_rejects_count_as_done(leases, offsets):
    pop(leases, [2, 5], 9)
    assert offsets.query(*KEY) == 2
    leases.ack(KEY, 2, BORN_MS)
    assert offsets.query(*KEY) == 5
    leases.ack(KEY, 5, BORN_MS)
    assert offsets.query(*KEY) == 9


def test_a_renewed_lease_keeps_its_handle(leases):
    pop(leases, [0])
    assert leases.renew(KEY, 0, BORN_MS, 900, 5_000)
    assert leases.expired(5_899, 10) == ([], [])
    assert leases.ack(KEY, 0, BORN_MS)


def test_a_lease_can_be_shortened(leases):
    pop(leases, [0, 1])
    assert leases.renew(KEY, 1, BORN_MS, 0, 10)
    assert [lease.offset for lease in leases.expired(10, 10)[0]] == [1]


def test_a_change_of_the_stored_offset_drops_the_leases(leases, offsets):
    pop(leases, [0, 1, 2])
    offsets.commit(*KEY, 7)
    assert not leases.ack(KEY, 0, BORN_MS)
    assert leases.expired(1_000, 10) == ([], [])
    assert (offsets.query(*KEY), len(leases)) == (7, 0)
    assert leases.enter(KEY, 7).head == 7


def test_a_read_in_progress_leases_nothing_after_a_change_of_the_offset(leases, offsets):
    queue = leases.enter(KEY, 0)
    queue.busy = True
    offsets.commit(*KEY, 5)
    assert not leases.lease(queue, [0], 1, Pop(BORN_MS, 0, 1_000), 0)
    assert (offsets.query(*KEY), len(leases)) == (5, 0)


def test_a_message_that_is_being_copied_can_neither_be_acked_nor_renewed(leases, offsets):
    pop(leases, [0])
    (lease,) = leases.expired(1_000, 10)[0]
    assert not leases.ack(KEY, 0, BORN_MS)
    assert not leases.renew(KEY, 0, BORN_MS, 1_000, 1_000)
    leases.postpone(lease, 2_000)
    assert leases.ack(KEY, 0, BORN_MS)
    leases.end(lease)
    assert offsets.query(*KEY) == 1


def test_no_group_takes_the_leases_of_all_others(leases, offsets, monkeypatch):
    monkeypatch.setattr(module, "MAX_LEASES", 8)
    monkeypatch.setattr(module, "MIN_LEASES_PER_GROUP", 0)
    other = ("H", "Orders", 0)
    offsets.commit(*other, 0)
    pop(leases, [0, 1, 2, 3])
    assert not leases.has_room("G")
    assert leases.has_room("H")
    queue = leases.enter(other, 0)
    assert leases.may_pop(queue, False)
    assert leases.lease(queue, [0, 1], 2, Pop(BORN_MS, 0, 1_000), 0)
    assert not leases.has_room("H")
    assert not leases.may_pop(queue, False)
    for offset in range(4):
        leases.ack(KEY, offset, BORN_MS)
    assert leases.has_room("G")
    assert leases.has_room("H")


def test_many_groups_do_not_take_the_leases_of_another(leases, offsets, monkeypatch):
    monkeypatch.setattr(module, "MAX_LEASES", 8)
    monkeypatch.setattr(module, "MIN_LEASES_PER_GROUP", 2)
    for group, count in (("A", 4), ("B", 2), ("C", 1), ("D", 1), ("E", 2)):
        key = (group, "Orders", 0)
        offsets.commit(*key, 0)
        for offset in range(count):
            queue = leases.enter(key, 0)
            assert leases.may_pop(queue, False), (group, offset)
            leases.lease(queue, [offset], offset + 1, Pop(BORN_MS, offset, 1_000), 0)
    assert not leases.has_room("E")


def test_expired_leases_come_in_limited_numbers(leases):
    pop(leases, list(range(10)))
    assert [len(leases.expired(1_000, 4)[0]) for _ in range(4)] == [4, 4, 2, 0]


class TestOrdered:
    def test_the_queue_is_blocked_until_all_are_acked(self, leases):
        queue = pop(leases, [0, 1], ordered=True)
        assert not leases.may_pop(queue, True)
        assert not leases.may_pop(queue, False)
        leases.ack(KEY, 1, BORN_MS)
        assert not leases.may_pop(queue, True)
        leases.ack(KEY, 0, BORN_MS)
        assert leases.may_pop(leases.enter(KEY, 2), True)

    def test_the_queue_goes_back_to_the_first_message_that_is_not_acked(self, leases):
        queue = pop(leases, [0, 1, 2, 3], ordered=True)
        leases.ack(KEY, 0, BORN_MS)
        leases.ack(KEY, 2, BORN_MS)
        assert leases.expired(1_000, 10) == ([], [KEY])
        assert (queue.head, queue.acked, queue.deliveries) == (1, {2}, {1: 1, 3: 1})
        assert leases.may_pop(queue, True)

    def test_a_delivery_that_is_given_back_does_not_count(self, leases):
        queue = pop(leases, [0, 1], ordered=True)
        assert leases.renew(KEY, 0, BORN_MS, 0, 0, counts=False)
        assert leases.renew(KEY, 1, BORN_MS, 0, 0)
        assert leases.expired(1, 10) == ([], [KEY])
        assert queue.deliveries == {0: 0, 1: 1}

    def test_a_message_given_back_late_keeps_the_queue_blocked(self, leases):
        queue = pop(leases, [0, 1], ordered=True)
        assert leases.renew(KEY, 1, BORN_MS, 0, 5_000)
        assert leases.expired(1_000, 10) == ([], [])
        assert not leases.may_pop(queue, True)
        assert leases.renew(KEY, 0, BORN_MS, 1_000, 1_000)
        assert leases.expired(4_999, 10) == ([], [])
        assert leases.expired(5_000, 10) == ([], [KEY])
        assert queue.head == 0

    def test_the_last_ack_frees_messages_that_have_expired(self, leases):
        queue = pop(leases, [0, 1], ordered=True)
        leases.renew(KEY, 1, BORN_MS, 0, 5_000)
        leases.expired(1_000, 10)
        assert leases.ack(KEY, 1, BORN_MS)
        assert (queue.head, queue.acked, leases.may_pop(queue, True)) == (0, {1}, True)

    def test_an_ack_after_the_expiry_counts_until_the_message_is_popped_again(self, leases, offsets):
        queue = pop(leases, [0, 1], ordered=True)
        leases.expired(1_000, 10)
        assert leases.ack(KEY, 0, BORN_MS)
        assert offsets.query(*KEY) == 1
        pop(leases, [1], ordered=True, at_ms=BORN_MS + 1)
        assert not leases.ack(KEY, 1, BORN_MS)
        assert leases.ack(KEY, 1, BORN_MS + 1)
        assert (offsets.query(*KEY), queue.idle) == (2, True)

    def test_a_repeated_attempt_receives_the_messages_once_more(self, leases):
        queue = pop(leases, [0, 1], ordered=True, attempt_id="a")
        assert not leases.may_pop(queue, True, "b")
        assert leases.may_pop(queue, True, "a")
        assert (queue.head, queue.deliveries, len(leases)) == (0, {0: 0, 1: 0}, 0)


class TestAnEarlierRun:
    def test_acks_of_its_messages_count(self, leases, offsets):
        assert leases.ack(KEY, 1, BORN_MS - 1)
        assert leases.ack(KEY, 3, BORN_MS - 1)
        queue = leases.enter(KEY, 0)
        assert (queue.head, queue.acked, offsets.query(*KEY)) == (0, {1, 3}, 0)
        assert leases.ack(KEY, 0, BORN_MS - 1)
        assert (queue.head, queue.acked, offsets.query(*KEY)) == (2, {3}, 2)

    def test_acks_of_messages_that_were_never_popped_do_not(self, leases, offsets):
        assert not leases.ack(KEY, 0, BORN_MS)
        assert not leases.ack(("new", "Orders", 0), 0, 0)
        assert offsets.query(*KEY) == 0

    def test_its_leases_are_restored(self, leases, offsets):
        offsets.commit(*KEY, 4)
        pops = [(4, Pop(5, 4, 1_000, True), 700, True), (6, Pop(5, 4, 1_000, True), 900, True)]
        leases.restore(KEY, 7, pops, {5}, {4: 2, 6: 1})
        queue = leases.enter(KEY, 4)
        assert (queue.head, leases.may_pop(queue, True)) == (7, False)
        assert leases.expired(900, 10) == ([], [KEY])
        assert (queue.head, queue.acked, queue.deliveries) == (4, {5}, {4: 2, 6: 1})

    def test_a_clear_forgets_leases_but_no_offset(self, leases, offsets):
        pop(leases, [0, 1, 2])
        leases.ack(KEY, 0, BORN_MS)
        leases.clear()
        assert (len(leases), offsets.query(*KEY), leases.next_deadline_ms()) == (0, 1, None)
        assert leases.enter(KEY, 1).head == 1


class TestLimits:
    def test_the_leases_of_a_queue_are_limited(self, leases, monkeypatch):
        monkeypatch.setattr(module, "MAX_LEASES_PER_QUEUE", 3)
        queue = pop(leases, [0, 1, 2])
        assert not leases.may_pop(queue, False)
        leases.ack(KEY, 1, BORN_MS)
        assert leases.may_pop(queue, False)

    def test_the_queues_are_limited(self, leases, monkeypatch):
        monkeypatch.setattr(module, "MAX_QUEUES", 1)
        queue = pop(leases, [0])
        other = leases.enter(("G", "Orders", 1), 0)
        assert not leases.may_pop(other, False)
        leases.settle(other)
        assert leases.may_pop(queue, False)
        assert list(leases) == [queue]

    def test_acks_ahead_do_not_copy_earlier_ones(self, leases):
        """One request may contain 16,384 of them, for instance after a kill of the broker."""
        leases.ack(KEY, 2, 0)
        acked = leases.enter(KEY, 0).acked
        leases.ack(KEY, 4, 0)
        assert leases.enter(KEY, 0).acked is acked
        assert acked == {2, 4}

    def test_acks_ahead_are_limited(self, leases, monkeypatch):
        monkeypatch.setattr(module, "MAX_ACKED_AHEAD", 2)
        assert [leases.ack(KEY, offset, 0) for offset in (2, 4, 6)] == [True, True, False]

    def test_renewals_do_not_fill_the_heap(self, leases):
        queue = leases.enter(KEY, 0)
        leases.lease(queue, [0], 1, Pop(BORN_MS, 0, 1_000_000), 0)
        for step in range(20_000):
            leases.renew(KEY, 0, BORN_MS, 0, 1_000_000 - step)
        assert len(leases._heap) < 3_000  # noqa: SLF001
        assert leases.next_deadline_ms() == 1_000_000 - 19_999
