"""`cometmq pipeline lag`, `trace`, `throughput` and `dedup` with a real Spark, and their output."""

from __future__ import annotations

import json
import re
from inspect import signature
from pathlib import Path

import click
import pytest
from tests.pipeline.feeding import Topic
from tests.pipeline.jobs.conftest import RunJob
from tests.pipeline.store_files import StoreFiles

from cometmq.cli.pipeline.reading import (
    dedup,
    lag,
    report_dedup,
    report_lag,
    report_throughput,
    report_trace,
    throughput,
    trace,
)
from cometmq.cli.pipeline.writing import report_replay as report
from cometmq.pipeline.jobs import dedup as dedup_job
from cometmq.pipeline.jobs import lag as lag_job
from cometmq.pipeline.jobs import throughput as throughput_job
from cometmq.pipeline.jobs import trace as trace_job
from cometmq.pipeline.jobs.replay.replay import ReplaySummary


def test_a_store_is_counted_and_deduplicated(run_job: RunJob, tmp_path: Path) -> None:
    files = StoreFiles()
    for body in (b"a", b"b", b"c"):
        files.add(body, properties=b"KEYS\x01same\x02")
    source = f"store:{files.write(tmp_path / 'store')}"

    counted = run_job("throughput", "-s", source, "--json")
    assert json.loads(counted.stdout)["messages"] == 3, counted.stderr
    output = tmp_path / "table"
    removed = run_job("dedup", "T", "-s", source, "-o", str(output), "--keep", "last")
    assert "3 messages: 1 kept, 2 removed" in removed.stdout, removed.stderr
    assert (output / "messages" / "state=removed").is_dir()


def test_traces_and_lag_of_what_is_not_there(run_job: RunJob, namesrv: str) -> None:
    lagging = run_job("lag", "--samples", "1")
    assert "1 sample" in lagging.stdout.splitlines()[0], lagging.stderr
    unknown = run_job("lag", "NoSuchGroup")
    assert unknown.returncode == 1
    assert "no consumer group named NoSuchGroup" in unknown.stderr
    traced = run_job("trace", "-t", "NoSuchTopic")
    assert traced.returncode == 1
    assert "NoSuchTopic" in traced.stderr


@pytest.mark.parametrize(
    ("command", "job", "words"),
    [
        (dedup, dedup_job.dedup, ["-o", "/a"]),
        (lag, lag_job.lag, []),
        (throughput, throughput_job.throughput, []),
        (trace, trace_job.trace, []),
    ],
)
def test_commands_and_functions_agree_on_what_is_usual(
    command: click.Command, job: object, words: list[str]
) -> None:
    usual = {name: item.default for name, item in signature(job).parameters.items()}  # type: ignore[arg-type]
    given = command.make_context("job", list(words)).params
    shared = (usual.keys() & given.keys()) - {"namesrv", "topics", "groups", "output", "source"}
    assert shared
    assert {name: given[name] for name in shared} == {name: usual[name] for name in shared}


def test_what_people_see_of_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    place = ("b", 0, 7)
    spans = [3, 4, 5, 1234]
    report_trace(
        trace_job.TraceSummary(
            "live:",
            None,
            {"Pub": 2, "SubBefore": 1},
            1,
            0,
            9,
            [trace_job.SendLatency("T", "producers", 2, 2, 1, *spans)],
            [trace_job.ConsumeLatency("T", "rea\x1bders", 4, 1, 0, 0, 2, *spans, None, None, None, None)],
            [trace_job.BadTrace(*place, "unknown kind", "ra\x1bw")],
        )
    )
    rates = [throughput_job.TopicRate("T", 4, 10, 2000, 2.5, 500.0, 60_000)]
    report_throughput(throughput_job.ThroughputSummary("live:", None, 60, 10, 2000, 1, 0, 5000, rates))
    group = lag_job.GroupLag("g", 60, 4, 2, 1000, 1000, 0, 90_000, 1.5, None, 7200.0)
    report_lag(lag_job.LagSummary(None, 2, 1, [group], [], 1, ["broker b is away"]))
    removed = dedup_job.Removed("T", "k\x1b", *place, 1, "b", 0, 3)
    topics = [dedup_job.TopicCount("T", 9, 0, 1)]
    report_dedup(dedup_job.DedupSummary("live:", "/o", "keys", "first", 9, 0, 1, topics, [removed]))

    seen = capsys.readouterr()
    for words in (
        "2 Pub, 1 SubBefore; 1 bad", "1,234", "by the clients' clocks: 2", "10 messages (2000 bytes)",
        "2.0 messages/s, 400 bytes/s", "0:01:30", "2:00:00", "9 messages: 8 kept, 1 removed",
        "removed T b/0@7 for b/0@3",
    ):  # fmt: skip
        assert words in seen.out
    assert "not complete: broker b is away" in seen.err
    assert "b/0@7: unknown kind" in seen.err
    assert "\x1b" not in seen.out + seen.err


# -- `cometmq pipeline replay` with a real Spark: a dry run, a run, and a run with nothing left


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
