"""The retry policies of groups."""

from __future__ import annotations

import pytest
from tests.grpc.serving import M

from cometmq.grpc.service.policies import policy_of
from cometmq.protocol.bodies import SubscriptionGroupConfig

DEFAULT_MS = (10_000, 30_000, 7_200_000)


def customized(*delays):
    return {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": list(delays)}}


def exponential(**values):
    return {"type": "EXPONENTIAL", "exponentialRetryPolicy": values}


@pytest.mark.parametrize(
    ("policy", "delays"),
    [
        (None, DEFAULT_MS),
        ({"type": "CUSTOMIZED"}, DEFAULT_MS),
        ({"type": "CUSTOMIZED", "customizedRetryPolicy": "x"}, DEFAULT_MS),
        (customized(), DEFAULT_MS),
        (customized(1, 2, 3, 4, 5), (3, 4, 5)),
        (customized(7), (7, 7, 7)),
        (customized(1, 2, -1, 1 << 80), (1_000, 43_200_000, 43_200_000)),
        ({"type": "EXPONENTIAL"}, (5_000, 10_000, 7_200_000)),
        (exponential(initial=3, max=50, multiplier=4), (3, 12, 50)),
        (exponential(initial="x", max=True), (5_000, 10_000, 7_200_000)),
    ],
)
def test_the_delays_before_retries(policy, delays):
    found = policy_of(SubscriptionGroupConfig("G", group_retry_policy=policy))
    assert tuple(found.delay_ms(retries) for retries in (0, 1, 1_000)) == delays


def test_a_policy_replaces_what_a_client_has_announced():
    message = M.RetryPolicy(max_attempts=5)
    message.customized_backoff.next.add().FromSeconds(9)
    policy_of(None).announce(message)
    delays = [each.ToSeconds() for each in message.customized_backoff.next]
    assert (len(delays), delays[:4], delays[-1]) == (18, [1, 5, 10, 30], 7200)
    policy_of(SubscriptionGroupConfig("G", group_retry_policy={"type": "EXPONENTIAL"})).announce(message)
    backoff = message.exponential_backoff
    assert message.WhichOneof("strategy") == "exponential_backoff"
    assert (backoff.initial.ToSeconds(), backoff.max.ToSeconds(), backoff.multiplier) == (5, 7200, 2)
    assert message.max_attempts == 5
