"""`cometmq pipeline lag`, `trace`, `throughput` and `dedup` with a real Spark, and what they print."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path

import click
import pytest
from tests.pipeline.jobs.conftest import RunJob
from tests.pipeline.store_files import StoreFiles

from cometmq.cli.pipeline.dedup import dedup
from cometmq.cli.pipeline.dedup import report as report_dedup
from cometmq.cli.pipeline.lag import lag
from cometmq.cli.pipeline.lag import report as report_lag
from cometmq.cli.pipeline.throughput import report as report_throughput
from cometmq.cli.pipeline.throughput import throughput
from cometmq.cli.pipeline.trace import report as report_trace
from cometmq.cli.pipeline.trace import trace
from cometmq.pipeline.jobs import dedup as dedup_job
from cometmq.pipeline.jobs import lag as lag_job
from cometmq.pipeline.jobs import throughput as throughput_job
from cometmq.pipeline.jobs import trace as trace_job


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
            [trace_job.BadTrace(*place, "no kind", "ra\x1bw")],
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
    assert "b/0@7: no kind" in seen.err
    assert "\x1b" not in seen.out + seen.err
