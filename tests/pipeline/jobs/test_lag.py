"""Lag of consumer groups, from a real broker and from samples with known numbers."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import asdict
from pyspark.sql import SparkSession
from tests.pipeline.base.test_report import Page
from tests.pipeline.feeding import Topic
from tests.pipeline.s3_server import KEY, S3

from cometmq.admin.admin import Admin, TopicSettings
from cometmq.admin.errors import UnknownNameError
from cometmq.errors import ConfigError, ConnectError
from cometmq.pipeline.base.options import Topics
from cometmq.pipeline.jobs.inputs import group_offsets
from cometmq.pipeline.jobs.lag import (
    SCHEMA,
    QueueLag,
    SampleFiles,
    Samples,
    group_windows,
    lag,
    queue_windows,
    sample,
)
from cometmq.pipeline.jobs.reports import lag_report
from cometmq.pipeline.live.cluster import Cluster
from cometmq.protocol.codes import RETRY_PREFIX

NOW = 1_700_000_000_000
HOUR_MS = 3_600_000


def row(sampled_ms: int, **given: Any) -> QueueLag:
    usual: dict[str, Any] = {
        "group": "g", "topic": "T", "broker_name": "b", "queue_id": 0, "min_offset": 0, "max_offset": 100,
        "group_offset": 100, "lag": 0, "lost": 0, "time_lag_ms": 0,
    }  # fmt: skip
    return QueueLag(sampled_ms=sampled_ms, **(usual | given))


def windows(spark: SparkSession, rows: list[QueueLag], window_s: int) -> list[Any]:
    frame = spark.createDataFrame(pa.Table.from_pylist([asdict(each) for each in rows], SCHEMA))
    queues = queue_windows(frame, NOW, window_s, retention_h=1.0)
    return group_windows(queues).orderBy("group").collect()


def test_rates_and_the_time_until_retention_are_those_of_the_window(spark: SparkSession) -> None:
    rows = [
        row(NOW - 300_000, group_offset=0, max_offset=0),
        row(NOW - 60_000, group_offset=100, max_offset=400, lag=300, time_lag_ms=60_000),
        row(NOW, group_offset=160, max_offset=700, lag=540, time_lag_ms=90_000),
        row(NOW, group="idle", queue_id=1, group_offset=5, lag=95, lost=3, time_lag_ms=None),
    ]
    found, idle = windows(spark, rows, 60)
    assert (found.samples, found.lag, found.max_lag) == (2, 540, 540)
    assert (found.consumed_per_s, found.stored_per_s, found.time_lag_ms) == (1.0, 5.0, 90_000)
    # The time lag grows by half a second per second; the message expires when it is an hour old.
    assert found.expires_in_s == pytest.approx((HOUR_MS - 90_000) / 1000 / 0.5)
    assert (idle.samples, idle.lag, idle.lost) == (1, 95, 3)
    assert (idle.consumed_per_s, idle.expires_in_s, idle.time_lag_ms) == (None, None, None)
    longer = windows(spark, rows, 300)[0]
    assert (longer.samples, longer.consumed_per_s) == (3, pytest.approx(160 / 300))


@pytest.mark.parametrize(
    ("before", "after", "consumed", "expires"),
    [
        ({"group_offset": 90}, {"group_offset": 20, "lag": 80, "time_lag_ms": 10}, None, True),  # a reset
        ({"time_lag_ms": 90}, {"lag": 1, "time_lag_ms": 80}, 0.0, False),  # the group is catching up
        ({}, {"lag": 5, "time_lag_ms": 2 * HOUR_MS}, 0.0, True),  # messages have already expired
    ],
)
def test_odd_pairs_of_samples(
    before: dict[str, Any], after: dict[str, Any], consumed: float | None, expires: bool, spark: SparkSession
) -> None:
    (found,) = windows(spark, [row(NOW - 60_000, **before), row(NOW, **after)], 60)
    assert (found.consumed_per_s, found.expires_in_s is not None) == (consumed, expires)
    assert found.expires_in_s is None or found.expires_in_s >= 0


async def make_known(group: str, namesrv: str) -> None:
    """Create the group's retry topic, as the group's first consumer does."""
    async with Admin(namesrv) as admin:
        settings = TopicSettings(topic=RETRY_PREFIX + group, read_queue_nums=1, write_queue_nums=1)
        async for _ in admin.create_topic(settings, cluster="DefaultCluster"):
            pass


@pytest.fixture
def consumed(topic: Topic) -> str:
    """Return the topic's group after it has consumed the first message of each queue."""
    topic.send(8)
    group = f"G{topic.name}"
    asyncio.run(make_known(group, topic.namesrv))
    with Cluster((topic.namesrv,), timeout_ms=10_000) as cluster:
        held = cluster.bounds(cluster.queues(Topics(names=(topic.name,))))
        cluster.commit(group, {queue: min(1, bounds.maximum) for queue, bounds in held.items()})
    topic.send(32)
    return group


