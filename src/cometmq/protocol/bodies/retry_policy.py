"""The retry policy of a consumer group: how long a failed message waits before its next delivery.

Brokers store it as `groupRetryPolicy` and leave it to consumers that lease messages
(docs/reference/storage.md, Send back): the endpoint for 5.x clients announces it to them, and CometMQ's own
consumers read it.

An administrator may store anything. A policy with an invalid part counts as missing, because a list in which
some delays were replaced would not be what the administrator has set. A delay that is longer than a lease can
last becomes the maximum.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec

from cometmq.protocol.bodies.route import SubscriptionGroupConfig

DELAY_LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""The delays of RocketMQ's delay levels 1 to 18 in seconds, which are the default delays of retries."""
FIRST_RETRY = 2
"""The index of the first retry's delay in a list of delays. RocketMQ skips the two shortest."""
MAX_DELAY_MS = 12 * 3_600_000
"""The maximum delay in ms: the maximum duration of a lease."""
MAX_DELAYS = 256
_MAX_EXPONENT = 32

Number = Annotated[int, msgspec.Meta(ge=0)]


class RetryPolicy(NamedTuple):
    """A list of delays or, if it is empty, delays that grow exponentially. All times are in ms."""

    delays: tuple[int, ...] = ()
    initial: int = 0
    maximum: int = 0
    multiplier: int = 1

    def delay_ms(self, retries: int) -> int:
        """Return the delay before the next delivery of a message that was delivered again `retries` times."""
        if self.delays:
            return self.delays[min(retries + FIRST_RETRY, len(self.delays) - 1)]
        return min(self.maximum, self.initial * int(self.multiplier ** min(retries, _MAX_EXPONENT)))


DEFAULT = RetryPolicy(tuple(1_000 * seconds for seconds in DELAY_LEVELS_S))


class _Exponential(msgspec.Struct):
    initial: Number = 5_000
    max: Number = 7_200_000
    multiplier: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 2


class _Customized(msgspec.Struct):
    next: list[Number] = []


class _Stored(msgspec.Struct, rename="camel"):
    """The JSON form of a policy. `type` names the field that applies."""

    type: Literal["CUSTOMIZED", "EXPONENTIAL"] = "CUSTOMIZED"
    exponential_retry_policy: _Exponential | None = None
    customized_retry_policy: _Customized | None = None


def policy_of(group: SubscriptionGroupConfig | None) -> RetryPolicy:
    """Return the retry policy of a group, RocketMQ's own for a group without a valid one."""
    try:
        stored = msgspec.convert((group and group.group_retry_policy) or {}, _Stored)
    except msgspec.ValidationError:
        return DEFAULT
    if stored.type == "EXPONENTIAL":
        found = stored.exponential_retry_policy or _Exponential()
        initial, maximum = min(found.initial, MAX_DELAY_MS), min(found.max, MAX_DELAY_MS)
        return RetryPolicy((), initial, maximum, found.multiplier)
    delays = [] if stored.customized_retry_policy is None else stored.customized_retry_policy.next
    return RetryPolicy(tuple(min(each, MAX_DELAY_MS) for each in delays[:MAX_DELAYS])) if delays else DEFAULT
