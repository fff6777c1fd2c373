"""The total size of incomplete frames and of unsent responses of all connections of a loop.

A connection may keep the beginning of a frame for a while, but thousands of them must not fill the memory.
Above the limit, the connection with the oldest frame is aborted: an honest peer's frame is complete within
seconds. In the same way, the connection whose responses have waited longest is aborted.
"""

from __future__ import annotations

from typing import Protocol


class Partial(Protocol):
    """The part of a connection that this table uses."""

    def cut(self, why: str) -> None: ...


class PartialFrames:
    """The buffered bytes by connection, the oldest frame first. `what` names them in the log."""

    __slots__ = ("_kept", "_what", "total")

    def __init__(self, what: str = "half-sent frames") -> None:
        self._kept: dict[Partial, int] = {}
        self._what = what
        self.total = 0

    def keep(self, connection: Partial, size: int, most: int, fresh: bool) -> None:
        """Record that `connection` has a buffer of `size` bytes.

        Args:
            connection: The connection.
            size: The size of its buffer in bytes.
            most: The limit for all connections together in bytes.
            fresh: Whether its frame is another one than at the previous call.
        """
        kept = self._kept
        self.total += size - (kept.pop(connection, 0) if fresh else kept.get(connection, 0))
        kept[connection] = size
        while self.total > most:
            oldest = next(iter(kept))
            self.drop(oldest)
            oldest.cut(f"{self._what} of all connections take more than {most} bytes")

    def drop(self, connection: Partial) -> None:
        """Record that `connection` has no buffer. An unknown connection is ignored."""
        self.total -= self._kept.pop(connection, 0)
