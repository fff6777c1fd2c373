"""Readers of old messages get a fixed share of the event loop beside sends, and all of it without sends."""

from __future__ import annotations

import pytest

from cometmq.broker.pull.backlog import AT_ONCE, CALM_S, MAX_READERS, MAX_WAITING_REQUESTS, PART, Backlog

PULL_S = 60e-6


class Loop:
    """Clocks and a commit log that the tests advance."""

    def __init__(self) -> None:
        self.cpu_s = self.now_s = 100.0
        self.log_end = 5000
        self.served: list[int] = []
        self.backlog: Backlog[int] = Backlog(
            self.serve, lambda: self.log_end, lambda: self.now_s, lambda: self.cpu_s
        )

    def serve(self, request: int) -> None:
        self.served.append(request)
        self.work(PULL_S)

    def work(self, seconds: float) -> None:
        self.cpu_s += seconds
        self.now_s += seconds

    def tick(self, seconds: float = 0.0, sends: int = 0) -> bool:
        self.work(seconds)
        self.log_end += sends
        return self.backlog.serve_some()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.mark.parametrize("tick_s", [30e-6, 600e-6, 5e-3])
def test_beside_sends_a_part_of_their_time_is_used_for_the_backlog(loop: Loop, tick_s: float) -> None:
    for number in range(MAX_WAITING_REQUESTS):
        loop.backlog.wait(number)
    sending = 0.0
    while sending < 2.0:
        assert loop.tick(tick_s, sends=1)
        sending += tick_s
    used = len(loop.served) * PULL_S
    # The saved-up share is limited, so long ticks leave part of it unused.
    assert used == pytest.approx(sending * min(PART, (1e-3 + PULL_S) / tick_s), rel=0.06)
    assert loop.served == list(range(len(loop.served)))


def test_a_busy_machine_takes_the_processor_away_from_sends_and_backlog_alike(loop: Loop) -> None:
    for number in range(10_000):
        loop.backlog.wait(number)
    for _ in range(1000):
        loop.now_s += 10e-3  # other tasks run for 10 ms
        loop.tick(600e-6, sends=1)
    assert len(loop.served) * PULL_S == pytest.approx(0.6 * PART, rel=0.06)


def test_the_loop_is_free_for_the_backlog_when_nothing_is_sent(loop: Loop) -> None:
    loop.tick(1.0)
    for number in range(100):
        loop.backlog.wait(number)
    assert loop.tick()
    assert len(loop.served) == AT_ONCE
    while loop.tick():
        pass
    assert len(loop.served) == 100
    assert not loop.tick()


def test_just_after_a_send_the_loop_looks_for_the_next_one_after_every_pull(loop: Loop) -> None:
    for number in range(1000):
        loop.backlog.wait(number)
    while loop.tick(50e-6, sends=1) and len(loop.served) < 20:
        pass
    before = len(loop.served)
    for count in range(1, 20):
        assert loop.tick(5e-6)
        assert len(loop.served) == before + count
    loop.work(CALM_S)
    before = len(loop.served)
    loop.tick()
    assert len(loop.served) == before + AT_ONCE


def test_what_was_used_without_sends_is_owed_to_a_bounded_amount(loop: Loop) -> None:
    for number in range(MAX_WAITING_REQUESTS):
        loop.backlog.wait(number)
    loop.work(1.0)
    for _ in range(1000):
        loop.tick()
    before, ticks = len(loop.served), 0
    while len(loop.served) == before:
        loop.tick(600e-6, sends=1)
        ticks += 1
    assert 30 < ticks < 60


def test_misses_count_as_work_and_readers_are_bounded(loop: Loop) -> None:
    loop.tick(1.0)
    for number in range(MAX_READERS + 10):
        loop.backlog.missed(("G", "T", number))
    assert len(loop.backlog.readers) == 10
    loop.backlog.wait(1)
    assert loop.tick(600e-6, sends=1)  # the pull waits: the misses have used more than the readers' share


def test_those_who_wait_are_bounded(loop: Loop) -> None:
    assert all(loop.backlog.wait(number) for number in range(MAX_WAITING_REQUESTS))
    assert not loop.backlog.wait(-1)
    loop.tick()
    assert loop.backlog.wait(-2)
    loop.backlog.serve_all()
    assert loop.served == [*range(MAX_WAITING_REQUESTS), -2]


def test_at_the_end_everyone_is_served(loop: Loop) -> None:
    for number in range(100):
        loop.backlog.wait(number)
    loop.backlog.serve_all()
    assert loop.served == list(range(100))
    assert not loop.backlog.serve_some()
