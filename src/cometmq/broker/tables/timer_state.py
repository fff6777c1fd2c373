"""The progress of timer messages, its file timers.json, and the numbers of waiting messages by topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cometmq.protocol.bodies import DataVersion
from cometmq.store import TimerTable

# Even if no message was delivered, timers.json is written whenever the log has grown by this many bytes,
# because the next start must scan the log from the position in the file.
MARK_EVERY = 64 << 20


class TimerState:
    """The last saved progress of the timer messages, and counters."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self.mark = TimerTable()
        self.counts: dict[str, int] = {}
        self._counted_ms: dict[str, int] = {}
        self._began_ms = now_ms()
        # The version of `counts`: the number of changes since the start, and the time of the last change
        self.counted = DataVersion(timestamp=self._began_ms, counter=0, state_version=0)
        self.changes = 0
        self.waiting = self.recalls = 0  # The number of waiting messages, including recalls, and of these
        self.take: Callable[[], TimerTable | None] = lambda: None
        """Returns the current progress of timer messages, or None if it cannot be determined."""
        self._taken = -1  # value of `changes` when `mark` was last set; -1 if `mark` has not been set

    def count(self, topic: str, change: int) -> None:
        """Add `change` to the number of waiting messages that will be delivered to a topic."""
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
        """Return when a topic's number of waiting messages last changed (ms), initially the start time."""
        return self._counted_ms.get(topic, self._began_ms)

    def take_changes(self) -> bool:
        """Set `mark` to the current progress of timer messages. Return whether `mark` must be written now."""
        mark = self.take()
        if mark is None:
            return False
        if self._taken == self.changes and mark.log_position < self.mark.log_position + MARK_EVERY:
            return False
        mark.waiting = dict(self.counts)
        self.mark, self._taken = mark, self.changes
        return True

    def to_table(self) -> dict[str, Any]:
        """Return the saved progress of timer messages, as the content of timers.json."""
        table: dict[str, Any] = msgspec.to_builtins(self.mark)
        return table

    def load(self, table: Mapping[str, Any], log_end: int) -> None:
        """Set the progress and the numbers of waiting messages to the content of timers.json.

        A table that is newer than the log, as a copy beside a restored log can be, has no effect: messages
        that it counts as done because they were moved would be lost.
        """
        mark = TimerTable.from_plain(dict(table))
        self.mark = mark if max(mark.log_position, mark.counted_position) <= log_end else TimerTable()
        self.counts = dict(self.mark.waiting)
