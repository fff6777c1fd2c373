"""The retry policy in a group's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.client.group.retry_policy import RetryPolicy, policy_of
from cometmq.protocol.bodies import SubscriptionGroupConfig


def policy(stored: dict[str, Any] | None) -> RetryPolicy:
    return policy_of(SubscriptionGroupConfig("g", retry_max_times=5, group_retry_policy=stored))


def delays(found: RetryPolicy, count: int) -> list[float]:
    return [found.delay_s(retries) for retries in range(count)]


@pytest.mark.parametrize(
    "stored",
    [
        None,
        {"type": "CUSTOMIZED"},
        {"type": "EXPONENTIAL"},
        {"type": "UNHEARD_OF"},
        {"type": 5},
        {"customizedRetryPolicy": {"next": []}},
        {"customizedRetryPolicy": {"next": [1, 2, -3]}},
        {"customizedRetryPolicy": {"next": [1, 2, 43_200_001]}},
        {"customizedRetryPolicy": {"next": "1000"}},
        {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": -1}},
        {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"max": 1 << 62, "multiplier": 1 << 62}},
    ],
    ids=str,
)
def test_without_a_valid_policy_the_delays_are_rocketmqs(stored: dict[str, Any] | None) -> None:
    found = policy(stored)
    assert found.max_times == 5
    assert delays(found, 3) == [10, 30, 60]
    assert delays(found, 40)[-1] == 7200


def test_listed_delays_begin_with_the_third() -> None:
    found = policy({"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1, 2, 3000, 4500]}})
    assert delays(found, 4) == [3, 4.5, 4.5, 4.5]
    assert delays(policy({"customizedRetryPolicy": {"next": [1500]}}), 2) == [1.5, 1.5]


def test_exponential_delays_grow_up_to_the_maximum() -> None:
    stored = {"initial": 1000, "max": 5000, "multiplier": 2}
    found = policy({"type": "EXPONENTIAL", "exponentialRetryPolicy": stored})
    assert delays(found, 5) == [1, 2, 4, 5, 5]
    still = policy({"type": "EXPONENTIAL", "exponentialRetryPolicy": {**stored, "multiplier": 1}})
    assert delays(still, 200) == [1] * 200
