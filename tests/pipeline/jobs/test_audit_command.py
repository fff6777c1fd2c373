"""`cometmq pipeline audit` with a real Spark, and its output."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pipeline.jobs.conftest import RunJob
from tests.pipeline.store_files import START_MS, StoreFiles

from cometmq.cli.pipeline.audit import report
from cometmq.pipeline.jobs.audit import AuditSummary, Finding, GroupAudit, TopicAudit


def test_a_gap_in_a_store_is_found(run_job: RunJob, tmp_path: Path) -> None:
    files = StoreFiles()
    for offset, at_ms in ((0, 0), (3, 0), (4, 600_000)):
        files.add(b"x", queue_offset=offset, store_timestamp_ms=START_MS + at_ms)
    done = run_job("audit", "T", "-s", f"store:{files.write(tmp_path / 'store')}")
    assert done.returncode == 1
    assert done.stdout.startswith("2 messages in 2 windows, 1 of them still open")
    assert "missing 2: T store/0@3" in done.stderr


def test_a_name_that_is_not_there_and_windows_that_are_all_open(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report(AuditSummary("s", windows=2, open_windows=2, absent=["no\x1bsuch"]))
    assert capsys.readouterr().err.splitlines() == [
        "no window is closed: --to TIME closes those before it",
        "not complete: no messages of topic no\\x1bsuch",
    ]


def test_topics_groups_and_samples_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    topic = TopicAudit("T", 9, 1, 2, 3, 4, 0, None, None)
    group = GroupAudit("T", "readers", 9, 8, None, None, None, None, None)
    sample = Finding("lost", 0, "T", "readers", None, None, None, "ID\x1b", 1)
    report(
        AuditSummary(
            "s", messages=9, bad_traces=3, left_out=1, windows=1, topics=[topic], groups=[group],
            samples=[sample],
        )
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "9 messages in 1 window"
    assert [line.split()[0] for line in out.splitlines()[1:] if line.strip()] == ["topic", "T", "topic", "T"]
    assert err.splitlines()[:2] == ["left out: 3 bad trace records", "left out: 1 group"]
    assert err.splitlines()[2].startswith("lost 1: T ID\\x1b for readers, window of ")
