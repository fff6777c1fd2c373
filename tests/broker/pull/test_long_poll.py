"""Tests of the events that wake a parked pull, and of those that do not."""

from __future__ import annotations

import random

import pytest

from cometmq.broker.pull.long_poll import DEADLINE_GRAIN_MS, MAX_HOLD_MS, LongPoll, ParkedPull

T0 = 1_000_000
QUEUE = ("Orders", 3)


def held(owner: object = "c1", pull_from: int = 10, codes: frozenset[int] | None = None) -> ParkedPull:
    return ParkedPull(owner, f"request of {owner}", pull_from, codes)


def parked(pull: ParkedPull, hold_ms: int = 15_000) -> LongPoll:
    table = LongPoll()
    table.park(*QUEUE, pull, T0, hold_ms)
    return table


@pytest.mark.parametrize(
    ("arrival", "codes", "wakes"),
    [
        ((*QUEUE, 11, 5), None, True),
        ((*QUEUE, 11, 5), frozenset({5, 6}), True),
        ((*QUEUE, 11, 7), frozenset({5, 6}), False),
        ((*QUEUE, 10, 5), None, False),  # the pull has already seen that offset
        (("Orders", 2, 11, 5), None, False),
        (("Other", 3, 11, 5), None, False),
        ((*QUEUE, 11, 5), frozenset(), False),  # the expression has separators only
    ],
)
def test_an_arrival_wakes_the_pulls_that_it_concerns(arrival, codes, wakes):
    pull = held(codes=codes)
    table = parked(pull)
    assert table.arrived(*arrival) == ([pull] if wakes else [])
    assert len(table) == (0 if wakes else 1)
    assert len(table) == (0 if wakes else 1)


def test_one_arrival_wakes_every_group_that_waits_for_it_and_leaves_the_others():
    table = LongPoll()
    first, second, other_tag = held("g1"), held("g2", codes=frozenset({5})), held("g3", codes=frozenset({9}))
    for pull in (first, second, other_tag):
        table.park(*QUEUE, pull, T0, 15_000)
    assert table.arrived(*QUEUE, 11, 5) == [first, second]
    assert table.arrived(*QUEUE, 12, 9) == [other_tag]
    assert len(table) == 0
    assert table.next_deadline() is None


def test_time_runs_out_not_before_the_hold_and_at_most_a_grain_after():
    pull = held()
    table = parked(pull, hold_ms=15_000)
    assert table.expire(T0 + 15_000 - 1) == []
    deadline = table.next_deadline()
    assert deadline is not None
    assert T0 + 15_000 <= deadline <= T0 + 15_000 + DEADLINE_GRAIN_MS
    assert table.expire(deadline) == [pull]
    assert len(table) == 0


def test_pulls_run_out_in_the_order_of_their_deadlines():
    table = LongPoll()
    slow, fast = held("slow"), held("fast")
    table.park(*QUEUE, slow, T0, 2_000)
    table.park("Orders", 4, fast, T0, 1_000)
    assert table.expire(T0 + 1_100) == [fast]
    assert table.expire(T0 + 60_000) == [slow]


def test_nobody_can_park_a_pull_for_ever():
    table = parked(held(), hold_ms=2**62)
    assert table.next_deadline() <= T0 + MAX_HOLD_MS + DEADLINE_GRAIN_MS
    assert parked(held(), hold_ms=-5).expire(T0 + DEADLINE_GRAIN_MS) != []


def test_the_recheck_looks_at_offsets_and_not_at_tags():
    table = LongPoll()
    filtered, current = held("a", 10, frozenset({1})), held("b", 12)
    for pull in (filtered, current):
        table.park(*QUEUE, pull, T0, 15_000)
    assert table.recheck(lambda topic, queue_id: 12) == [filtered]
    assert len(table) == 1


def test_a_lost_connection_takes_its_pulls_along_and_no_others():
    table = LongPoll()
    mine, also_mine, yours = held("me"), held("me"), held("you")
    table.park(*QUEUE, mine, T0, 15_000)
    table.park("Orders", 4, also_mine, T0, 15_000)
    table.park(*QUEUE, yours, T0, 15_000)
    table.drop("me")
    assert table.wake_all() == [yours]
    table.drop("nobody")


