"""The retry policy in a group's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.bodies.retry_policy import policy_of

MAX_MS = 43_200_000


def delays(stored: Any, *retries: int) -> list[int]:
    policy = policy_of(SubscriptionGroupConfig("g", group_retry_policy=stored))
    return [policy.delay_ms(each) for each in retries]


def customized(*listed: Any) -> dict[str, Any]:
    return {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": list(listed)}}


def exponential(**values: Any) -> dict[str, Any]:
    return {"type": "EXPONENTIAL", "exponentialRetryPolicy": values}


@pytest.mark.parametrize(
    "stored",
    [
        None,
        {"type": "CUSTOMIZED"},
        {"type": "UNHEARD_OF"},
        {"type": 5},
        {"customizedRetryPolicy": "x"},
        {"customizedRetryPolicy": {"next": "1000"}},
        customized(),
        customized(1, 2, -3),
        customized(1, 2, True),
        exponential(initial=-1),
        exponential(initial="x"),
        exponential(multiplier=0),
        exponential(multiplier=1 << 62),
    ],
    ids=str,
)
def test_without_a_valid_policy_the_delays_are_rocketmqs(stored: Any) -> None:
    assert delays(stored, 0, 1, 2, 1_000) == [10_000, 30_000, 60_000, 7_200_000]


def test_listed_delays_begin_with_the_third() -> None:
    assert delays(customized(1, 2, 3, 4, 5), 0, 1, 2, 3) == [3, 4, 5, 5]
    assert delays(customized(7), 0, 9) == [7, 7]
    assert delays(customized(1, 2, 0, 9), 0, 1) == [0, 9]


def test_exponential_delays_grow_up_to_the_maximum() -> None:
    assert delays(exponential(initial=3, max=50, multiplier=4), 0, 1, 2, 1_000) == [3, 12, 48, 50]
    assert delays({"type": "EXPONENTIAL"}, 0, 1, 1_000) == [5_000, 10_000, 7_200_000]
    assert delays(exponential(initial=9, multiplier=1), 200) == [9]


def test_no_delay_is_longer_than_a_lease() -> None:
    assert delays(customized(1, 2, 5, MAX_MS + 1, 1 << 80), 0, 1, 2) == [5, MAX_MS, MAX_MS]
    assert delays(exponential(initial=1 << 80, max=1 << 80), 0, 1) == [MAX_MS, MAX_MS]
