"""Tests of an orderly queue: one batch at a time, the effect of each listener result, and expiry of locks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.consumer.orderly_queue import LOCK_LIVE_S, LockTable, OrderlyQueue, suspension_s
from cometmq.message import MessageExt, MessageQueue

QUEUES = [MessageQueue("T", "a", number) for number in range(3)]
Q0, Q1, Q2 = QUEUES


def holding(*offsets: int, batch_size: int = 1) -> OrderlyQueue:
    queue = OrderlyQueue(Q0, 0, 0.0)
    queue.put([MessageExt("T", b"body", queue_offset=offset) for offset in offsets], batch_size)
    return queue


def next_offsets(queue: OrderlyQueue) -> list[int]:
    """Return the offsets that the listener is called with next."""
    batch = queue.take()
    if batch is None:
        return []
    assert queue.begin()
    return [message.queue_offset for message in batch.messages]


def test_one_batch_at_a_time() -> None:
    queue = holding(5, 6, 8, batch_size=2)
    assert next_offsets(queue) == [5, 6]
    assert next_offsets(queue) == []
    queue.commit()
    assert next_offsets(queue) == [8]
    queue.commit()
    assert (next_offsets(queue), queue.commit_offset(), queue.count, queue.body_bytes) == ([], 9, 0, 0)


def test_what_was_put_back_comes_first_again() -> None:
    queue = holding(5, 6)
    next_offsets(queue)
    queue.put_back()
    assert queue.commit_offset() == 5
    assert next_offsets(queue) == [5]


def test_without_a_commit_the_offset_waits_for_one() -> None:
    queue = holding(5, 6, 7)
    for offset in (5, 6):
        assert next_offsets(queue) == [offset]
        queue.mark_consumed()
    assert (queue.commit_offset(), queue.taken, queue.count) == (5, (5, 6, 2), 3)
    assert next_offsets(queue) == [7]
    queue.commit()
    assert (queue.commit_offset(), queue.taken, queue.count) == (8, (0, 0, 0), 0)


def test_a_roll_back_gives_everything_since_the_last_commit_again() -> None:
    queue = holding(5, 6, 7, 8)
    next_offsets(queue)
    queue.commit()
    for _ in range(2):
        next_offsets(queue)
        queue.mark_consumed()
    assert next_offsets(queue) == [8]
    queue.roll_back()
    assert [next_offsets(queue), queue.commit_offset()] == [[6], 6]


@pytest.mark.parametrize("given_up", ["leaving", "dropped"])
def test_nothing_begins_in_a_queue_that_was_given_up(given_up: str) -> None:
    queue = holding(5, 6)
    queue.take()
    setattr(queue, given_up, True)
    assert not queue.begin()
    queue.put_back()
    assert queue.take() is None


@pytest.mark.parametrize(
    ("tried", "hopeless", "counts"),
    [((0, 0), [], (1, 1)), ((2, 1), [5], (2, 2)), ((2, 2), [5, 6], (2, 2)), ((3, 2), [5, 6], (3, 2))],
)
def test_who_was_tried_often_enough_gets_no_other_try(
    tried: tuple[int, int], hopeless: list[int], counts: tuple[int, int]
) -> None:
    queue = holding(5, 6, batch_size=2)
    batch = queue.take()
    assert batch is not None
    for message, times in zip(batch.messages, tried, strict=True):
        message.reconsume_times = times
    assert [message.queue_offset for message in queue.count_failure(2)] == hopeless
    assert tuple(message.reconsume_times for message in batch.messages) == counts


def test_dead_letters_leave_their_batch() -> None:
    queue = holding(5, 6, 7, batch_size=2)
    batch = queue.take()
    assert batch is not None
    assert queue.remove_messages(batch.messages[:1])
    queue.put_back()
    assert [queue.commit_offset(), next_offsets(queue)] == [6, [6]]
    assert not queue.remove_messages(batch.messages)
    assert [queue.commit_offset(), next_offsets(queue)] == [7, [7]]
    assert (queue.count, queue.body_bytes) == (1, 4)


def test_a_dead_letter_does_not_come_again_with_a_roll_back() -> None:
    queue = holding(5, 6, 7)
    next_offsets(queue)
    queue.mark_consumed()
    assert next_offsets(queue) == [6]
    assert queue.under_way is not None
    assert not queue.remove_messages(queue.under_way.messages)
    assert next_offsets(queue) == [7]
    queue.roll_back()
    assert next_offsets(queue) == [5]
    queue.mark_consumed()
    assert next_offsets(queue) == [7]


ANSWERS = st.lists(
    st.sampled_from(["commit", "mark_consumed", "put_back", "roll_back", "bury", "more"]), max_size=60
)


@given(ANSWERS, st.integers(1, 3))
def test_every_history_is_one_that_a_list_would_have(answers: list[str], size: int) -> None:
    """Compare the queue with a model: a list of uncommitted offsets whose first ones are being processed."""
    queue = OrderlyQueue(Q0, 0, 0.0)
    batches: list[list[int]] = []
    taken = top = 0
    for answer in answers:
        if answer == "more":
            new = [top, top + 1, top + 2]
            top += 3
            queue.put([MessageExt("T", b"b", queue_offset=offset) for offset in new], size)
            batches += [new[start : start + size] for start in range(0, 3, size)]
            continue
        offsets = next_offsets(queue)
        if taken == len(batches):
            assert offsets == []
            continue
        assert offsets == batches[taken]
        if answer == "bury":
            assert queue.under_way is not None
            queue.remove_messages(queue.under_way.messages)
            del batches[taken]
        else:
            getattr(queue, answer)()
            taken += 1
            if answer == "commit":
                batches, taken = batches[taken:], 0
            elif answer == "roll_back":
                taken = 0
            elif answer == "put_back":
                taken -= 1
        rest = [offset for batch in batches for offset in batch]
        assert queue.commit_offset() == (rest[0] if rest else top)
        assert queue.count == queue.body_bytes == len(rest)
        assert queue.taken[2] == len([offset for batch in batches[:taken] for offset in batch])


@pytest.mark.parametrize(
    ("wanted", "rests"),
    [(-1, 0.01), (0, 0.01), (0.5, 0.5), (3600, 30), (None, 2.0), ("soon", 2.0), (math.nan, 2.0)],
)
def test_a_queue_rests_10_ms_to_30_s(wanted: object, rests: float) -> None:
    assert suspension_s(wanted, 2.0) == rests


# -- locks


def test_a_lock_is_believed_for_30_s_from_its_request() -> None:
    table = LockTable()
    assert not table.holds(Q0, 0)
    table.taken([Q0], requested_at=100)
    assert table.holds(Q0, 100 + LOCK_LIVE_S - 0.001)
    assert not table.holds(Q0, 100 + LOCK_LIVE_S)
    assert table.last_confirmed(Q0) == 100
    assert table.last_confirmed(Q1) is None


def test_a_renewal_says_what_was_lost() -> None:
    table = LockTable()
    table.taken(QUEUES, requested_at=100)
    assert table.renewed([Q0, Q1], {Q0, MessageQueue("Foreign", "a", 0)}, requested_at=120, now=121) == [Q1]
    assert table.queues == (Q0, Q2)
    assert [table.holds(queue, 149) for queue in QUEUES] == [True, False, False]


@pytest.mark.parametrize(("requested_at", "now"), [(129, 129.9), (129, 130), (140, 141), (120, 3_600)])
def test_a_renewal_that_comes_too_late_is_a_loss(requested_at: float, now: float) -> None:
    """Another member may have locked the queue in the meantime, for example while this machine slept."""
    table = LockTable()
    table.taken([Q0], requested_at=100)
    lost = table.renewed([Q0], [Q0], requested_at, now)
    assert (lost, table.queues) == (([], (Q0,)) if now < 100 + LOCK_LIVE_S else ([Q0], ()))


def test_what_nobody_confirms_expires_once() -> None:
    table = LockTable()
    table.taken([Q0], requested_at=100)
    table.taken([Q1], requested_at=120)
    assert table.expired(100 + LOCK_LIVE_S) == [Q0]
    assert table.expired(100 + LOCK_LIVE_S) == []
    table.forget([Q1, Q2])
    assert table.queues == ()
