"""The choice of the queue for a message: round robin, the avoidance of slow brokers, and user selectors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence

from cometmq.message import Message, MessageQueue
from cometmq.protocol.properties.values import java_hash

QueueSelector = Callable[[Sequence[MessageQueue], Message, object], MessageQueue]
"""A function that selects a queue. Arguments: the topic's queues, the message, the `argument` of `send`."""

_COUNTER_MASK = 0x7FFFFFFF


_LATENCY_S = (0.05, 0.1, 0.55, 1.8, 3.0, 5.0, 15.0)
_AVOIDED_FOR_S = (0.0, 0.0, 0.0, 2.0, 5.0, 6.0, 10.0, 30.0)
"""Seconds for which a broker is avoided after a try that took at least N of `_LATENCY_S`: entry N."""
_AS_SLOW_AS_S = 10.0
"""The latency, in seconds, that is recorded for a failed try."""
_MAX_BROKERS = 10_000
"""Maximum number of brokers whose avoidance is remembered. No route contains so many brokers."""


class SlowBrokers:
    """The brokers that sends avoid for a while because a try was slow or failed (sendLatencyFaultEnable).

    Times are seconds of a monotonic clock. After one timeout, Java's 4.9 client avoids a broker for ten
    minutes, the 5.x client for ten seconds. This class uses the table of 5.x (docs/reference/client.md, Sends
    and retries).
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        """The time until which each broker is avoided, by broker name."""

    def note(self, broker_name: str, took_s: float, now: float, *, failed: bool = False) -> None:
        """Record the latency of a try. A quick answer does not shorten an avoidance in progress."""
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


class RoundRobin:
    """The choice of queues in round-robin order. A random `start` spreads the producers."""

    __slots__ = ("_counter",)

    def __init__(self, start: int) -> None:
        self._counter = start

    def select(
        self, queues: Sequence[MessageQueue], failed: str | None = None, slow: Collection[str] = ()
    ) -> MessageQueue:
        """Return the next queue, if possible of a broker other than `failed` and those in `slow`."""
        count = len(queues)
        counter = self._counter
        if failed is not None or slow:
            for unwanted in ({failed, *slow}, {failed}):
                for step in range(1, count + 1):
                    queue = queues[(counter + step) % count]
                    if queue.broker_name not in unwanted:
                        self._counter = (counter + step) & _COUNTER_MASK
                        return queue
        self._counter = counter = (counter + 1) & _COUNTER_MASK
        return queues[counter % count]


def select_by_hash(queues: Sequence[MessageQueue], message: Message | None, argument: object) -> MessageQueue:
    """Select the queue by the hash of the argument, as Java's SelectMessageQueueByHash does.

    Equal arguments select the same queue as long as the queues of the topic do not change.

    Args:
        queues: The writable queues of the topic.
        message: The message to send. It is not used.
        argument: A str, bool or int, hashed as in Java. Other arguments are hashed by their text.
    """
    del message
    # Java computes Math.abs(hash % n), where % keeps the sign of the dividend. The result is |hash| mod n.
    return queues[abs(_java_hash_of(argument)) % len(queues)]


def _java_hash_of(argument: object) -> int:
    if isinstance(argument, bool):
        return 1231 if argument else 1237
    if isinstance(argument, int):
        if -0x80000000 <= argument <= 0x7FFFFFFF:
            return argument  # the result of Java's Integer.hashCode
        folded = (argument ^ (argument >> 32)) & 0xFFFFFFFF  # Java's Long.hashCode, but unsigned
        return folded - 0x100000000 if folded & 0x80000000 else folded
    return java_hash(str(argument))
