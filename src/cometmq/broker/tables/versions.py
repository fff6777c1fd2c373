"""The versions of tables: who may count them up, and which of two is the newer one. No I/O in here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cometmq.protocol.bodies import DataVersion


@dataclass(eq=False)
class Versions:
    """Gives tables their next version.

    term: of the leader in a raft group, 5.x's stateVersion; None outside of one. counts: whether this broker
    has the word: what a follower of a raft group adds for itself goes with the next copy of the leader's
    table.
    """

    now_ms: Callable[[], int]
    term: int | None = None
    counts: bool = True

    def first(self) -> DataVersion:
        """That of a table which nobody has changed."""
        return DataVersion(timestamp=self.now_ms(), counter=0)

    def after(self, version: DataVersion) -> DataVersion:
        """That of a table after a change."""
        if not self.counts:
            return version
        return DataVersion(timestamp=self.now_ms(), counter=version.counter + 1, state_version=self.term)


def order(version: DataVersion | None) -> tuple[int, int]:
    """The versions of a raft group's table in their order: each leader begins with the newest, and counts on
    with its own term."""
    return (-1, -1) if version is None else (version.state_version or 0, version.counter)
