"""Offset look-ups by time, compared with a list.

Cases: equal times, times before the first and after the last message, gaps, several files and segments, and
expired, purged and lost messages.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.store.kit import (
    drop_first_segment,
    everything,
    in_place,
    offset_by_time,
    open_store,
    put,
    restarted,
    send,
)
from tests.store.planted import alter

from cometmq.store import ManualClock, MessageStore

BEGIN_MS = 1_000_000


class Sent(NamedTuple):
    """A message that readers can still receive."""

    offset: int
    stored_ms: int


class Plan(NamedTuple):
    """A random store.

    Attributes:
        steps: Milliseconds between successive messages.
        lost: Numbers of messages that never reach the queue and are replaced by fillers.
        expired: Number of segments that retention deletes.
        purged: Share of the queue that a purge hides.
        restarted: Whether all data is read from files.
    """

    steps: list[int]
    lost: frozenset[int]
    expired: int
    purged: float
    restarted: bool


plans = st.builds(
    Plan,
    st.lists(st.sampled_from((0, 0, 0, 1, 2, 10, 1000)), max_size=50),
    st.frozensets(st.integers(0, 49), max_size=20),
    st.integers(0, 3),
    st.sampled_from((0.0, 0.0, 0.3, 1.0)),
    st.booleans(),
)


def build(root: str, plan: Plan) -> tuple[MessageStore, list[Sent]]:
    """Build a store with queue files of 8 units and segments of about 8 messages, shared by two queues."""
    clock = ManualClock(BEGIN_MS)
    sizes = {"mapped_file_size_commit_log": 8192, "mapped_file_size_consume_queue": 160}
    store = open_store(root, clock=clock, **sizes)
    sent: list[tuple[Sent, int]] = []
    for number, step in enumerate(plan.steps):
        clock.now_ms += step
        if number in plan.lost and number and number - 1 not in plan.lost:
            queue = store.queues.get_or_make("T", 0)
            queue.skip_to(queue.max_offset + 1)
            queue.next_offset = queue.max_offset
            store.queues.add_dirty(queue)
        put(store, bytes(number * 7 % 40), queue_id=1)
        place = send(store, bytes(700))
        sent.append((Sent(place.queue_offset, clock.now_ms), place.physical_offset))
    if plan.restarted:
        store = restarted(store, clock=clock, **sizes)
    for _ in range(min(plan.expired, max(0, len(store.log.segments) - 1))):
        drop_first_segment(store)
    first = store.min_offset("T", 0)
    first += int((store.max_offset("T", 0) - first) * plan.purged)
    in_place(store.topic_retention.raise_min_offsets("T", {0: first}))
    low = store.log.min_position
    return store, [each for each, position in sent if position >= low and each.offset >= first]


def nearest(sent: list[Sent], asked: int) -> int:
    """Return the offset of the nearest message.

    At equal distances this is the earlier message; among equal times, the one adjacent to the requested time.
    """

    def rank(each: Sent) -> tuple[int, bool, int]:
        later = each.stored_ms >= asked
        return abs(each.stored_ms - asked), later, each.offset if later else -each.offset

    return min(sent, key=rank).offset


@settings(max_examples=40, deadline=None)
@given(plan=plans)
@example(plan=Plan([], frozenset(), 0, 0.0, False))
@example(plan=Plan([5] * 30, frozenset(), 2, 0.0, True))
@example(plan=Plan([0] * 30, frozenset(range(3, 20, 2)), 1, 0.3, False))
def test_every_answer_is_that_of_a_list(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as root:
        store, sent = build(root, plan)
        low, high = store.min_offset("T", 0), store.max_offset("T", 0)
        assert len(everything(store)) == len(sent)
        times = {each.stored_ms for each in sent} | {BEGIN_MS, BEGIN_MS + sum(plan.steps)}
        for asked in sorted({at + by for at in times for by in (-1, 0, 1, 5, 500)} | {-1, 0, 1 << 60}):
            answers = tuple(offset_by_time(store, "T", 0, asked, mode) for mode in (None, "LOWER", "UPPER"))
            expected = (
                nearest(sent, asked) if sent else low,
                next((each.offset for each in sent if each.stored_ms >= asked), high),
                next((each.offset for each in reversed(sent) if each.stored_ms <= asked), low),
            )
            assert answers == expected, asked
        store.close()


@pytest.mark.parametrize("mode", [None, "LOWER", "UPPER"])
def test_a_wide_gap_is_crossed_in_strides(tmp_path: Path, mode: str | None) -> None:
    clock = ManualClock(BEGIN_MS)
    store = open_store(tmp_path, clock=clock, mapped_file_size_consume_queue=20 * 300_000)
    send(store)
    queue = store.queues.get_or_make("T", 0)
    queue.skip_to(200_000)
    queue.next_offset = 200_000
    clock.now_ms += 1000
    send(store)
    assert offset_by_time(store, "T", 0, BEGIN_MS + 999, mode) == (0 if mode == "UPPER" else 200_000)
    assert offset_by_time(store, "T", 0, BEGIN_MS + 1, mode) == (200_000 if mode == "LOWER" else 0)


def test_a_damaged_record_does_not_lead_the_search_astray(tmp_path: Path) -> None:
    clock = ManualClock(BEGIN_MS)
    store = open_store(tmp_path, clock=clock)
    places = []
    for _ in range(31):
        clock.now_ms += 10
        places.append(send(store, bytes(500)))
    store.close()
    log = tmp_path / "commitlog" / f"{0:020d}"
    alter(log, places[15].physical_offset, bytes(88))  # the middle, where a binary search starts
    store = open_store(tmp_path, clock=clock)
    for number in (3, 14, 15, 16, 30):
        asked = BEGIN_MS + (number + 1) * 10
        expected = 16 if number == 15 else number
        assert offset_by_time(store, "T", 0, asked, "LOWER") == expected
