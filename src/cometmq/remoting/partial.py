"""Frames that have not come whole, and answers that are not taken: what all connections of a loop keep of
them, bounded together.

A connection may keep a frame's beginning for a while; thousands that do so must not take the memory of all.
Beyond the budget the one whose frame is the oldest is cut: an honest peer's frame is whole within seconds. In
the same way the one goes whose answers have waited longest.
"""

from __future__ import annotations

from typing import Protocol


class Partial(Protocol):
    """A connection, as far as this table knows it; see there."""

    def cut(self, why: str) -> None: ...


class PartialFrames:
    """Connection -> bytes of its buffer, the oldest frame first. what: these, for the log."""

    __slots__ = ("_kept", "_what", "total")

    def __init__(self, what: str = "half-sent frames") -> None:
        self._kept: dict[Partial, int] = {}
        self._what = what
        self.total = 0

    def keep(self, connection: Partial, size: int, most: int, fresh: bool) -> None:
        """`connection` has a buffer of `size` bytes. most: bytes of all together; fresh: its frame is not the
        one that it had when this was called last."""
        kept = self._kept
        self.total += size - (kept.pop(connection, 0) if fresh else kept.get(connection, 0))
        kept[connection] = size
        while self.total > most:
            oldest = next(iter(kept))
            self.drop(oldest)
            oldest.cut(f"{self._what} of all connections take more than {most} bytes")

    def drop(self, connection: Partial) -> None:
        """`connection` has no buffer any more; one that had none is ignored."""
        self.total -= self._kept.pop(connection, 0)
