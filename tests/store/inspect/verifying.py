"""What the tests of `verify` share."""

from __future__ import annotations

from pathlib import Path

from tests.store.kit import small

from cometmq.store.inspect.findings import Finding
from cometmq.store.inspect.verify import VerifyReport, verify


def check(root: Path) -> VerifyReport:
    return verify(str(root), config=small(root))


def kinds(report: VerifyReport, severity: str = "error") -> set[str]:
    return {finding.kind for finding in report.findings if finding.severity == severity}


def only(report: VerifyReport, kind: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.kind == kind]
    return finding
