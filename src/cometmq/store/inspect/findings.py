"""What `verify` says about a store: findings, each with a file, a place in it, and what repairs it."""

from __future__ import annotations

from collections import Counter

import msgspec

ERROR = "error"
"""Something is damaged, missing or does not agree."""
WARNING = "warning"
"""What an unclean stop leaves behind and the next start sets right."""
NOTE = "note"
"""Worth knowing, nothing to do."""

NEXT_START = "the next start of the broker"
REBUILD = "`cometmq store rebuild`, or the next start after an unclean stop"
KEPT = "nothing here; a rebuild leaves queue and index as they are"
NOTHING = "nothing here; a replica or a backup may have it"

_MAX_FINDINGS_PER_KIND = 200


class Finding(msgspec.Struct, frozen=True):
    """One finding. `offset` is the byte in the file at which it shows, -1 for the file as a whole."""

    severity: str
    kind: str
    path: str
    offset: int
    problem: str
    repair: str = ""


class Findings:
    """Collects findings; of each kind the first few hundred are kept, all are counted."""

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
        """Findings that are counted only."""
        return self.by_kind.total() - len(self.kept)
