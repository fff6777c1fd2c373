"""The audit log: a line each, bounded, whatever names hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cometmq.console.door.audit import FIELD_MAX, Audit


def test_an_entry_is_one_line_whatever_it_holds(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "a" / "audit.jsonl")
    audit.add("eve\nadmin", "::1", "topic.delete", "a\u2028b\x1b[2J" + "x" * 5000, {"k": "v" * 5000}, "no\n")
    audit.add("admin", "::1", "login")

    lines = (tmp_path / "a" / "audit.jsonl").read_bytes().split(b"\n")
    assert len(lines) == 3
    entry = json.loads(lines[0])
    assert entry["user"] == "eve\nadmin"
    assert len(entry["target"]) == len(entry["details"]["k"]) == FIELD_MAX
    assert [each.action for each in audit.newest] == ["topic.delete", "login"]


def test_full_files_are_kept_up_to_a_number(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl", file_bytes=1000, files=3)
    for number in range(100):
        audit.add("admin", "::1", "topic.create", f"t{number}")

    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(path.stat().st_size <= 1000 and path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert json.loads(files[0].read_text().splitlines()[-1])["target"] == "t99"


def test_a_disk_that_takes_nothing_is_told_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "audit.jsonl").mkdir()
    Audit(tmp_path / "audit.jsonl").add("admin", "::1", "topic.create", "t")

    assert "lost" in caplog.text
