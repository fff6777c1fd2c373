"""When a failed send is tried again."""

from __future__ import annotations

import msgspec

from cometmq.errors import BrokerError, CometError, NoRouteError, RemotingError
from cometmq.protocol.codes import ResponseCode

__all__ = ["RETRY_RESPONSE_CODES", "SendAttempts"]

RETRY_RESPONSE_CODES = frozenset(
    {
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.GO_AWAY,
    }
)
"""Java 5.3's list. 4.9 lacks SYSTEM_BUSY and GO_AWAY, which is why a busy broker fails its users' sends."""

MOMENTARY_CODES = frozenset({ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY})
"""Refusals of a broker that stores nothing for a moment: a raft leader during a handoff, a busy broker."""
FIRST_PAUSE_S = 0.3
"""Pause before the second try at a broker that refused for a moment. Each further pause is four times as
long: the three tries of the defaults outlast a raft handoff, which is aborted after one second."""


class SendAttempts(msgspec.Struct):
    """One send call: its budget of time over all tries, and what became of the tries."""

    deadline: float
    """Monotonic seconds, the clock of every `now` below."""
    tries: int
    retry_codes: frozenset[int]
    per_try_s: float | None = None
    outcomes: list[tuple[str, str]] = []
    """(broker name, what happened) of each try so far."""

    def timeout_s(self, now: float) -> float:
        """Seconds for the next try: what is left, at most `per_try_s` while more tries remain."""
        left = max(0.0, self.deadline - now)
        if self.per_try_s is not None and len(self.outcomes) + 1 < self.tries:
            return min(left, self.per_try_s)
        return left

    def failed(self, broker_name: str, error: CometError, now: float) -> bool:
        """Note a failure; whether another try is allowed. A NoRouteError says that the broker has no master
        (any more), as Java's 10003 does (docs/reference/client.md, Sends and retries)."""
        self.outcomes.append((broker_name, str(error)))
        if isinstance(error, BrokerError) and error.code not in self.retry_codes:
            return False
        return isinstance(error, BrokerError | RemotingError | NoRouteError) and self._may_go_on(now)

    def pause_s(self, error: CometError, now: float) -> float:
        """Return the seconds to wait before the next try at the broker that raised `error`.

        Without a pause all tries at a broker that refuses for a moment would fail within milliseconds. The
        pause takes at most a third of the remaining time.
        """
        if not isinstance(error, BrokerError) or error.code not in MOMENTARY_CODES:
            return 0.0
        wanted: float = FIRST_PAUSE_S * 4 ** (len(self.outcomes) - 1)
        return min(wanted, max(0.0, self.deadline - now) / 3)

    def stored_badly(self, broker_name: str, now: float) -> bool:
        """Note a try that stored the message without SEND_OK; whether another try is allowed."""
        self.outcomes.append((broker_name, "stored, but not flushed or replicated in time"))
        return self._may_go_on(now)

    def _may_go_on(self, now: float) -> bool:
        return len(self.outcomes) < self.tries and now < self.deadline