def test_a_deleted_topic_wakes_its_pulls():
    table = LongPoll()
    here, there = held("a"), held("b")
    table.park("Orders", 0, here, T0, 15_000)
    table.park("Other", 0, there, T0, 15_000)
    assert table.wake_topic("Orders") == [here]
    assert len(table) == 1


def test_whatever_happens_each_pull_is_woken_once_and_nothing_stays_behind():
    """Compare random histories with a plain list of the parked pulls."""
    dice = random.Random(7)
    for _ in range(60):
        table, alive, now = LongPoll(), set(), T0
        table.watch("T", 1)
        for step in range(80):
            event = dice.randrange(6)
            if event <= 2:
                pull = held(
                    f"c{dice.randrange(4)}", step, dice.choice([None, frozenset({dice.randrange(3)})])
                )
                table.park("T", dice.randrange(3), pull, now, dice.randrange(400))
                alive.add(pull)
                continue
            if event == 3:
                woken = table.arrived("T", dice.randrange(3), step + 1, dice.randrange(3))
            elif event == 4:
                now += dice.randrange(200)
                woken = table.expire(now)
            else:
                owner = f"c{dice.randrange(4)}"
                table.drop(owner)
                woken = [pull for pull in alive if pull.owner == owner]
            assert all(pull in alive for pull in woken)
            alive -= set(woken)
            assert len(table) == len(alive)
            assert set(table.queues) == {pull.key for pull in alive} | {("T", 1)}
        assert set(table.wake_all()) == alive
        assert (list(table.queues), table.next_deadline()) == ([("T", 1)], None)
        assert all(table.has_room("T", 0, held(f"c{n}"), 1, 1) for n in range(4))
        assert (table.queues["T", 1].filters, table.queues["T", 1].count) == ({}, 0)


class CountedCodes(frozenset):
    """Tag codes that count their look-ups."""

    looks = 0

    def __contains__(self, code):
        CountedCodes.looks += 1
        return super().__contains__(code)


def test_a_message_is_held_against_each_filter_once_however_many_wait_with_it():
    table = LongPoll()
    codes = [CountedCodes({5}), CountedCodes({6})]
    for number in range(2_000):
        table.park(*QUEUE, held(number, codes=codes[number % 2]), T0, 15_000)
    assert table.arrived(*QUEUE, 11, 7) == []
    assert CountedCodes.looks <= 4
    assert len(table.arrived(*QUEUE, 11, 5)) == 1_000


@pytest.mark.parametrize(
    ("owner", "queue_id", "codes", "weight", "room"),
    [
        ("c1", 4, None, 2, True),
        ("c1", 4, None, 3, False),  # exceeds the connection's limit
        ("c2", 4, None, 9, True),
        ("c2", 3, None, 1, False),  # exceeds the queue's limit
        ("c3", 5, frozenset({3}), 1, False),  # exceeds the queue's limit of filters
        ("c3", 5, frozenset({2}), 1, True),
    ],
)
def test_there_is_room_for_so_many_pulls_of_a_connection_and_on_a_queue(
    monkeypatch, owner, queue_id, codes, weight, room
):
    monkeypatch.setattr("cometmq.broker.pull.long_poll.MAX_FILTERS", 2)
    table = LongPoll()
    for other, where, filtered in (("c1", 3, None), ("c4", 3, None), ("c4", 3, None), ("c1", 4, None)):
        table.park("Orders", where, held(other, codes=filtered), T0, 15_000)
    for number in (1, 2):
        table.park("Orders", 5, held("c5", codes=frozenset({number})), T0, 15_000)
    pull = ParkedPull(owner, "request", 10, codes, weight=weight)
    assert table.has_room("Orders", queue_id, pull, 4 if owner == "c1" else 9, 3) is room


def test_a_pull_put_aside_is_woken_by_its_deadline_only():
    table = LongPoll()
    pull = held()
    table.put_aside(pull, T0, 1_000)
    assert table.arrived(*QUEUE, 11, 5) == table.recheck(lambda *_: 99) == table.wake_topic("Orders") == []
    assert table.expire(T0 + 2_000) == [pull]
    table.put_aside(pull, T0, 1_000)
    assert table.wake_all() == [pull]
    table.put_aside(pull, T0, 1_000)
    table.drop("c1")
    assert len(table) == 0