def test_a_sample_of_a_broker(topic: Topic, consumed: str) -> None:
    rows, problems = sample(topic.namesrv, [consumed])

    own = [each for each in rows if each.topic == topic.name]
    assert len(own) == 4
    assert {(each.min_offset, each.lost) for each in own} == {(0, 0)}
    assert sum(each.lag for each in own) == 40 - sum(each.group_offset for each in own)
    assert all(each.time_lag_ms is not None and 0 <= each.time_lag_ms < 60_000 for each in own)
    assert problems == []


def test_each_interval_has_one_sample_whatever_is_killed(
    topic: Topic, consumed: str, spark: SparkSession, tmp_path: Path
) -> None:
    output = str(tmp_path / "lag")
    first = lag(spark, topic.namesrv, [consumed], output=output, samples=1, interval_s=HOUR_MS / 1000)
    again = lag(spark, topic.namesrv, [consumed], output=output, samples=1, interval_s=HOUR_MS / 1000)
    assert (first.samples, again.group_count, first.complete) == (1, 1, True)
    assert {each.window_s for each in again.groups} == {60, 300, 3600}
    assert first.queues[0].group == consumed

    table = Samples(output, 60)
    staged = tmp_path / "lag" / "samples" / f"_lag-{NOW:013d}.parquet"
    staged.write_bytes(b"half a sample")  # left by a killed job
    at_ms = NOW - NOW % 60_000
    assert table.append([row(at_ms)], at_ms)
    assert not table.append([row(at_ms + 1)], at_ms + 59_000)
    assert table.append([row(at_ms + 60_000)], at_ms + 60_000)
    early = table.since(spark, 0).filter(f"sampled_ms < {at_ms + HOUR_MS}")
    assert sorted(each.sampled_ms for each in early.collect()) == [at_ms, at_ms + 60_000]


def test_two_samples_without_a_table_and_a_stop(topic: Topic, consumed: str, spark: SparkSession) -> None:
    seen: list[tuple[int, int | None]] = []
    stop = threading.Event()

    def show(done: int, total: int | None) -> None:
        seen.append((done, total))
        if done == 2:
            stop.set()

    options = {"samples": 0, "interval_s": 0.2, "on_progress": show, "stop": stop}
    summary = lag(spark, topic.namesrv, [consumed], **options)  # type: ignore[arg-type]
    assert seen == [(1, None), (2, None)]
    shortest = min(summary.groups, key=lambda each: each.window_s)
    assert (shortest.samples, shortest.consumed_per_s) == (2, 0.0)


class Answers:
    """A replacement for `sample` that returns these results in turn and then repeats the last one."""

    def __init__(self, *answers: tuple[list[QueueLag], list[str]] | Exception) -> None:
        self._answers = list(answers)

    def __call__(self, *_: object, **__: object) -> tuple[list[QueueLag], list[str]]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


AWAY = ConnectError("127.0.0.1:9876", "refused")


def stopping(after: int) -> tuple[threading.Event, Any]:
    stop = threading.Event()
    return stop, lambda done, _total: stop.set() if done == after else None


