"""The versions of tables: which broker may increment them, and which of two is newer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cometmq.protocol.bodies import DataVersion


@dataclass(eq=False)
class Versions:
    """Creates the next version of a table.

    Attributes:
        term: In a raft group the leader's term (5.x's stateVersion), else None.
        counts: Whether this broker may change versions. False on a follower, whose own changes disappear with
            the next copy of the leader's table.
    """

    now_ms: Callable[[], int]
    term: int | None = None
    counts: bool = True

    def first(self) -> DataVersion:
        """Return the version of an unchanged table."""
        return DataVersion(timestamp=self.now_ms(), counter=0)

    def after(self, version: DataVersion) -> DataVersion:
        """Return the version of a table after a change."""
        if not self.counts:
            return version
        return DataVersion(timestamp=self.now_ms(), counter=version.counter + 1, state_version=self.term)


def order(version: DataVersion | None) -> tuple[int, int]:
    """Return a sort key for the versions of a raft group's table.

    Each leader continues the newest version with its own term.
    """
    return (-1, -1) if version is None else (version.state_version or 0, version.counter)
