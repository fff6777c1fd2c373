"""`cometmq pipeline replay` with a real Spark: a dry run, a run, and one with nothing left."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.pipeline.feeding import Topic
from tests.pipeline.jobs.conftest import RunJob

from cometmq.cli.pipeline.replay import report
from cometmq.pipeline.jobs.replay import ReplaySummary


def test_a_live_topic_into_another(run_job: RunJob, topic: Topic, tmp_path: Path) -> None:
    topic.send(3)
    words = ["replay", "-s", f"live:{topic.namesrv}", "-n", topic.namesrv, "-t", topic.name]
    words += ["--map", f"{topic.name}={topic.name}-again"]
    dry = run_job(*words, "--dry-run")
    assert (dry.returncode, dry.stdout.splitlines()[-1].split(" (")[0]) == (0, "would send 3 messages")
    done = run_job(*words, "--state", str(tmp_path / "state"), "--json")
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["messages"], summary["left"]) == (0, 3, 0)


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["--map", "a="], "TOPIC=TARGET is expected"), ([], "Specify --state DIR or --dry-run")],
)
def test_arguments_that_cannot_be_used(run_job: RunJob, words: list[str], problem: str) -> None:
    done = run_job("replay", "-s", "/nowhere", *words)
    assert done.returncode == 2
    assert problem in done.stderr


def test_the_report_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    report(ReplaySummary("s", "/state", messages=5, sent_before=2, bad=1, doubled=3, system=4, left=6))
    out, err = capsys.readouterr()
    assert re.sub(r" in [^\n]*", "", out, count=1).splitlines() == [
        "sent 5 messages (0 bytes)",
        "2 messages sent by earlier runs",
        "3 messages duplicated in the source, sent once",
        "4 messages skipped, in system, retry and dead-letter topics",
    ]
    assert "1 message could not be sent: /state/bad" in err
    assert "6 messages left; run the command again" in err
