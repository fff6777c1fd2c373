"""The messages that a node is about to send."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cometmq.raft.members import MAX_MEMBERS
from cometmq.raft.messages import AnyMessage

# Maximum number of messages that wait until the state is saved. Further messages are dropped: the protocol
# tolerates lost messages.
MAX_WAITING_MESSAGES = 4 * MAX_MEMBERS


class Outbox:
    """The unsent messages of one member."""

    def __init__(self, group: str, me: str) -> None:
        self._group = group
        self._me = me
        self._waiting: list[AnyMessage] = []

    def send(self, kind: Callable[..., AnyMessage], to: str, **fields: Any) -> None:
        """Queue a message of the class `kind` for another member."""
        self.add([kind(group=self._group, sender=self._me, to=to, **fields)])

    def add(self, messages: Iterable[AnyMessage]) -> None:
        """Queue messages, and drop those that exceed `MAX_WAITING_MESSAGES`."""
        for message in messages:
            if len(self._waiting) < MAX_WAITING_MESSAGES:
                self._waiting.append(message)

    def take(self) -> list[AnyMessage]:
        """Remove and return all queued messages."""
        taken, self._waiting = self._waiting, []
        return taken
