"""Writes that wait for slaves: all are answered together when the reports of a tick suffice, or on timeout.

No I/O and no clock. Waits of one tick are one entry: the shell adds it with the tick's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

Token = TypeVar("Token")


class Wait(NamedTuple, Generic[Token]):
    """A write that waits until `deadline` for slaves to have the log up to `position`."""

    position: int
    deadline: float
    token: Token


class ReplicaWaits(Generic[Token]):
    """All waits of a master. Waits for the same number of slaves are in the order of the log.

    They are in the order of their deadlines, too, while the timeout stays the same.
    """

    def __init__(self) -> None:
        self._by_slaves: dict[int, deque[Wait[Token]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_slaves.values()))

    def add(self, slaves: int, position: int, deadline: float, token: Token) -> None:
        """Add a wait of `token` until `slaves` slaves have the log up to `position`."""
        self._by_slaves.setdefault(slaves, deque()).append(Wait(position, deadline, token))

    def reached(self, copies: Callable[[int], int]) -> list[Token]:
        """Remove and return the waits that enough slaves have reached.

        copies: slaves that have a position.
        """
        done = []
        for slaves, waits in self._by_slaves.items():
            while waits and copies(waits[0].position) >= slaves:
                done.append(waits.popleft().token)
        return done

    def expired(self, now: float) -> list[Token]:
        """Remove and return the waits that have timed out."""
        late = []
        for waits in self._by_slaves.values():
            while waits and waits[0].deadline <= now:
                late.append(waits.popleft().token)
        return late

    def next_deadline(self) -> float | None:
        """Return the earliest deadline; None without waits."""
        return min((waits[0].deadline for waits in self._by_slaves.values() if waits), default=None)
