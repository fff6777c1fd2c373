"""Slow or failed brokers, which sends avoid for a while (sendLatencyFaultEnable).

Times are seconds of a monotonic clock. Java's 4.9 avoids a broker for ten minutes after one timeout, 5.x for
ten seconds. This module uses the table of 5.x (docs/reference/client.md, Sends and retries).
"""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["SlowBrokers"]

_LATENCY_S = (0.05, 0.1, 0.55, 1.8, 3.0, 5.0, 15.0)
_AVOIDED_FOR_S = (0.0, 0.0, 0.0, 2.0, 5.0, 6.0, 10.0, 30.0)
"""Seconds of avoidance, by the number of latency thresholds that a try has reached."""
_AS_SLOW_AS_S = 10.0
"""The latency that a failure counts as, in seconds."""
_MAX_BROKERS = 10_000
"""Maximum number of remembered brokers, more than one route contains."""


class SlowBrokers:
    """The time until which each broker is avoided, by broker name."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def note(self, broker_name: str, took_s: float, now: float, *, failed: bool = False) -> None:
        """Record a try. A quick answer does not shorten an earlier avoidance."""
        avoided_s = _AVOIDED_FOR_S[bisect_right(_LATENCY_S, _AS_SLOW_AS_S if failed else took_s)]
        until = now + avoided_s
        if not avoided_s or until <= self._until.get(broker_name, 0.0):
            return
        if len(self._until) >= _MAX_BROKERS:
            self._until = {name: end for name, end in self._until.items() if end > now}
        if len(self._until) < _MAX_BROKERS:
            self._until[broker_name] = until

    def avoided(self, now: float) -> frozenset[str]:
        """Return the brokers to avoid now."""
        if not self._until:
            return frozenset()
        return frozenset(name for name, until in self._until.items() if until > now)
