"""How long slow brokers are left alone."""

from __future__ import annotations

import pytest

from cometmq.client.producer.latency import SlowBrokers


@pytest.mark.parametrize(
    ("took_s", "avoided_s"),
    [(0.04, 0), (0.5, 0), (0.55, 2), (1.7, 2), (1.8, 5), (3.0, 6), (5.0, 10), (14.9, 10), (15.0, 30)],
)
def test_a_slow_broker_is_left_alone_by_how_slow_it_was(took_s: float, avoided_s: float) -> None:
    slow = SlowBrokers()
    slow.note("a", took_s, now=100.0)
    if avoided_s:
        assert slow.avoided(100.0 + avoided_s - 0.01) == {"a"}
    assert slow.avoided(100.0 + avoided_s) == set()


def test_a_failure_counts_as_ten_seconds() -> None:
    slow = SlowBrokers()
    slow.note("a", 0.0, now=0.0, failed=True)
    slow.note("b", 0.6, now=0.0)
    assert (slow.avoided(1.9), slow.avoided(2.0), slow.avoided(10.0)) == ({"a", "b"}, {"a"}, set())


def test_a_quick_answer_does_not_shorten_the_time() -> None:
    slow = SlowBrokers()
    slow.note("a", 20.0, now=0.0)
    slow.note("a", 0.01, now=1.0)
    slow.note("a", 0.6, now=1.0)
    assert slow.avoided(29.0) == {"a"}


def test_the_table_is_bounded() -> None:
    slow = SlowBrokers()
    for number in range(10_500):
        slow.note(f"b{number}", 20.0, now=0.0)
    assert len(slow.avoided(0.0)) == 10_000
    slow.note("new", 20.0, now=31.0)  # those before are over
    assert slow.avoided(31.0) == {"new"}
