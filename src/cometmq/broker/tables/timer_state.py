"""How far timer messages are done, in timers.json, and how many wait for which topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cometmq.protocol.bodies import DataVersion
from cometmq.store import TimerTable

# Without changes a mark is written after so many bytes of log: the next start looks through them.
MARK_EVERY = 64 << 20


class TimerState:
    """The last mark, and what is counted. `waiting`: how many messages wait, with
    `recalls` among them. `counted`: how often the counts have changed since the start, and when last."""

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
        """Gives the present mark, if there can be one."""
        self._taken = -1  # of the changes

    def count(self, topic: str, change: int) -> None:
        """So many more messages wait for a topic, or fewer."""
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
        """When the count of a topic has changed last; the start, if it has not changed since."""
        return self._counted_ms.get(topic, self._began_ms)

    def take_mark(self) -> bool:
        """Note the present state, to be written; False if it is as it was, or no mark can be taken now."""
        mark = self.take()
        if mark is None:
            return False
        if self._taken == self.changes and mark.log_position < self.mark.log_position + MARK_EVERY:
            return False
        mark.waiting = dict(self.counts)
        self.mark, self._taken = mark, self.changes
        return True

    def to_table(self) -> dict[str, Any]:
        """The content of the file."""
        table: dict[str, Any] = msgspec.to_builtins(self.mark)
        return table

    def load(self, table: Mapping[str, Any]) -> None:
        """Go on with a file's content."""
        self.mark = TimerTable.from_plain(dict(table))
        self.counts = dict(self.mark.waiting)
