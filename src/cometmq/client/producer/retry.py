"""The rules for retries of failed sends."""

from __future__ import annotations

import msgspec

from cometmq.errors import BrokerError, CometError, NoRouteError, RemotingError, SendTries
from cometmq.message import SendResult
from cometmq.protocol.codes import ResponseCode

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
"""The response codes after which Java's 5.3 client retries a send.

Java's 4.9 client does not retry after SYSTEM_BUSY and GO_AWAY, so a busy broker makes its sends fail.
"""

MOMENTARY_CODES = frozenset({ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.SYSTEM_BUSY})
"""Codes with which a busy broker, or a raft leader in a handoff, refuses to store a message for now."""
FIRST_PAUSE_S = 0.3
"""Seconds before the second try at a broker that refused temporarily.

Each further pause is four times as long. With the default of three tries, the pauses of 0.3 s and 1.2 s are
longer than a raft handoff, which is aborted after one second.
"""


class SendAttempts(msgspec.Struct):
    """The deadline and the tries of one send."""

    deadline: float
    """The deadline in monotonic seconds, on the same clock as the argument `now` of the methods."""
    tries: int
    retry_codes: frozenset[int]
    per_try_s: float | None = None
    outcomes: list[tuple[str, str]] = []
    """The broker name and the outcome of each try so far."""
    route_pause_s: float = 0.0
    """Seconds to wait before the queue of the next try is chosen from the topic's route."""
    broker_pause_s: float = 0.0
    """Seconds to wait before another try at the same broker."""
    in_handoff: bool = False
    """Whether a broker has refused temporarily: the next try then waits if the route contains no master."""
    stored: SendResult | None = None
    """The result of the last try that stored the message, but with another status than SEND_OK."""
    failure: CometError | None = None
    """The error of the last failed try."""

    def timeout_s(self, now: float) -> float:
        """Return the time left, for each try but the last one at most `per_try_s`."""
        left = max(0.0, self.deadline - now)
        if self.per_try_s is not None and len(self.outcomes) + 1 < self.tries:
            return min(left, self.per_try_s)
        return left

    def failed(self, broker_name: str, error: CometError, now: float) -> bool:
        """Record a failed try and return whether another try is allowed.

        It is allowed after a RemotingError, a NoRouteError, or a BrokerError with one of the `retry_codes`,
        before the deadline and the last try. A NoRouteError means that the broker no longer has a master.
        Java's client uses the code 10003 for this case (docs/reference/client.md, Sends and retries).
        """
        self.outcomes.append((broker_name, str(error)))
        self.failure = error
        if isinstance(error, BrokerError) and error.code not in self.retry_codes:
            return False
        return isinstance(error, BrokerError | RemotingError | NoRouteError) and self._may_go_on(now)

    def pause_s(self, error: CometError, now: float) -> float:
        """Set and return the seconds before the next try at the broker, at most a third of those left.

        Without a pause, all tries at a broker that refuses temporarily would fail within milliseconds.
        """
        pause: float = FIRST_PAUSE_S * 4 ** (len(self.outcomes) - 1)
        pause = min(pause, max(0.0, self.deadline - now) / 3)
        self.route_pause_s = pause if self.in_handoff and isinstance(error, NoRouteError) else 0.0
        momentary = isinstance(error, BrokerError) and error.code in MOMENTARY_CODES
        self.in_handoff |= momentary
        self.broker_pause_s = pause if momentary else 0.0
        return self.broker_pause_s

    def stored_without_ok(self, broker_name: str, result: SendResult, now: float) -> bool:
        """Record a try that stored the message without SEND_OK. Return whether another is allowed."""
        self.stored, self.broker_pause_s = result, 0.0
        self.outcomes.append((broker_name, "stored, but not flushed or replicated in time"))
        return self._may_go_on(now)

    def outcome(self, topic: str, took_s: float) -> SendResult:
        """Return the result of the try that stored the message, or raise the error of the last try."""
        if self.stored is not None:
            return self.stored
        failure, self.failure = self.failure, None
        assert failure is not None
        failure.tries = SendTries(topic, took_s, tuple(self.outcomes))  # type: ignore[misc] # of this error alone
        if len(self.outcomes) > 1:
            failure.add_note(str(failure.tries))
        try:
            raise failure
        finally:
            del failure  # breaks the reference cycle between the error and this frame

    def _may_go_on(self, now: float) -> bool:
        return len(self.outcomes) < self.tries and now < self.deadline
