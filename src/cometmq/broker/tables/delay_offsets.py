"""Delay offsets: the next offset to deliver of each delay level, and their file delayOffset.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DelayOffsets:
    """Level -> offset in its queue of SCHEDULE_TOPIC_XXXX. Levels that the settings do not know are kept."""

    def __init__(self) -> None:
        self._table: dict[int, int] = {}
        self.dirty = False

    def get(self, level: int) -> int:
        """The next offset to deliver; 0 for a level that has delivered nothing."""
        return self._table.get(level, 0)

    def move(self, level: int, offset: int) -> None:
        """Everything before this offset is delivered."""
        self.dirty |= self.get(level) != offset
        self._table[level] = offset

    def to_table(self) -> dict[str, Any]:
        """The content of the file, and of the answer to GET_ALL_DELAY_OFFSET."""
        return {"offsetTable": {level: offset for level, offset in self._table.items() if offset}}

    def load(self, table: Mapping[str, Any]) -> None:
        """Replace everything by a file's content; levels may come as text."""
        self._table = {int(level): int(offset) for level, offset in (table.get("offsetTable") or {}).items()}
