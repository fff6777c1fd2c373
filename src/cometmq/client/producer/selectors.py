"""The choice of a queue for a message: round robin that avoids a failed broker, and selectors for users."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from cometmq.message import Message, MessageQueue
from cometmq.protocol.properties.values import java_hash

__all__ = ["QueueSelector", "RoundRobin", "select_by_hash"]

QueueSelector = Callable[[Sequence[MessageQueue], Message, object], MessageQueue]
"""A function that selects one of the queues of a topic for a message. The last argument is that of `send`."""

_COUNTER_MASK = 0x7FFFFFFF


class RoundRobin:
    """The round-robin choice of a producer. A random start avoids that many producers use the same queues."""

    __slots__ = ("_counter",)

    def __init__(self, start: int) -> None:
        self._counter = start

    def select(
        self, queues: Sequence[MessageQueue], failed: str | None = None, slow: Collection[str] = ()
    ) -> MessageQueue:
        """Return the next queue, avoiding the broker of the failed try and slow brokers if possible."""
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
        message: The message to send. It has no influence.
        argument: A str, bool or int, hashed as in Java. Other arguments are hashed by their text.

    Returns:
        One of the queues.
    """
    del message
    # Java's % keeps the sign of the dividend, and the absolute value follows: the result is |hash| mod n.
    return queues[abs(_java_hash_of(argument)) % len(queues)]


def _java_hash_of(argument: object) -> int:
    if isinstance(argument, bool):
        return 1231 if argument else 1237
    if isinstance(argument, int):
        if -0x80000000 <= argument <= 0x7FFFFFFF:
            return argument  # Integer.hashCode
        folded = (argument ^ (argument >> 32)) & 0xFFFFFFFF  # Long.hashCode
        return folded - 0x100000000 if folded & 0x80000000 else folded
    return java_hash(str(argument))
