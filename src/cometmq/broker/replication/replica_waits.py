"""Writes that wait for slaves: answered together when the reports of a tick say so, or their time is over.

No I/O in here, and no clock. Waits of one tick are one entry: the shell adds it with the tick's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

Token = TypeVar("Token")


class Wait(NamedTuple, Generic[Token]):
    """Who waits for slaves to have the log up to `position`, until `deadline`."""

    position: int
    deadline: float
    token: Token


class ReplicaWaits(Generic[Token]):
    """All waits of a master. Those for as many slaves are in the order of the log, and of their deadlines as
    long as the time-out stays what it is."""

    def __init__(self) -> None:
        self._by_slaves: dict[int, deque[Wait[Token]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_slaves.values()))

    def add(self, slaves: int, position: int, deadline: float, token: Token) -> None:
        """`token` waits until so many slaves have the log up to `position`."""
        self._by_slaves.setdefault(slaves, deque()).append(Wait(position, deadline, token))

    def reached(self, copies: Callable[[int], int]) -> list[Token]:
        """The waits that are over, by the number of slaves that have the log up to a position."""
        done = []
        for slaves, waits in self._by_slaves.items():
            while waits and copies(waits[0].position) >= slaves:
                done.append(waits.popleft().token)
        return done

    def expired(self, now: float) -> list[Token]:
        """The waits whose time is over."""
        late = []
        for waits in self._by_slaves.values():
            while waits and waits[0].deadline <= now:
                late.append(waits.popleft().token)
        return late

    def next_deadline(self) -> float | None:
        """When the first one's time will be over; None without any."""
        return min((waits[0].deadline for waits in self._by_slaves.values() if waits), default=None)
