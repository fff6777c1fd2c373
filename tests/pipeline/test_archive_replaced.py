"""A queue that was deleted and created again while its archive was idle or being written.

The archive detects it, distinguishes both queues, and contains each of their messages once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.kit.waiting import wait_until
from tests.pipeline.fake_servers import MINUTES, QUEUE, TOPIC, FakeCluster
from tests.pipeline.feeding import Topic

from cometmq.pipeline.base.errors import DataLossError
from cometmq.pipeline.jobs import archive as archive_module
from cometmq.pipeline.jobs.archive import ArchiveSummary, archive
from cometmq.pipeline.jobs.archive_query import archived, completeness, files, manifest
from cometmq.pipeline.live import cluster
from cometmq.pipeline.live.marks import Mark, marks_in
from cometmq.pipeline.table.directory import ArchiveTable

OLD_LOG, NEW_LOG = 0, 10**6  # log positions that FakeCluster.make_anew uses
FIRST_LIFE = (0, 0, 40, 40, 0, 0, 0)


class Job:
    """Runs of one archive and their output."""

    def __init__(self, spark: SparkSession, fake: FakeCluster, output: str) -> None:
        self.spark, self.fake, self.output = spark, fake, output

    def run(self, **options: Any) -> ArchiveSummary:
        return archive(self.spark, self.fake.addr, [TOPIC], self.output, timeout_ms=2000, **options)

    def tolerant(self, **options: Any) -> ArchiveSummary:
        return self.run(fail_on_data_loss=False, **options)

    def lives(self) -> list[tuple[int, ...]]:
        """Return (life, start, end, records, gaps, overlaps, missing) of each life of the queue."""
        rows = completeness(self.spark, self.output).collect()
        return [(r.life, r.start, r.end, r.records, r.gaps, r.overlaps, r.missing) for r in rows]

    def rows(self) -> list[tuple[int, int]]:
        """Return (queue offset, log position) of each row, as found without the archive's log."""
        table = self.spark.read.parquet(self.output).select("queue_offset", "physical_offset")
        return sorted((row.queue_offset, row.physical_offset) for row in table.collect())

    def commits(self) -> list[Path]:
        return sorted(Path(self.output).glob("_cometmq/commits/*.json"))


def laid(log_at: int, start: int, end: int) -> list[tuple[int, int]]:
    return [(offset, log_at + offset * 100) for offset in range(start, end)]


@pytest.fixture
def job(spark: SparkSession, fake: FakeCluster, output: str) -> Job:
    made = Job(spark, fake, output)
    assert made.run().records == 40
    return made


@pytest.mark.parametrize("count", [41, 40, 60, 5, 0])
def test_a_topic_made_anew_is_an_error_that_says_what_to_do(fake: FakeCluster, job: Job, count: int) -> None:
    fake.make_anew(count)
    for _ in range(2):
        with pytest.raises(DataLossError, match=f"{TOPIC} broker-a 0.*Set fail_on_data_loss=False") as caught:
            job.run()
    assert (caught.value.queue, caught.value.start, caught.value.maximum) == (QUEUE, 40, count)
    if count >= 40:
        assert f"log position 3900, stored at {MINUTES[-1]}" in str(caught.value)
        assert f"log position {NEW_LOG + 3900}" in str(caught.value)
    assert job.lives() == [FIRST_LIFE]
    assert job.rows() == laid(OLD_LOG, 0, 40)


