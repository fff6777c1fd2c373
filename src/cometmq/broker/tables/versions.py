"""The versions of a broker's tables: how a change creates a version, and which of two versions is newer."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cometmq.protocol.bodies import DataVersion


class Versions(msgspec.Struct, eq=False):
    """Creates the versions of tables."""

    now_ms: Callable[[], int]
    term: int | None = None  # In a raft group, the leader's term (5.x's stateVersion)
    # Whether a change creates a version. A follower's disappear with the next copy of the leader's table.
    counts: bool = True

    def first(self) -> DataVersion:
        """Return the version of a new table."""
        return DataVersion(timestamp=self.now_ms(), counter=0)

    def after(self, version: DataVersion) -> DataVersion:
        """Return the version that follows `version`, for a table that has changed."""
        if not self.counts:
            return version
        return DataVersion(timestamp=self.now_ms(), counter=version.counter + 1, state_version=self.term)


def order(version: DataVersion | None) -> tuple[int, int]:
    """Return a sort key for versions of a raft group's table. A newer version has a greater key.

    Terms are compared first, because each new leader continues with its own, higher term.
    """
    return (-1, -1) if version is None else (version.state_version or 0, version.counter)
