"""The audit log: one line per action, of limited length, whatever names contain."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cometmq.console.auth.audit import MAX_FIELD_LENGTH, Audit, AuditError


def test_an_entry_is_one_line_whatever_it_holds(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "a" / "audit.jsonl")
    audit.try_record(
        "eve\nadmin",
        "::1",
        "topic.delete",
        "a\u2028b\x1b[2J" + "x" * 5000,
        details={"k": "v" * 5000},
        result="no\n",
    )
    audit.try_record("admin", "::1", "login")

    lines = (tmp_path / "a" / "audit.jsonl").read_bytes().split(b"\n")
    assert len(lines) == 3
    entry = json.loads(lines[0])
    assert entry["user"] == "eve\nadmin"
    assert len(entry["target"]) == len(entry["details"]["k"]) == MAX_FIELD_LENGTH
    assert [each.action for each in audit.newest] == ["topic.delete", "login"]


def test_full_files_are_kept_up_to_a_number(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl", file_bytes=1000, files=3)
    for number in range(100):
        audit.try_record("admin", "::1", "topic.create", f"t{number}")

    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert all(path.stat().st_size <= 1000 and path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert json.loads(files[0].read_text().splitlines()[-1])["target"] == "t99"


def test_a_disk_that_takes_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "audit.jsonl").mkdir()
    audit = Audit(tmp_path / "audit.jsonl")

    assert not audit.try_record("admin", "::1", "login")
    assert "lost" in caplog.text
    with pytest.raises(AuditError, match="Is a directory"):
        audit.record("admin", "::1", "topic.create", "t")


def test_a_part_of_a_line_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").write_bytes(b'{"at":1,"us')
    Audit(tmp_path / "audit.jsonl").try_record("admin", "::1", "login")
    Audit(tmp_path / "audit.jsonl").try_record("admin", "::1", "logout")

    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line)["action"] for line in lines[1:]] == ["login", "logout"]


def test_a_disk_that_takes_half_a_line_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:10]))

    with pytest.raises(AuditError, match="No space left"):
        Audit(tmp_path / "audit.jsonl").record("admin", "::1", "topic.create", "t")
