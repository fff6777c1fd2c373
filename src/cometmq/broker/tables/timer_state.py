"""The progress of timer messages (timers.json), and the number of waiting messages by topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cometmq.protocol.bodies import DataVersion
from cometmq.store import TimerTable

# If the progress does not change, it is written after this many bytes of log, which the next start would
# scan.
MARK_EVERY = 64 << 20


class TimerState:
    """The last saved progress of timer messages, and counters.

    Attributes:
        waiting: The number of waiting messages, including `recalls`.
        counted: The number of changes of the counters since the start, and the time of the last one.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self.mark = TimerTable()
        self.counts: dict[str, int] = {}
        self._counted_ms: dict[str, int] = {}
        self._began_ms = now_ms()
        self.counted = DataVersion(timestamp=self._began_ms, counter=0, state_version=0)
        self.changes = 0
        self.waiting = self.recalls = 0
        self.take: Callable[[], TimerTable | None] = lambda: None
        """Returns the current progress of timer messages, None if it cannot be determined."""
        self._taken = -1  # the number of changes included in the last progress

    def count(self, topic: str, change: int) -> None:
        """Change the number of waiting messages of a topic."""
        now_ms = self._now_ms()
        count = self.counts.get(topic, 0) + change
        if count > 0:
            self.counts[topic], self._counted_ms[topic] = count, now_ms
        else:
            self.counts.pop(topic, None)
            self._counted_ms.pop(topic, None)
        self.counted = DataVersion(timestamp=now_ms, counter=self.counted.counter + 1, state_version=0)
        self.changes += 1

    def counted_ms(self, topic: str) -> int:
        """Return when a topic's counter last changed, or the start time."""
        return self._counted_ms.get(topic, self._began_ms)

    def take_mark(self) -> bool:
        """Record the current progress for the file. Return False if it is unchanged or unknown."""
        mark = self.take()
        if mark is None:
            return False
        if self._taken == self.changes and mark.log_position < self.mark.log_position + MARK_EVERY:
            return False
        mark.waiting = dict(self.counts)
        self.mark, self._taken = mark, self.changes
        return True

    def to_table(self) -> dict[str, Any]:
        """Return the content of the file."""
        table: dict[str, Any] = msgspec.to_builtins(self.mark)
        return table

    def load(self, table: Mapping[str, Any]) -> None:
        """Continue with a file's content."""
        self.mark = TimerTable.from_plain(dict(table))
        self.counts = dict(self.mark.waiting)
