"""Delay offsets: the next offset to deliver of each delay level, and the file delayOffset.json.

The file also contains the log position up to which the offsets cover every delivery. Apache's broker neither
reads nor writes that field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# If the offsets do not change, the file is written after this many bytes of log, which the next start would
# scan.
WRITE_EVERY = 64 << 20


class DelayOffsets:
    """The offset of each level in its queue of SCHEDULE_TOPIC_XXXX. Levels outside the settings are kept."""

    def __init__(self) -> None:
        self._table: dict[int, int] = {}
        self._dirty = False
        self.log_position = 0
        """The log position last read or written: the offsets include every delivery before it."""
        self.reached: Callable[[], int] = lambda: self.log_position
        """Returns the log position for the current offsets."""

    def get(self, level: int) -> int:
        """Return the next offset to deliver, 0 for a level without deliveries."""
        return self._table.get(level, 0)

    def move(self, level: int, offset: int) -> None:
        """Record that all messages before this offset are delivered."""
        self._dirty |= self.get(level) != offset
        self._table[level] = offset

    def take_changes(self) -> bool:
        """Return whether the file must be written."""
        if not self._dirty and self.reached() < self.log_position + WRITE_EVERY:
            return False
        self._dirty = False
        return True

    def to_table(self) -> dict[str, Any]:
        """Return the offsets without the log position."""
        return {"offsetTable": {level: offset for level, offset in self._table.items() if offset}}

    def to_file(self) -> dict[str, Any]:
        """Return the content of the file."""
        self.log_position = self.reached()
        return {**self.to_table(), "logPosition": self.log_position}

    def replace(self, offsets: Mapping[int, int], log_position: int | None) -> None:
        """Replace the offsets by a master's. `log_position` is None from Apache's brokers."""
        self._dirty |= self._table != dict(offsets)
        self._table = dict(offsets)
        self.log_position = log_position or 0

    def load(self, table: Mapping[str, Any]) -> None:
        """Replace the offsets by a file's content, whose levels may be text."""
        self._table = {int(level): int(offset) for level, offset in (table.get("offsetTable") or {}).items()}
        self.log_position = int(table.get("logPosition") or 0)