@pytest.mark.parametrize("count", [41, 40, 60, 5])
def test_without_fail_on_data_loss_both_lives_are_whole(
    fake: FakeCluster, job: Job, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    fake.make_anew(count)
    summary = job.tolerant()
    assert (summary.records, summary.replaced, summary.complete) == (count, 1, False)
    assert "reading continues at offset 0" in caplog.text
    assert job.lives() == [FIRST_LIFE, (1, 0, count, count, 0, 0, 0)]
    assert job.rows() == sorted(laid(OLD_LOG, 0, 40) + laid(NEW_LOG, 0, count))
    fake.stored_ms.append(MINUTES[-1] + 10**6)
    later = job.run()  # the new queue is known by now, so there is no error
    assert (later.records, later.replaced, later.complete) == (1, 0, True)
    assert job.lives() == [FIRST_LIFE, (1, 0, count + 1, count + 1, 0, 0, 0)]


def test_a_queue_may_begin_anew_again_and_again(fake: FakeCluster, job: Job) -> None:
    for _ in range(3):
        fake.make_anew(60)
        assert job.tolerant().records == 60
    assert job.lives() == [FIRST_LIFE, *((life, 0, 60, 60, 0, 0, 0) for life in (1, 2, 3))]
    assert len(set(job.rows())) == len(job.rows()) == 220


def test_everything_that_comes_to_an_empty_one_is_archived(fake: FakeCluster, job: Job) -> None:
    fake.make_anew(0)
    assert (job.tolerant().replaced, job.tolerant().replaced) == (1, 0)
    fake.stored_ms = [MINUTES[-1] + 1000] * 70
    assert job.run().records == 70
    assert job.lives() == [FIRST_LIFE, (1, 0, 70, 70, 0, 0, 0)]


def test_after_a_crash_the_last_minute_is_read_again(fake: FakeCluster, job: Job) -> None:
    fake.cut_and_grow(39, 50)  # 38 was stored a minute before 39, the last message read
    assert job.tolerant().records == 12
    assert job.lives() == [FIRST_LIFE, (1, 38, 50, 12, 0, 0, 0)]
    assert sorted(set(job.rows())) == sorted(laid(OLD_LOG, 0, 40) + laid(77_000_000, 39, 50))


def test_the_log_tells_the_lives_apart(spark: SparkSession, fake: FakeCluster, job: Job, output: str) -> None:
    fake.make_anew(60)
    job.tolerant(batch_records=25)
    (began,) = manifest(spark, output).filter("replaces is not null").collect()
    assert (began.life, began.start, began.end, began.records, began.replaces) == (1, 0, 0, 0, 40)
    lives = manifest(spark, output).filter("records > 0").select("batch", "life").distinct()
    paths = {row.path: row.life for row in files(spark, output).join(lives, "batch").collect()}
    assert sorted(paths.values()) == [0, 1, 1, 1]
    rows = archived(spark, output).selectExpr("_metadata.file_path AS path", "physical_offset").collect()
    for row in rows:
        (life,) = (life for path, life in paths.items() if row.path.endswith(path))
        assert life == (row.physical_offset >= NEW_LOG)


def test_commits_of_older_versions_are_read_and_the_next_one_has_marks(fake: FakeCluster, job: Job) -> None:
    for path in job.commits():
        commit = json.loads(path.read_text())
        marks = marks_in(commit)
        commit.pop("@last", None)
        path.write_text(json.dumps(commit))
    assert marks == {QUEUE: Mark(3900, MINUTES[-1])}
    fake.stored_ms.append(MINUTES[-1] + 1)
    assert job.run().records == 1
    assert job.lives() == [(0, 0, 41, 41, 0, 0, 0)]
    fake.make_anew(60)
    with pytest.raises(DataLossError, match="log position 4000"):
        job.run()


def test_where_latest_was_is_marked(spark: SparkSession, fake: FakeCluster, output: str) -> None:
    job = Job(spark, fake, output)
    assert job.run(starting="latest").records == 0
    fake.make_anew(60)
    with pytest.raises(DataLossError, match="log position 3900"):
        job.run()


def test_a_record_deleted_by_retention_proves_nothing(fake: FakeCluster, job: Job) -> None:
    fake.minimum, fake.stored_ms = 40, [MINUTES[-1] + 1]
    assert job.run().records == 1
    assert job.lives() == [(0, 0, 41, 41, 0, 0, 0)]


def test_a_broker_that_is_still_making_its_queues_is_given_time(
    fake: FakeCluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list(fake.stored_ms)
    fake.stored_ms = held[:30]

    def ready(seconds: float) -> None:
        fake.stored_ms = held

    monkeypatch.setattr(cluster.time, "sleep", ready)
    assert (job.tolerant().replaced, job.lives()) == (0, [FIRST_LIFE])


def meanwhile(monkeypatch: pytest.MonkeyPatch, *, before: bool, change: Callable[[], None]) -> None:
    """Call `change` once, just before or just after the tasks of the next batch read."""
    real, changes = archive_module.Job.read_batch, [change]

    def spark_job(self: Any, batch: int, ranges: Any) -> Any:
        if before and changes:
            changes.pop()()
        results = real(self, batch, ranges)
        if changes:
            changes.pop()()
        return results

    monkeypatch.setattr(archive_module.Job, "read_batch", spark_job)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_batch_never_mixes_two_lives(
    fake: FakeCluster, job: Job, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    fake.stored_ms += [MINUTES[-1] + 1] * 5
    meanwhile(monkeypatch, before=before, change=lambda: fake.make_anew(60))
    assert job.tolerant().records == 60
    assert job.lives() == [FIRST_LIFE, (1, 0, 60, 60, 0, 0, 0)]
    assert job.rows() == sorted(laid(OLD_LOG, 0, 40) + laid(NEW_LOG, 0, 60))


def test_what_is_replaced_between_two_batches_is_seen_before_the_second_is_committed(
    fake: FakeCluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.stored_ms += [MINUTES[-1] + 1] * 10
    real = ArchiveTable.commit

    def commit(self: ArchiveTable, commit: Any) -> None:
        real(self, commit)
        if commit["batch"] == 2:
            fake.make_anew(60)

    monkeypatch.setattr(ArchiveTable, "commit", commit)
    with pytest.raises(DataLossError, match="log position 4400"):
        job.run(batch_records=5)
    assert job.lives() == [(0, 0, 45, 45, 0, 0, 0)]
    assert job.rows() == laid(OLD_LOG, 0, 45)


def test_records_that_were_lost_before_they_were_committed_are_no_data_loss(
    fake: FakeCluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.stored_ms += [MINUTES[-1] + 1] * 5
    meanwhile(monkeypatch, before=False, change=lambda: fake.cut_and_grow(42, 50))
    assert job.run().complete
    assert job.lives() == [(0, 0, 50, 50, 0, 0, 0)]
    assert job.rows() == laid(OLD_LOG, 0, 42) + laid(77_000_000, 42, 50)


@pytest.mark.parametrize("commits", [0, 1])
def test_killed_around_the_commit_that_begins_anew(
    fake: FakeCluster, job: Job, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    fake.make_anew(60)
    real, left = ArchiveTable.commit, iter([True] * commits)

    def die(self: ArchiveTable, commit: Any) -> None:
        if not next(left, False):
            raise KeyboardInterrupt
        real(self, commit)

    with monkeypatch.context() as patch:
        patch.setattr(ArchiveTable, "commit", die)
        patch.setattr(ArchiveTable, "close", ArchiveTable.abandon)
        with pytest.raises(KeyboardInterrupt):
            job.tolerant()
    assert job.tolerant().replaced == 1 - commits
    assert job.lives() == [FIRST_LIFE, (1, 0, 60, 60, 0, 0, 0)]
    assert job.rows() == sorted(laid(OLD_LOG, 0, 40) + laid(NEW_LOG, 0, 60))


def test_a_continuous_run_counts_each_life_by_itself(fake: FakeCluster, job: Job) -> None:
    fake.stored_ms.append(MINUTES[-1] + 1)
    stop, records, summaries = threading.Event(), [0], []
    commits = len(job.commits())

    def work() -> None:
        options = {"mode": "continuous", "on_progress": lambda p: records.append(p.records)}
        summaries.append(job.tolerant(interval_s=0.1, stop=stop, **options))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        # Progress is reported before a batch is committed, too. A batch that is not committed yet would be
        # read again after the replacement.
        wait_until("the commit of the first life", lambda: len(job.commits()) == commits + 1)
        fake.make_anew(60)
        wait_until("the second life", lambda: records[-1] == 61)
    finally:
        stop.set()
        thread.join(60)
    assert [(q.start, q.end, q.records) for q in summaries[0].queues] == [(40, 41, 1), (0, 60, 60)]


def test_a_topic_is_deleted_made_again_and_grows(spark: SparkSession, topic: Topic, output: str) -> None:
    topic.send(64)
    assert archive(spark, topic.namesrv, [topic.name], output).records == 64
    topic.delete()
    again = Topic(topic.name, topic.namesrv)
    again.send(100)
    with pytest.raises(DataLossError, match=rf"log position \d+, stored at \d+.*queue {topic.name} broker-a"):
        archive(spark, topic.namesrv, [topic.name], output)
    summary = archive(spark, topic.namesrv, [topic.name], output, fail_on_data_loss=False)
    assert (summary.records, summary.lost, summary.bad) == (100, 0, 0)
    again.send(10)
    assert archive(spark, topic.namesrv, [topic.name], output).records == 10
    by_life = completeness(spark, output).groupBy("life")
    lives = by_life.sum("records", "gaps", "overlaps", "missing").collect()
    assert sorted(map(tuple, lives)) == [(0, 64, 0, 0, 0), (1, 110, 0, 0, 0)]
    table = spark.read.parquet(output)
    bodies = sorted(bytes(row.body).decode() for row in table.select("body").collect())
    assert bodies == sorted(topic.sent + again.sent)
    key = ("topic", "broker_name", "queue_id", "queue_offset", "physical_offset", "store_timestamp")
    assert table.select(*key).distinct().count() == 174
