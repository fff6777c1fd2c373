"""The findings of `verify`. Each finding names a file, a position in the file, and the repair."""

from __future__ import annotations

from collections import Counter

import msgspec

ERROR = "error"
"""The severity of something that is damaged, missing or inconsistent."""
WARNING = "warning"
"""The severity of something that an unclean stop leaves and that the next start repairs."""
NOTE = "note"
"""The severity of information that requires no action."""

NEXT_START = "the next start of the broker"
REBUILD = "`cometmq store rebuild`, or the next start after an unclean stop"
KEPT = "nothing here; a rebuild leaves queue and index as they are"
NOTHING = "nothing here; a replica or a backup may have it"

_MAX_FINDINGS_PER_KIND = 200


class Finding(msgspec.Struct, frozen=True):
    """One finding. `offset` is the first affected byte in the file, -1 for a finding about the whole file."""

    severity: str
    kind: str
    path: str
    offset: int
    problem: str
    repair: str = ""


class Findings:
    """The findings of one check of a store. All are counted, but only a few hundred of each kind are kept."""

    def __init__(self) -> None:
        self.kept: list[Finding] = []
        self.by_severity: Counter[str] = Counter()
        self.by_kind: Counter[str] = Counter()

    def add(self, severity: str, kind: str, path: str, offset: int, problem: str, repair: str = "") -> None:
        self.by_severity[severity] += 1
        self.by_kind[kind] += 1
        if self.by_kind[kind] <= _MAX_FINDINGS_PER_KIND:
            self.kept.append(Finding(severity, kind, path, offset, problem, repair))

    @property
    def omitted(self) -> int:
        """The number of findings that were counted but not kept."""
        return self.by_kind.total() - len(self.kept)
