"""Feeds query only while a page uses them, once for all pages; rings and rates are limited and correct."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.kit.waiting import until

from cometmq.console.base.feeds import MAX_FEEDS, PAUSE_SHARE, Feed, Feeds, Reading, Ring, Tops
from cometmq.errors import ConnectError


class Question:
    def __init__(self) -> None:
        self.asked = 0
        self.under_way = 0
        self.failing: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> int:
        self.under_way += 1
        assert self.under_way == 1
        try:
            await self.gate.wait()
        finally:
            self.under_way -= 1
        self.asked += 1
        if self.failing is not None:
            raise self.failing
        return self.asked


async def test_nothing_is_asked_unless_somebody_looks() -> None:
    question = Question()
    feed = Feed(question, 0.01)
    await asyncio.sleep(0.05)
    assert question.asked == 0

    told: list[Reading[int]] = []
    end = feed.watch(told.append)
    await until(lambda: len(told) >= 3)
    end()
    end()
    asked = question.asked
    await asyncio.sleep(0.05)

    assert question.asked == asked
    assert not feed.watched
    assert [each.value for each in told[:3]] == [1, 2, 3]


async def test_all_who_look_share_one_question() -> None:
    question = Question()
    feed = Feed(question, 60)
    told: list[Reading[int]] = []
    ends = [feed.watch(told.append) for _ in range(50)]
    await until(lambda: len(told) == 50)

    assert question.asked == 1
    for end in ends:
        end()


async def test_a_failure_keeps_the_last_answer_and_says_why_there_is_no_newer() -> None:
    question = Question()
    feed = Feed(question, 0.01)
    told: list[Reading[int]] = []
    end = feed.watch(told.append)
    await until(lambda: len(told) >= 1)
    question.failing = ConnectError("a:1", "refused")
    await until(lambda: told[-1].problem is not None)
    good = [each for each in told if each.problem is None]
    end()

    assert told[-1].value == good[-1].value
    assert told[-1].at_s == good[-1].at_s
    assert "a:1" in str(told[-1].problem)


async def test_unavailable_before_the_first_answer_is_no_empty_answer() -> None:
    question = Question()
    question.failing = ConnectError("a:1", "refused")
    reading = await Feed(question, 60).first(5)

    assert reading.value is None
    assert reading.problem is not None


async def test_a_page_does_not_wait_long_for_its_first_answer() -> None:
    question = Question()
    question.gate.clear()
    feed = Feed(question, 60)

    assert await feed.first(0.01) == Reading()
    question.gate.set()
    await until(lambda: feed.latest.value == 1)
    assert (await feed.first(0.01)).value == 1


async def test_a_page_that_comes_back_is_given_the_answer_that_is_there() -> None:
    question = Question()
    feed = Feed(question, 60)
    await feed.first(5)
    end = feed.watch(lambda _reading: None)
    await asyncio.sleep(0.03)

    assert question.asked == 1
    feed.refresh()
    await until(lambda: question.asked == 2)
    end()


async def test_a_watcher_that_fails_does_not_stop_the_others() -> None:
    feed = Feed(Question(), 60)
    told: list[Reading[int]] = []

    def failing(_reading: Reading[int]) -> None:
        raise RuntimeError("drawn wrongly")

    ends = [feed.watch(failing), feed.watch(told.append)]
    await until(lambda: len(told) == 1)
    for end in ends:
        end()


async def test_feeds_are_found_by_key_and_bounded() -> None:
    live = Feeds()
    watched = live.feed("watched", Question(), 60)
    end = watched.watch(lambda _reading: None)
    for number in range(MAX_FEEDS + 50):
        live.feed(number, Question(), 60)

    assert live.feed("watched", Question(), 60) is watched
    assert live.watched == 1
    assert len(live) <= MAX_FEEDS + 1
    end()


def test_a_ring_holds_the_newest_values_at_its_step() -> None:
    ring = Ring(3, 10.0)
    for at_s in range(0, 100, 5):
        ring.add(at_s, at_s * 2.0)

    assert len(ring) == 3
    points = ring.points(60)
    assert points[-1] == (95.0, 190.0)
    assert points[1][0] - points[0][0] >= 10
    ring.add(50.0, 1.0)  # time after the clock was set back
    assert ring.points(60) == points


def test_a_time_in_which_nobody_looked_is_a_gap_and_no_line() -> None:
    ring = Ring(10, 1.0)
    for at_s in (0.0, 10.0, 500.0):
        ring.add(at_s, 1.0)

    assert [value for _, value in ring.points(100)] == [1.0, 1.0, None, 1.0]


async def test_who_asks_again_and_again_does_not_have_it_asked_without_a_pause() -> None:
    question = Question()
    feed = Feed(question, 2.0)
    begun = time.monotonic()
    end = feed.watch(lambda _reading: feed.refresh())
    await until(lambda: question.asked >= 3)
    end()

    assert time.monotonic() - begun >= 2 * 2.0 * PAUSE_SHARE * 0.9


def test_the_past_of_the_largest_is_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cometmq.console.base.feeds.TOPS", 2)
    monkeypatch.setattr("cometmq.console.base.feeds.MAX_TOPS_KEPT", 3)
    tops = Tops(10, 1.0)
    tops.add(10.0, {"a": 1.0, "b": 3.0, "c": 2.0, "none": 0.0})
    assert list(tops.largest) == ["b", "c"]
    tops.add(20.0, {"a": 5.0, "b": 4.0})

    assert list(tops.largest) == ["a", "b"]
    assert tops.largest["b"].points(60.0) == [(10.0, 3.0), (20.0, 4.0)]
    tops.add(30.0, {"d": 2.0, "e": 1.0})
    assert list(tops.largest) == ["d", "e"]
    tops.add(40.0, {"a": 9.0})
    assert list(tops.largest) == ["a", "d"]
    assert tops.largest["a"].points(60.0) == [(20.0, 5.0), (30.0, 0.0), (40.0, 9.0)]
