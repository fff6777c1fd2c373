"""Which queue a message goes to: round robin that avoids a failed broker, and selectors a user names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from cometmq.message import Message, MessageQueue
from cometmq.protocol.properties.values import java_hash

__all__ = ["QueueSelector", "RoundRobin", "select_by_hash"]

QueueSelector = Callable[[Sequence[MessageQueue], Message, object], MessageQueue]
"""(queues of the topic, message, the caller's argument) -> one of the queues."""

_COUNTER_MASK = 0x7FFFFFFF


class RoundRobin:
    """One counter per producer; start it at random, so that many producers do not march in step."""

    __slots__ = ("_counter",)

    def __init__(self, start: int) -> None:
        self._counter = start

    def select(
        self, queues: Sequence[MessageQueue], failed: str | None = None, slow: Collection[str] = ()
    ) -> MessageQueue:
        """The next queue; after a failure the next one on another broker than the one that failed, and then
        or without a failure on none of the slow ones, if there is such a broker."""
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
    """The same argument always gives the same queue, and the same one that Java's SelectMessageQueueByHash
    gives.

    Java's meaning is known for str, bool and int; any other argument is hashed by its text.
    """
    del message
    # Java's % keeps the sign of the dividend and the absolute value follows: that is |hash| mod n.
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
