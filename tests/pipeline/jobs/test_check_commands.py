"""`cometmq pipeline audit` and `dlq` with a real Spark, and their output."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pipeline.jobs.conftest import RunJob
from tests.pipeline.store_files import START_MS, StoreFiles

from cometmq.cli.pipeline.reading import report_audit, report_dlq, report_redrive
from cometmq.pipeline.jobs.audit import AuditSummary, Finding, GroupAudit, TopicAudit
from cometmq.pipeline.jobs.dlq import DeadLetters, DlqSummary, RedriveSummary


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
    report_audit(AuditSummary("s", windows=2, open_windows=2, absent=["no\x1bsuch"]))
    assert capsys.readouterr().err.splitlines() == [
        "no window is closed: --to TIME closes those before it",
        "not complete: no messages of topic no\\x1bsuch",
    ]


def test_topics_groups_and_samples_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    topic = TopicAudit("T", 9, 1, 2, 3, 4, 0, None, None)
    group = GroupAudit("T", "readers", 9, 8, None, None, None, None, None)
    sample = Finding("lost", 0, "T", "readers", None, None, None, "ID\x1b", 1)
    report_audit(
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


def test_dead_letters_of_a_store_are_counted(run_job: RunJob, tmp_path: Path) -> None:
    files = StoreFiles()
    files.add(b"x", "%DLQ%readers", properties=b"RETRY_TOPIC\x01orders", reconsume_times=16)
    done = run_job("dlq", "readers", "-s", f"store:{files.write(tmp_path / 'store')}")
    head, _, row = done.stdout.splitlines()
    assert (done.returncode, head) == (0, "1 dead letter of 1 kind")
    assert row.split()[:2] == ["readers", "orders"]
    assert "after 16 tries" in row


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--redrive"], "--where EXPR, or --where true"),
        (["--redrive", "--where", "true"], "specify --output DIR or --dry-run"),
    ],
)
def test_a_redrive_says_what_it_needs(run_job: RunJob, words: list[str], problem: str) -> None:
    done = run_job("dlq", *words)
    assert done.returncode == 2
    assert problem in done.stderr


def test_hostile_names_are_printed_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    count = DeadLetters("g", None, "\x1b[31m", 0, 2, 0, 1, 0, "ID")
    report_dlq(DlqSummary("s", messages=2, kinds=1, counts=[count]))
    summary = RedriveSummary(
        "s", "/out", "r", chosen=12, resent=4, without_body=3, skipped=1, refused=2, failed=1, left=1
    )
    summary.problems.append("g: \x1b[31m")
    report_redrive(summary)
    report_redrive(RedriveSummary("s", dry_run=True, chosen=1, planned=1))
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert out.splitlines()[-2:] == [
        "12 dead letters: 4 sent again, 1 skipped, 2 refused, 1 failed, 1 left, 3 without a body",
        "1 dead letter: 1 would be sent again",
    ]
    assert "not sent: /out/quarantine/run=r" in err
