"""Helpers for the tests of `verify`."""

from __future__ import annotations

from pathlib import Path

from tests.store.kit import small

from cometmq.store.inspect.findings import Finding
from cometmq.store.inspect.verify import VerifyReport, verify


def check(root: Path, **changes: int) -> VerifyReport:
    return verify(str(root), config=small(root, **changes))


def kinds(report: VerifyReport, severity: str = "error") -> set[str]:
    return {finding.kind for finding in report.findings if finding.severity == severity}


def only(
    report: VerifyReport, kind: str, path: Path | None = None, offset: int | None = None, severity: str = ""
) -> Finding:
    """Return the only finding of a kind, and check its path, offset and severity where they are given."""
    (finding,) = [finding for finding in report.findings if finding.kind == kind]
    if path is not None:
        assert (finding.path, finding.offset) == (str(path), offset)
    assert severity in ("", finding.severity)
    return finding
