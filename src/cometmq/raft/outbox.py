"""What a node is about to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cometmq.raft.members import MOST_MEMBERS
from cometmq.raft.messages import AnyMessage

# Messages that wait for the state to be saved. Those above it are lost, as any message may be.
MOST_WAITING = 4 * MOST_MEMBERS


class Outbox:
    """Messages of one member that wait."""

    def __init__(self, group: str, me: str) -> None:
        self._group = group
        self._me = me
        self._waiting: list[AnyMessage] = []

    def say(self, kind: Callable[..., AnyMessage], to: str, **fields: Any) -> None:
        """Let a message of this kind wait, to another member."""
        self.add([kind(group=self._group, sender=self._me, to=to, **fields)])

    def add(self, messages: Iterable[AnyMessage]) -> None:
        """Let these wait."""
        for message in messages:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(message)

    def take(self) -> list[AnyMessage]:
        """All of them."""
        taken, self._waiting = self._waiting, []
        return taken
