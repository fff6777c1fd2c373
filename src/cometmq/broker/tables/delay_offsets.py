"""Delay offsets: for each delay level, the offset of the next message to deliver.

Their file is delayOffset.json. The file also contains a log position: the offsets include all deliveries
before it. Apache's broker ignores this field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Even if no offset has changed, delayOffset.json is written whenever the log has grown by this many bytes,
# because the next start must scan the log from the position in the file.
WRITE_EVERY = 64 << 20


class DelayOffsets:
    """The offset of each delay level in its queue of SCHEDULE_TOPIC_XXXX, also of levels without settings."""

    def __init__(self) -> None:
        self._table: dict[int, int] = {}
        self._dirty = False
        self.log_position = 0
        """The log position of the file, as last read or written. Its offsets include earlier deliveries."""
        self.reached: Callable[[], int] = lambda: self.log_position
        """Returns a log position such that the current offsets include all deliveries stored before it."""

    def get(self, level: int) -> int:
        """Return the offset of a delay level's next message to deliver, or 0 before its first delivery."""
        return self._table.get(level, 0)

    def move(self, level: int, offset: int) -> None:
        """Record that all messages of a delay level before this offset have been delivered."""
        self._dirty |= self.get(level) != offset
        self._table[level] = offset

    def take_changes(self) -> bool:
        """Return whether delayOffset.json must be written now, and mark the offsets as unchanged."""
        if not self._dirty and self.reached() < self.log_position + WRITE_EVERY:
            return False
        self._dirty = False
        return True

    def to_table(self) -> dict[str, Any]:
        """Return the offsets in the form of Apache's broker, which does not include `log_position`."""
        return {"offsetTable": {level: offset for level, offset in self._table.items() if offset}}

    def to_file(self) -> dict[str, Any]:
        """Return the content of delayOffset.json, with the current log position."""
        self.log_position = self.reached()
        return {**self.to_table(), "logPosition": self.log_position}

    def replace(self, offsets: Mapping[int, int], log_position: int | None) -> None:
        """Replace the offsets with a master's. `log_position` is None if the master is Apache's broker."""
        self._dirty |= self._table != dict(offsets)
        self._table = dict(offsets)
        self.log_position = log_position or 0

    def load(self, table: Mapping[str, Any]) -> None:
        """Replace the offsets with the content of delayOffset.json, in which levels are strings."""
        self._table = {int(level): int(offset) for level, offset in (table.get("offsetTable") or {}).items()}
        self.log_position = int(table.get("logPosition") or 0)