def test_a_job_without_end_outlives_name_servers_that_are_away(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = UnknownNameError("consumer group", "g", [])
    taken = [row(int(time.time() * 1000))]
    answers = Answers(AWAY, (taken, ["broker b does not answer"]), gone, AWAY)
    monkeypatch.setattr("cometmq.pipeline.jobs.lag.sample", answers)
    stop, show = stopping(after=100)
    summary = lag(spark, "h:1", samples=0, interval_s=0.001, on_progress=show, stop=stop)
    assert (summary.samples, summary.problem_count, summary.complete) == (1, 100, False)
    assert [each.group for each in summary.queues] == ["g"]
    words = [each.partition(": ")[2] for each in summary.problems]
    assert words[:3] == [f"no sample: {AWAY}", "broker b does not answer", f"no sample: {gone}"]
    assert (len(words), summary.problems[10]) == (21, "... 80 more ...")
    assert caplog.messages[0] == f"no sample: {AWAY}"


def test_without_any_sample_the_error_is_raised(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cometmq.pipeline.jobs.lag.sample", Answers(AWAY))
    with pytest.raises(ConnectError):
        lag(spark, "h:1", samples=2, interval_s=0.001)
    stop, show = stopping(after=2)
    with pytest.raises(ConnectError):
        lag(spark, "h:1", samples=0, interval_s=0.001, on_progress=show, stop=stop)


def test_old_samples_are_removed_once_an_hour_and_nothing_else(tmp_path: Path) -> None:
    table = Samples(str(tmp_path / "lag"), 60, keep_days=1)
    place = tmp_path / "lag" / "samples"
    day = 24 * HOUR_MS
    for name in (f"_{'a' * 12}-lag-{NOW - 2 * day:013d}.parquet", "lag-of-mine.parquet", "lag-1.parquet.bak"):
        (place / name).write_bytes(b"")
    at_ms = NOW - NOW % 60_000
    for taken_ms in (at_ms - day - 60_000, at_ms - day, at_ms - HOUR_MS, at_ms, at_ms + HOUR_MS - 60_000):
        assert table.append([row(taken_ms)], taken_ms)
    slots = [at_ms - day, at_ms - HOUR_MS, at_ms, at_ms + HOUR_MS - 60_000]
    names = [f"lag-{slot:013d}.parquet" for slot in slots]
    assert sorted(path.name for path in place.iterdir()) == sorted(
        ["lag-of-mine.parquet", "lag-1.parquet.bak", *names]
    )


def test_a_sample_of_an_interval_longer_than_it_is_kept_stays(tmp_path: Path) -> None:
    table = Samples(str(tmp_path / "lag"), 60 * 86_400, keep_days=1)
    assert table.append([row(NOW)], NOW)
    assert not table.append([row(NOW)], NOW)


@pytest.mark.parametrize(
    "given",
    [{"samples": -1}, {"interval_s": float("nan")}, {"interval_s": float("inf")}, {"keep_days": 0.0},
     {"retention_h": -1.0}],
)  # fmt: skip
def test_numbers_that_cannot_be_are_named(given: dict[str, Any], spark: SparkSession) -> None:
    (key,) = given
    with pytest.raises(ConfigError, match=key):
        lag(spark, "h:1", **given)


def test_what_cannot_be_sampled_is_named(topic: Topic, spark: SparkSession) -> None:
    with pytest.raises(UnknownNameError):
        lag(spark, topic.namesrv, ["nobody"], samples=1)
    with pytest.raises(ConfigError, match="interval_s"):
        lag(spark, topic.namesrv, interval_s=0)


def test_a_table_without_room_ends_no_sampling(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    answers = Answers(*(([row(int(time.time() * 1000) + number)], []) for number in range(2)))
    monkeypatch.setattr("cometmq.pipeline.jobs.lag.sample", answers)
    monkeypatch.setattr(Samples, "append", full)
    given: dict[str, Any] = {"samples": 2, "interval_s": 0.001, "output": str(tmp_path / "lag")}
    summary = lag(spark, "h:1", **given)
    assert (summary.samples, summary.problem_count, summary.complete) == (2, 2, False)
    assert "not in the table: [Errno 28]" in summary.problems[0]
    assert summary.groups[0].samples == 2, "of what was taken"
    monkeypatch.undo()
    monkeypatch.setattr("cometmq.pipeline.jobs.lag.sample", Answers(([row(int(time.time() * 1000))], [])))
    assert lag(spark, "h:1", **given | {"samples": 1}).complete


def test_only_the_files_that_are_needed_are_read(spark: SparkSession, tmp_path: Path) -> None:
    table, files = Samples(str(tmp_path / "lag"), 1), SampleFiles(str(tmp_path / "lag"))
    assert (files.newest(spark), files.evenly(spark, 3)) == (None, None)
    times = [NOW - 4 * HOUR_MS, NOW - 3 * HOUR_MS, NOW - HOUR_MS - 1000, NOW - HOUR_MS, NOW]
    for number, taken_ms in enumerate(times):
        table.append([row(taken_ms, group_offset=number)], taken_ms)
    for taken_ms in times[1:4:2]:
        (tmp_path / "lag" / "samples" / f"lag-{taken_ms:013d}.parquet").write_bytes(b"no sample")
    some = files.evenly(spark, 3)
    assert some is not None
    assert sorted(each.sampled_ms for each in some.collect()) == times[::2]
    (tmp_path / "lag" / "samples" / f"lag-{times[3]:013d}.parquet").unlink()
    (tmp_path / "lag" / "samples" / f"lag-{times[2]:013d}.parquet").write_bytes(b"no sample")
    assert [each.offset for each in group_offsets(spark, str(tmp_path / "lag")).collect()] == [4]


def test_samples_on_an_object_store_need_no_hadoop(
    s3: S3, at: str, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cometmq.pipeline.jobs.lag.sample", Answers(([row(int(time.time() * 1000))], [])))
    summary = lag(spark, "h:1", samples=1, output=s3.uri(at))
    assert (summary.complete, summary.output, summary.groups[0].samples) == (True, f"s3://bucket/{at}", 1)
    assert [name.partition("/")[0] for name in s3.paths(at)] == ["_cometmq_job.json", "samples"]
    assert KEY not in repr(summary)
    assert len(Page(lag_report(spark, summary, s3.uri(at)).html()).images) == 3
    assert [each.offset for each in group_offsets(spark, s3.uri(at)).collect()] == [100]
