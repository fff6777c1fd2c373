"""Queries of many brokers: an unresponsive one delays no one, is not asked twice, and may respond later."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.waiting import until

from cometmq.console.base.fanout import Fanout
from cometmq.console.base.feeds import Feeds
from cometmq.errors import ConnectError

ADDRS = {"a": "a:1", "b": "b:1"}


class Brokers:
    """Brokers in `silent` respond when the gate opens; brokers in `down` never respond."""

    def __init__(self, *silent: str, down: tuple[str, ...] = ()) -> None:
        self.silent, self.down = silent, down
        self.asked: list[str] = []
        self.gate = asyncio.Event()

    async def __call__(self, addr: str) -> str:
        self.asked.append(addr)
        if addr in self.silent:
            await self.gate.wait()
        if addr in self.down:
            raise ConnectError(addr, "refused")
        return addr.upper()


async def test_a_silent_broker_is_named_and_the_others_are_there() -> None:
    brokers, came = Brokers("b:1"), asyncio.Event()
    fanout = Fanout[str](came.set, timeout_s=0.05)
    async with asyncio.timeout(60):
        first = await fanout.request(ADDRS, brokers)
        again = await fanout.request(ADDRS, brokers)
        assert (first.values, list(first.missing), list(again.missing)) == ({"a": "A:1"}, ["b"], ["b"])
        assert "b:1 has not responded" in first.problems["b"]
        assert brokers.asked.count("b:1") == 1, "it is still being asked"
        brokers.gate.set()
        await came.wait()
        whole = await fanout.request(ADDRS, brokers)

    assert whole.values == {"a": "A:1", "b": "B:1"}
    assert brokers.asked.count("b:1") == 1, "its late answer is one of now"


async def test_a_broker_that_refuses_is_named_at_once() -> None:
    answers = await Fanout[str](lambda: None, timeout_s=60).request(ADDRS, Brokers(down=("b:1",)))

    answers.raise_if_none()
    assert list(answers.missing) == ["b"]


async def test_no_answer_at_all_is_an_error() -> None:
    answers = await Fanout[str](lambda: None, timeout_s=60).request(ADDRS, Brokers(down=("a:1", "b:1")))

    with pytest.raises(ConnectError):
        answers.raise_if_none()
    (await Fanout[str](lambda: None).request({}, Brokers())).raise_if_none()


async def test_an_answer_that_nobody_waited_for_is_not_taken_for_one_of_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cometmq.console.base.fanout.LATE_RESPONSE_MAX_AGE_S", -1.0)
    brokers = Brokers("b:1")
    fanout = Fanout[str](lambda: None, timeout_s=60)
    looking = asyncio.create_task(fanout.request(ADDRS, brokers))
    await asyncio.sleep(0)
    looking.cancel()  # as if the page were closed
    await asyncio.gather(looking, return_exceptions=True)
    brokers.gate.set()
    for _ in range(5):
        await asyncio.sleep(0)
    await fanout.request(ADDRS, brokers)

    assert brokers.asked.count("b:1") == 2


async def test_pages_are_told_of_a_late_answer() -> None:
    brokers, live = Brokers("b:1"), Feeds()
    fanout = Fanout[str](lambda: live.refresh("names"), timeout_s=0.05)

    async def ask() -> list[str]:
        return sorted((await fanout.request(ADDRS, brokers)).values)

    feed = live.feed("names", ask, 60.0)
    told: list[object] = []
    end = feed.watch(lambda reading: told.append(reading.value))
    async with asyncio.timeout(60):
        await until(lambda: told == [["a"]])
        brokers.gate.set()
        await until(lambda: told[-1] == ["a", "b"])
    end()
