"""The delays between the deliveries of a message to a group: its retry policy (`groupRetryPolicy`).

Push consumers receive the policy with their settings, and give a message that they failed to consume back
with the delay for its number of deliveries. The defaults are those of Apache's proxy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cometmq.broker.pop.checks import MAX_INVISIBLE_MS
from cometmq.protocol.bodies import SubscriptionGroupConfig

DELAYS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""The delays of a group without a policy of its own: RocketMQ's delay levels."""
FIRST_RETRY = 2
"""The index of the delay before the first retry, as the first two delay levels are not used for retries."""
MAX_DELAYS = 256


class RetryPolicy(NamedTuple):
    """A retry policy: a list of delays, or delays that grow exponentially. All times are in ms.

    Attributes:
        delays: The list; empty if the delays grow exponentially.
    """

    delays: tuple[int, ...]
    initial: int = 0
    maximum: int = 0
    multiplier: int = 1

    def delay_ms(self, retries: int) -> int:
        """Return the delay before the next delivery of a message that was delivered again `retries` times."""
        if self.delays:
            return self.delays[min(retries + FIRST_RETRY, len(self.delays) - 1)]
        return min(self.maximum, self.initial * int(self.multiplier ** min(retries, 32)))

    def announce(self, message: Any) -> None:
        """Set the delays in a `RetryPolicy` message."""
        if self.delays:
            following = message.customized_backoff.next
            del following[:]
            for delay in self.delays:
                following.add().FromMilliseconds(delay)
            return
        backoff = message.exponential_backoff
        backoff.initial.FromMilliseconds(self.initial)
        backoff.max.FromMilliseconds(self.maximum)
        backoff.multiplier = self.multiplier


def policy_of(group: SubscriptionGroupConfig | None) -> RetryPolicy:
    """Return the retry policy of a group. Invalid values count as missing: an administrator may set any."""
    given = (group and group.group_retry_policy) or {}
    if given.get("type") == "EXPONENTIAL":
        values = _mapping(given.get("exponentialRetryPolicy"))
        return RetryPolicy(
            (),
            _number(values.get("initial"), 5_000, MAX_INVISIBLE_MS),
            _number(values.get("max"), 7_200_000, MAX_INVISIBLE_MS),
            _number(values.get("multiplier"), 2, 1_000),
        )
    listed = _mapping(given.get("customizedRetryPolicy")).get("next")
    if isinstance(listed, list) and listed:
        return RetryPolicy(tuple(_number(each, 1_000, MAX_INVISIBLE_MS) for each in listed[:MAX_DELAYS]))
    return RetryPolicy(tuple(1_000 * seconds for seconds in DELAYS_S))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any, default: int, maximum: int) -> int:
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return min(value, maximum) if valid else default
