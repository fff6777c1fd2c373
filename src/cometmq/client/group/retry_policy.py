"""The retry policy of a consumer group: how often and when a failed message is delivered again.

Brokers store it as `groupRetryPolicy`, and leave it to consumers that lease messages
(docs/reference/storage.md, Send back).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cometmq.protocol.bodies import RETRY_MAX_TIMES, SubscriptionGroupConfig

DELAY_LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""The delays of RocketMQ's delay levels 1 to 18 in seconds."""
_FIRST_RETRY = 2
"""The index of the first retry's delay in a list of delays. RocketMQ skips the two shortest."""
_MAX_DELAY_MS = 43_200_000
_MAX_DELAYS = 100


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The retry policy of a group.

    Attributes:
        max_times: The maximum number of retries. After that many, a message that fails is a dead letter.
        delays_s: The delay before each retry in seconds. The last one also applies to all further retries.
    """

    max_times: int = RETRY_MAX_TIMES
    delays_s: Sequence[float] = DELAY_LEVELS_S[_FIRST_RETRY:]

    def delay_s(self, retries: int) -> float:
        """Return the delay in seconds before the next retry of a message that was retried `retries` times."""
        return self.delays_s[min(retries, len(self.delays_s) - 1)]


class _Exponential(msgspec.Struct):
    initial: int = 5_000
    max: int = 7_200_000
    multiplier: int = 2

    def delays_ms(self) -> list[int]:
        delays = [self.initial]
        while len(delays) < _MAX_DELAYS and delays[-1] < min(self.max, _MAX_DELAY_MS):
            delays.append(delays[-1] * self.multiplier)
        return [min(each, self.max) for each in delays]


class _Customized(msgspec.Struct):
    next: list[int] = []

    def delays_ms(self) -> list[int]:
        return self.next[_FIRST_RETRY:] or self.next[-1:]


class _Stored(msgspec.Struct, rename="camel"):
    """The JSON form of a policy. `type` names the field that applies."""

    type: str = "CUSTOMIZED"
    exponential_retry_policy: _Exponential | None = None
    customized_retry_policy: _Customized | None = None


def policy_of(config: SubscriptionGroupConfig) -> RetryPolicy:
    """Return the policy of a group. Delays that are absent or invalid are replaced by the default."""
    try:
        stored = msgspec.convert(config.group_retry_policy or {}, _Stored)
    except msgspec.ValidationError:
        stored = _Stored()
    exponential = stored.type == "EXPONENTIAL"
    strategy = stored.exponential_retry_policy if exponential else stored.customized_retry_policy
    delays_ms = strategy.delays_ms()[:_MAX_DELAYS] if strategy is not None else []
    if not delays_ms or not all(0 <= each <= _MAX_DELAY_MS for each in delays_ms):
        return RetryPolicy(config.retry_max_times)
    return RetryPolicy(config.retry_max_times, [each / 1000 for each in delays_ms])
