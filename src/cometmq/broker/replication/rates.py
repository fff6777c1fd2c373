"""The byte rate of a connection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Rate:
    """Bytes of the last whole second with traffic, for status output. Times in seconds."""

    _second: int = 0
    _bytes: int = 0
    _before: int = 0

    def add(self, now: float, size: int) -> None:
        """Count `size` transferred bytes."""
        self._begin(int(now))
        self._bytes += size

    def bytes_a_second(self, now: float) -> int:
        """Return the number of bytes in the previous second."""
        self._begin(int(now))
        return self._before

    def _begin(self, second: int) -> None:
        if second != self._second:
            self._before = self._bytes if second == self._second + 1 else 0
            self._second, self._bytes = second, 0
