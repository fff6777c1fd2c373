"""The delay levels: their texts, and what a message with a level becomes while it waits.

A delayed message is stored in SCHEDULE_TOPIC_XXXX, queue `level - 1`, with its destination in REAL_TOPIC and
REAL_QID; its consume-queue entry carries the delivery time in ms instead of the tag hash (storage.md 7.1).
"""

from __future__ import annotations

import msgspec

from cometmq.store.config import StoreConfig

# What Apache's store adds to a schedule record of a level that the table does not know.
UNKNOWN_LEVEL_MS = 1_000


class DelayLevels(msgspec.Struct, frozen=True):
    """Level (1-based) -> delay: `delays_ms[level - 1]`."""

    delays_ms: tuple[int, ...]

    @classmethod
    def of(cls, config: StoreConfig) -> DelayLevels:
        """The levels of the setting `messageDelayLevel`. Raises ConfigError."""
        return cls(tuple(config.delay_levels_ms.values()))

    @property
    def max_level(self) -> int:
        """The highest level; higher requests are lowered to it."""
        return len(self.delays_ms)

    def delay_ms(self, level: int) -> int:
        """Delay of a level in ms; 1 s for one that does not exist."""
        return self.delays_ms[level - 1] if 0 < level <= len(self.delays_ms) else UNKNOWN_LEVEL_MS

    def deliver_at(self, level: int, store_timestamp_ms: int) -> int:
        """When a message of this level, stored at that time, is due (ms)."""
        return store_timestamp_ms + self.delay_ms(level)

    def effective(self, requested: int) -> int:
        """The level a request for `requested` gets: 0 for none, never above the last."""
        return min(max(requested, 0), len(self.delays_ms))


def corrected_due_time(tags_code: int, now_ms: int, delay_ms: int) -> int:
    """Delivery time of an entry as the deliver loop takes it.

    A time further ahead than the level's delay cannot be right (the clock was set back): it is due now.
    """
    return now_ms if tags_code > now_ms + delay_ms else tags_code
