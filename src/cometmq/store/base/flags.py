"""Why a store may not be written to.

Numbers are the bits of RocketMQ's running flags.
"""

from __future__ import annotations

import enum


class Flag(enum.Enum):
    """A cause; each is raised and cleared by itself."""

    NOT_WRITEABLE = 2
    WRITE_LOGICS_ERROR = 4
    WRITE_INDEX_ERROR = 8
    DISK_FULL = 16


class RunningFlags:
    """The flags that are raised, with the reason of each in the words that a refused client gets."""

    def __init__(self) -> None:
        self.reasons: dict[Flag, str] = {}

    def raise_flag(self, flag: Flag, reason: str) -> None:
        """Let the store take no messages until the flag is cleared."""
        self.reasons[flag] = reason

    def clear(self, flag: Flag) -> None:
        """The cause is gone."""
        self.reasons.pop(flag, None)

    @property
    def writeable(self) -> bool:
        """Whether no flag is raised."""
        return not self.reasons

    def why(self) -> str:
        """All reasons; "" when the store is writeable."""
        return "; ".join(self.reasons.values())
