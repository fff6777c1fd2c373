"""The reasons why a store is not writable.

The numbers are the bits of RocketMQ's running flags.
"""

from __future__ import annotations

import enum


class Flag(enum.Enum):
    """A reason why a store is not writable. Each flag is raised and cleared independently."""

    NOT_WRITEABLE = 2
    WRITE_LOGICS_ERROR = 4
    WRITE_INDEX_ERROR = 8
    DISK_FULL = 16


class RunningFlags:
    """The raised flags of a store. Each has a text, which clients receive when a message is refused."""

    def __init__(self) -> None:
        self.reasons: dict[Flag, str] = {}

    def raise_flag(self, flag: Flag, reason: str) -> None:
        """Set `flag`, so that the store refuses messages with the text `reason` until `clear` is called."""
        self.reasons[flag] = reason

    def clear(self, flag: Flag) -> None:
        """Clear `flag`, because the reason for which it was raised no longer applies."""
        self.reasons.pop(flag, None)

    @property
    def writeable(self) -> bool:
        return not self.reasons

    def why(self) -> str:
        """The texts of all raised flags; "" if the store is writable."""
        return "; ".join(self.reasons.values())
