"""The files below the reports directory; no other file is readable through it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cometmq.console.pages import reports
from cometmq.console.pages.jobs import pretty
from cometmq.console.pages.reports import ReportError, Scanner, read

PAGE = b"<!DOCTYPE html><html><head><title>Audit of a &amp; b</title></head><body>x</body></html>"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory of reports beside a secret."""
    (tmp_path / "secret.html").write_bytes(b"secret")
    root = tmp_path / "reports"
    (root / "nightly").mkdir(parents=True)
    (root / "nightly" / "audit.html").write_bytes(PAGE)
    (root / "lag.json").write_bytes(b'{"complete": false, "groups": []}')
    return root


def made_table(directory: Path, job: str, *, whole: bool) -> None:
    (directory / "topics" / ("_SUCCESS" if whole else "_temporary")).mkdir(parents=True)
    (directory / "_cometmq_job.json").write_text(f'{{"job": "{job}"}}')


def test_reports_summaries_and_tables_are_found_with_their_state(root: Path) -> None:
    made_table(root / "audit", "audit", whole=True)
    made_table(root / "throughput", "throughput", whole=False)
    (root / "archive" / "_cometmq" / "commits").mkdir(parents=True)
    (root / "archive" / "dt=2026-11-23").mkdir()

    found = Scanner(root).scan()

    assert not found.truncated
    assert [(work.path, work.kind, work.name, work.complete) for work in found.rows] == [
        ("archive", "tables", "archive", None),
        ("audit", "tables", "audit", True),
        ("lag.json", "summary", "lag.json", False),
        ("nightly/audit.html", "report", "Audit of a & b", None),
        ("throughput", "tables", "throughput", False),
    ]


def test_a_report_is_read_whole(root: Path) -> None:
    work, data = read(root, "nightly/audit.html")

    assert (work.name, data) == ("Audit of a & b", PAGE)


@pytest.mark.parametrize(
    "path",
    [
        "../secret.html", "nightly/../../secret.html", "/etc/hostname.html", "..", "", ".", "nightly",
        "nightly/", "nightly//audit.html", "nightly/./audit.html", "audit.html\0",
        "nightly/audit.html/x.html", ".hidden/a.html", "nightly/%2e%2e/secret.html", "\udcff.html",
    ],
)  # fmt: skip
def test_no_path_leads_out(root: Path, path: str) -> None:
    with pytest.raises(ReportError):
        read(root, path)


def test_links_are_neither_listed_nor_followed(root: Path, tmp_path: Path) -> None:
    (root / "link.html").symlink_to(tmp_path / "secret.html")
    (root / "up").symlink_to(tmp_path)
    (root / "nightly" / "loop").symlink_to(root)

    assert {work.path for work in Scanner(root).scan().rows} == {"nightly/audit.html", "lag.json"}
    for path in ("link.html", "up/secret.html", "nightly/loop/lag.json"):
        with pytest.raises(ReportError):
            read(root, path)


def test_pipes_and_large_files_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(root / "pipe.html")
    monkeypatch.setattr(reports, "MAX_FILE_BYTES", 10)

    assert "pipe.html" not in {work.path for work in Scanner(root).scan().rows}
    with pytest.raises(ReportError, match="not a file"):
        read(root, "pipe.html")
    with pytest.raises(ReportError, match="exceed the limit"):
        read(root, "nightly/audit.html")


def test_what_is_looked_at_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_ENTRIES", 3)
    for number in range(10):
        (root / f"{number}.html").write_bytes(PAGE)

    found = Scanner(root).scan()

    assert found.truncated
    assert len(found.rows) <= 3


def test_a_directory_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="No such file"):
        Scanner(tmp_path / "gone").scan()


def test_summaries_are_shown_as_people_read_them() -> None:
    assert pretty(b'{"a":[1]}') == '{\n  "a": [\n    1\n  ]\n}'
    assert pretty(b"[1.10,12345678901234567890]") == "[\n  1.10,\n  12345678901234567890\n]"
    assert pretty(b"\xff no json") == "\ufffd no json"
    assert pretty(b"[" * 100_000) == "[" * 100_000


def test_a_file_that_has_not_changed_is_not_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peeked: list[str] = []
    own = reports._peek  # noqa: SLF001

    def peek(directory: int, name: str, path: str, kind: str) -> reports.JobResult:
        peeked.append(path)
        return own(directory, name, path, kind)

    monkeypatch.setattr(reports, "_peek", peek)
    scanner = Scanner(root)
    first = scanner.scan()
    assert scanner.scan() == first
    assert sorted(peeked) == ["lag.json", "nightly/audit.html"]

    (root / "lag.json").write_bytes(b'{"complete": true, "groups": [1]}')
    (root / "nightly" / "audit.html").unlink()
    assert [(work.path, work.complete) for work in scanner.scan().rows] == [("lag.json", True)]
    assert peeked[2:] == ["lag.json"]
