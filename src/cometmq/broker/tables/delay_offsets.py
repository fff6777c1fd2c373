"""Delay offsets: the next offset to deliver of each delay level, and their file delayOffset.json.

The file also says up to where in the log its offsets know of every delivery. Apache's broker does not read
that field, and writes the file without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Without changes the file is written after so many bytes of log: the next start looks through them.
WRITE_EVERY = 64 << 20


class DelayOffsets:
    """Level -> offset in its queue of SCHEDULE_TOPIC_XXXX. Levels that the settings do not know are kept."""

    def __init__(self) -> None:
        self._table: dict[int, int] = {}
        self._dirty = False
        self.log_position = 0
        """As last read or written: what lies before it in the log is no delivery that is missing here."""
        self.reached: Callable[[], int] = lambda: self.log_position
        """Gives that position for the present offsets."""

    def get(self, level: int) -> int:
        """The next offset to deliver; 0 for a level that has delivered nothing."""
        return self._table.get(level, 0)

    def move(self, level: int, offset: int) -> None:
        """Everything before this offset is delivered."""
        self._dirty |= self.get(level) != offset
        self._table[level] = offset

    def take_changes(self) -> bool:
        """Whether the file is to be written."""
        if not self._dirty and self.reached() < self.log_position + WRITE_EVERY:
            return False
        self._dirty = False
        return True

    def to_table(self) -> dict[str, Any]:
        """The offsets alone."""
        return {"offsetTable": {level: offset for level, offset in self._table.items() if offset}}

    def to_file(self) -> dict[str, Any]:
        """The content of the file."""
        self.log_position = self.reached()
        return {**self.to_table(), "logPosition": self.log_position}

    def replace(self, offsets: Mapping[int, int], log_position: int | None) -> None:
        """Take a master's offsets in the place of these. log_position: unknown to Apache's brokers."""
        self._dirty |= self._table != dict(offsets)
        self._table = dict(offsets)
        self.log_position = log_position or 0

    def load(self, table: Mapping[str, Any]) -> None:
        """Replace everything by a file's content; levels may come as text."""
        self._table = {int(level): int(offset) for level, offset in (table.get("offsetTable") or {}).items()}
        self.log_position = int(table.get("logPosition") or 0)
