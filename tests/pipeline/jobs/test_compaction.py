"""Compaction into few large files with the same rows, with kills at any time and readers of every kind."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.pipeline.fake_servers import TOPIC, FakeCluster
from tests.pipeline.s3_server import BUCKET, S3

from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.jobs import compaction
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.archive_query import archived, completeness, files, manifest
from cometmq.pipeline.jobs.compaction import compact
from cometmq.pipeline.table.directory import ArchiveTable

RECORDS = 40
HOUR_MS = 3_600_000


@pytest.fixture
def run(spark: SparkSession, fake: FakeCluster) -> Callable[..., None]:
    """Archive the fake topic in batches of five, with a file for each batch and hour."""

    def run(output: str, **options: Any) -> None:
        archive(spark, fake.addr, [TOPIC], output, batch_records=5, **options)

    return run


def offsets(spark: SparkSession, output: str) -> list[int]:
    return sorted(row.queue_offset for row in archived(spark, output).select("queue_offset").collect())


def plain(spark: SparkSession, output: str) -> list[int]:
    """Return the rows that a reader finds that does not read the archive's log."""
    return sorted(row.queue_offset for row in spark.read.parquet(output).select("queue_offset").collect())


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, output: str) -> str:
    if request.param == "disk":
        return output
    return str(request.getfixturevalue("s3").uri(request.getfixturevalue("at")))


@pytest.mark.slow("many small batches")
def test_small_files_of_an_hour_become_one(
    spark: SparkSession, run: Callable[..., None], place: str, fake: FakeCluster
) -> None:
    run(place)
    before = files(spark, place).count()
    ranges, kept = manifest(spark, place).collect(), completeness(spark, place).collect()
    assert before >= 8
    summary = compact(spark, place)
    assert (summary.commits, summary.files_before, summary.rows) == (1, before, RECORDS)
    live = files(spark, place).collect()
    assert summary.files_after == len(live) == len({(row.dt, row.hour) for row in live}) == 1
    assert summary.bytes_after == sum(row.bytes for row in live)
    assert offsets(spark, place) == list(range(RECORDS))
    assert manifest(spark, place).collect() == ranges
    assert completeness(spark, place).collect() == kept
    again = compact(spark, place)
    assert (again.commits, again.files_before) == (0, 0)
    # The archive continues after its last message.
    fake.stored_ms += [fake.stored_ms[-1] + 1000 * number for number in range(10)]
    run(place)
    assert offsets(spark, place) == list(range(RECORDS + 10))
    assert [row.gaps + row.overlaps + row.missing for row in completeness(spark, place).collect()] == [0]


