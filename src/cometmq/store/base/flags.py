"""Running flags of a store: why it may not be written to.

Bits are RocketMQ's: 1 not readable, 2 not writeable, 4 consume queue write error, 8 index error, 16 disk
full.
"""

from __future__ import annotations

import enum


class Flag(enum.IntFlag):
    """RocketMQ's bits."""

    NOT_READABLE = 1
    NOT_WRITEABLE = 2
    WRITE_LOGICS_ERROR = 4
    WRITE_INDEX_ERROR = 8
    DISK_FULL = 16


# Plain numbers, asked for each message: arithmetic on members of an enum costs 1 µs.
_AGAINST_READING = int(Flag.NOT_READABLE)
_AGAINST_WRITING = ~_AGAINST_READING


class RunningFlags:
    """Set bits with the reason of each, in the words that a refused client gets."""

    __slots__ = ("bits", "reasons")

    def __init__(self) -> None:
        self.bits = 0
        self.reasons: dict[Flag, str] = {}

    def raise_flag(self, flag: Flag, reason: str) -> None:
        self.bits |= int(flag)
        self.reasons[flag] = reason

    def clear(self, flag: Flag) -> None:
        self.bits &= ~int(flag)
        self.reasons.pop(flag, None)

    @property
    def writeable(self) -> bool:
        return not self.bits & _AGAINST_WRITING

    @property
    def readable(self) -> bool:
        return not self.bits & _AGAINST_READING

    def why(self) -> str:
        return "; ".join(self.reasons.values())
