"""`cometmq pipeline dlq` with a real Spark, and its output."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pipeline.jobs.conftest import RunJob
from tests.pipeline.store_files import StoreFiles

from cometmq.cli.pipeline.dlq import report, report_redrive
from cometmq.pipeline.jobs.dlq import DeadLetters, DlqSummary, RedriveSummary


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
    report(DlqSummary("s", messages=2, kinds=1, counts=[count]))
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