def test_only_hours_that_are_over_and_long_enough(
    spark: SparkSession, run: Callable[..., None], output: str, fake: FakeCluster
) -> None:
    next_hour = (int(datetime.now(UTC).timestamp() * 1000) // HOUR_MS + 1) * HOUR_MS
    times = [next_hour - 3 * HOUR_MS, next_hour - 2 * HOUR_MS, next_hour]
    fake.stored_ms = [first + number for first in times for number in range(15)]
    run(output)
    hours = files(spark, output).groupBy("dt", "hour").count()

    def counts() -> list[int]:
        return [row["count"] for row in hours_of(spark, output)]

    assert len(hours.collect()) == 3
    before = counts()
    assert min(before) > 1
    compact(spark, output, older_than_s=3600)
    assert counts() == [1, *before[1:]]
    compact(spark, output, older_than_s=0)
    assert counts() == [1, 1, before[2]]
    assert plain(spark, output) == offsets(spark, output) == list(range(45))


def hours_of(spark: SparkSession, output: str) -> list[Any]:
    return files(spark, output).groupBy("dt", "hour").count().orderBy("dt", "hour").collect()


def test_large_files_stay_and_small_ones_come_near_the_target(
    spark: SparkSession, run: Callable[..., None], output: str
) -> None:
    run(output)
    sizes = [row.bytes for row in files(spark, output).collect()]
    target = 4 * max(sizes) + 1
    summary = compact(spark, output, target_bytes=target)
    assert len(sizes) // 4 <= summary.files_after < len(sizes)
    assert all(row.bytes <= target for row in files(spark, output).collect())
    assert compact(spark, output, target_bytes=min(sizes)).commits == 0
    assert plain(spark, output) == list(range(RECORDS))


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_around_its_commit(
    spark: SparkSession, run: Callable[..., None], place: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    run(place)
    real = ArchiveTable.commit

    def die(self: ArchiveTable, commit: Any) -> None:
        if when == "after":
            real(self, commit)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ArchiveTable, "commit", die)
        patch.setattr(ArchiveTable, "close", ArchiveTable.abandon)
        with pytest.raises(KeyboardInterrupt):
            compact(spark, place)
    assert offsets(spark, place) == list(range(RECORDS))
    summary = compact(spark, place)
    assert summary.commits == (1 if when == "before" else 0)
    assert files(spark, place).count() == 1
    assert offsets(spark, place) == list(range(RECORDS))


def test_many_merges_are_many_commits_and_stop_ends_between_them(
    spark: SparkSession,
    run: Callable[..., None],
    output: str,
    fake: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compaction, "_MERGES", 2)
    fake.stored_ms = [HOUR_MS * hour + number for hour in range(5) for number in range(12)]
    run(output)
    stop, seen = threading.Event(), []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 2:
            stop.set()

    assert compact(spark, output, on_progress=progress, stop=stop).commits == 2
    assert seen == [(2, 5), (4, 5)]
    assert sorted(row["count"] for row in hours_of(spark, output))[:4] == [1] * 4
    assert compact(spark, output).commits == 1
    assert plain(spark, output) == list(range(60))


def test_rows_that_do_not_add_up_are_not_committed(
    spark: SparkSession, run: Callable[..., None], output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(output)

    def forgetful(*arguments: Any) -> Any:
        results = real(*arguments)
        results[0][0]["rows"] -= 1
        return results

    real = compaction.run_units
    monkeypatch.setattr(compaction, "run_units", forgetful)
    with pytest.raises(ArchiveError, match=r"39 rows of 40 were merged.*not committed"):
        compact(spark, output)
    assert plain(spark, output) == list(range(RECORDS))


def test_files_that_their_owner_deleted_are_left_alone(
    spark: SparkSession, run: Callable[..., None], output: str
) -> None:
    run(output)
    gone = files(spark, output).collect()[0]
    Path(output, gone.path).unlink()
    summary = compact(spark, output)
    assert summary.rows == RECORDS - gone.rows
    assert len(plain(spark, output)) == RECORDS - gone.rows


def test_files_of_two_lives_of_a_queue_stay_apart(
    spark: SparkSession, run: Callable[..., None], output: str, fake: FakeCluster
) -> None:
    run(output)
    fake.make_anew(20)
    run(output, fail_on_data_loss=False)
    lives = {row.batch: row.life for row in manifest(spark, output).collect()}

    def rows_of_lives() -> Counter[int]:
        counted: Counter[int] = Counter()
        for row in files(spark, output).collect():
            counted[lives[row.batch]] += row.rows
        return counted

    before, count = rows_of_lives(), sum(1 for _ in plain(spark, output))
    assert sorted(before) == [0, 1]
    compact(spark, output)
    assert rows_of_lives() == before
    assert len(plain(spark, output)) == count


@pytest.mark.slow("several jobs on an object store")
def test_replaced_files_stay_for_their_readers_on_an_object_store(
    spark: SparkSession, run: Callable[..., None], s3: S3, at: str
) -> None:
    uri = s3.uri(at)
    run(uri)
    reader = archived(spark, uri)
    before = len(s3.paths(at, ".parquet"))
    compact(spark, uri)
    assert len(s3.paths(at, ".parquet")) == before + 1
    assert reader.count() == RECORDS, "it goes on with the files that it began with"
    of_a_job = f"topic={TOPIC}/dt=2026-11-22/hour=00/part-{0:032x}.parquet"
    with s3.files.open_output_stream(f"{BUCKET}/{at}/{of_a_job}") as stream:
        stream.write(b"to be committed soon")
    assert compact(spark, uri, retention_s=3600).deleted == 0
    # With a retention of 0 s every replaced file may be deleted.
    assert compact(spark, uri, retention_s=0).deleted == before
    assert of_a_job in s3.paths(at, ".parquet")
    assert len(s3.paths(at, ".parquet")) == 2
    assert offsets(spark, uri) == list(range(RECORDS))
    with pytest.raises(PySparkException, match="a compaction has replaced it since this query began"):
        reader.count()


@pytest.mark.parametrize("table_format", ["delta", "iceberg"])
def test_of_other_formats_only_what_killed_jobs_left_is_deleted(
    spark: SparkSession, run: Callable[..., None], output: str, table_format: str
) -> None:
    run(output, table_format=table_format)
    path = next(Path(output).glob("topic=*/dt=*/hour=*"), None)
    assert path is not None
    left = path / f"part-{0:032x}.parquet"
    left.touch()
    os.utime(left, (0, 0))
    summary = compact(spark, output)
    assert (summary.deleted, summary.commits) == (1, 0)
    assert not left.exists()
    assert offsets(spark, output) == list(range(RECORDS))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"target_bytes": 0}, "target_bytes"),
        ({"older_than_s": -1}, "older_than_s"),
        ({"older_than_s": float("nan")}, "older_than_s"),
        ({"retention_s": -1}, "retention_s"),
        ({"retention_s": timedelta(days=31).total_seconds()}, "retention_s"),
    ],
)
def test_bad_settings_are_named(spark: SparkSession, output: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compact(spark, output, **options)
    assert caught.value.key == key


def test_what_is_no_archive_stays_alone(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="no archived messages"):
        compact(spark, str(tmp_path))
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="is not an archive"):
        manifest(spark, str(tmp_path))


def test_not_while_an_archive_job_runs_on_a_disk(
    spark: SparkSession, run: Callable[..., None], output: str
) -> None:
    run(output)
    table = ArchiveTable(output)
    table.prepare()
    with pytest.raises(ArchiveError, match="another archive job"):
        compact(spark, output)
    table.close()
