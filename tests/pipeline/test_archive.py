"""The archive job: each message once, whatever fails, and a log that proves it."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from tests.kit.waiting import wait_until
from tests.pipeline.feeding import Topic

from cometmq.errors import ConfigError, NoRouteError
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.jobs import archive as archive_module
from cometmq.pipeline.jobs.archive import ArchiveProgress, ArchiveSummary, archive
from cometmq.pipeline.jobs.archive_query import archived, completeness, manifest
from cometmq.pipeline.table.directory import ArchiveTable, partition_value


class Job:
    """Runs of one topic's archive and their output."""

    def __init__(self, spark: SparkSession, topic: Topic, output: str) -> None:
        self.spark, self.topic, self.output = spark, topic, output

    def run(self, *others: Topic, **options: Any) -> ArchiveSummary:
        topics = [self.topic.name, *(other.name for other in others)]
        return archive(self.spark, self.topic.namesrv, topics, self.output, **options)

    def table(self) -> DataFrame:
        """Return the rows that a reader finds without the archive's log."""
        return self.spark.read.parquet(self.output)

    def bodies(self) -> Counter[str]:
        return Counter(bytes(row.body).decode() for row in self.table().select("body").collect())

    def completeness(self) -> list[Row]:
        return completeness(self.spark, self.output).collect()

    def check(self, *others: Topic) -> None:
        """Check that the archive contains each message once."""
        assert self.bodies() == Counter(body for topic in (self.topic, *others) for body in topic.sent)

    def paths(self, pattern: str) -> list[Path]:
        return sorted(Path(self.output).glob(pattern))

    def files(self) -> list[Path]:
        return self.paths("topic=*/**/*.parquet")

    def commits(self) -> list[Path]:
        return self.paths("_cometmq/commits/*.json")


@pytest.fixture
def job(spark: SparkSession, topic: Topic, output: str) -> Job:
    return Job(spark, topic, output)


class TestTable:
    @pytest.mark.slow("Spark starts")
    @pytest.mark.representative
    def test_all_is_there_with_all_fields(self, job: Job, topic: Topic) -> None:
        topic.send(3000, body_size=100)
        summary = job.run()
        assert (summary.records, summary.bad, summary.lost, summary.complete) == (3000, 0, 0, True)
        job.check()
        source = job.spark.read.format("cometmq").options(**topic.options).load().drop("offset_msg_id")
        table = job.table()
        assert {"dt", "hour"} <= set(table.columns)
        plain = [name for name in source.columns if name not in ("properties", "topic")]
        assert table.select(plain).exceptAll(source.select(plain)).count() == 0
        row = table.filter("keys = 'k7'").collect()[0]
        assert row.properties == {
            **row.properties, "parity": "1", "TAGS": "B", "KEYS": "k7", "UNIQ_KEY": f"{7:032X}"
        }  # fmt: skip

    def test_directories_by_topic_day_and_hour_of_store_time(self, job: Job, topic: Topic) -> None:
        topic.send(10)
        before = datetime.now(UTC)
        job.run()
        for path in job.files():
            times = pq.read_table(path)["store_timestamp"]
            (hour,) = {value.as_py().strftime("%Y-%m-%d %H") for value in times}
            day, number = hour.split()
            parts = path.relative_to(job.output).parts[:3]
            assert parts == (f"topic={topic.name}", f"dt={day}", f"hour={number}")
        days = {row.dt for row in job.table().select("dt").collect()}
        assert days <= {before.date(), datetime.now(UTC).date()}

    def test_other_readers_see_the_same(self, job: Job, topic: Topic, output: str) -> None:
        topic.send(100)
        job.run()
        dataset = pyarrow.dataset.dataset(output, partitioning="hive", exclude_invalid_files=False)
        assert dataset.count_rows() == 100
        column = pq.ParquetFile(job.files()[0]).metadata.row_group(0)
        by_name = {column.column(i).path_in_schema: column.column(i) for i in range(column.num_columns)}
        assert by_name["body"].compression == "ZSTD"
        assert by_name["body"].statistics is None
        assert by_name["queue_offset"].statistics.has_min_max

    def test_several_topics_and_names_that_paths_do_not_like(self, job: Job, topic: Topic) -> None:
        odd = Topic(f"%DLQ%{topic.name}", topic.namesrv)
        topic.send(20)
        odd.send(30)
        job.run(odd)
        counts = {row.topic: row["count"] for row in job.table().groupBy("topic").count().collect()}
        assert counts == {topic.name: 20, odd.name: 30}
        assert archived(job.spark, job.output).groupBy("topic").count().count() == 2
        assert partition_value("%DLQ%a") == "%25DLQ%25a"

    def test_a_pattern_of_topics(self, spark: SparkSession, topic: Topic, output: str) -> None:
        other = Topic(f"{topic.name}y", topic.namesrv)
        topic.send(3)
        other.send(4)
        summary = archive(spark, topic.namesrv, output=output, pattern=f"{topic.name}y?")
        assert summary.records == 7


class TestResuming:
    @pytest.mark.representative
    def test_a_second_run_takes_what_is_new(self, job: Job, topic: Topic) -> None:
        topic.send(500)
        first = job.run()
        again = job.run()
        topic.send(70)
        second = job.run()
        assert [item.records for item in (first, again, second)] == [500, 0, 70]
        assert second.resumed_behind_batch is not None
        job.check()

    def test_many_small_batches(self, job: Job, topic: Topic) -> None:
        topic.send(1000)
        summary = job.run(batch_records=150)
        assert summary.batches >= 7
        job.check()

    def test_latest_stays_where_the_first_run_saw_it(self, job: Job, topic: Topic) -> None:
        topic.send(50)
        assert job.run(starting="latest").records == 0
        wanted = topic.send(9)
        assert job.run(starting="latest").records == 9
        assert job.bodies() == Counter(wanted)

    @pytest.mark.parametrize("moved", [0, 1])
    @pytest.mark.parametrize("killed", [True, False], ids=["killed", "failed"])
    def test_ended_between_commit_and_renames(
        self, job: Job, topic: Topic, monkeypatch: pytest.MonkeyPatch, moved: int, killed: bool
    ) -> None:
        other = Topic(f"{topic.name}z", topic.namesrv)
        topic.send(200)
        job.run()
        topic.send(40)
        other.send(200)
        move, moves = ArchiveTable.move, iter([True] * moved)

        def fail(self: ArchiveTable, staged: str, path: str, batch: int) -> None:
            if not next(moves, False):
                raise OSError(errno.ENOSPC, "No space left on device")
            move(self, staged, path, batch)

        monkeypatch.setattr(ArchiveTable, "move", fail)
        if killed:
            monkeypatch.setattr(ArchiveTable, "close", ArchiveTable.abandon)
        with pytest.raises(OSError, match="No space left"):
            job.run(other)
        staged = json.loads(job.commits()[-1].read_text())["files"]
        assert len(staged) == 2
        monkeypatch.undo()
        assert job.run(other).records == 0
        job.check(other)

    def test_killed_before_the_commit_the_batch_is_done_again(
        self, job: Job, topic: Topic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topic.send(300)

        def die(self: ArchiveTable, commit: Any) -> None:
            if commit["files"]:
                raise KeyboardInterrupt
            real(self, commit)

        real = ArchiveTable.commit
        monkeypatch.setattr(ArchiveTable, "commit", die)
        monkeypatch.setattr(ArchiveTable, "close", ArchiveTable.abandon)
        with pytest.raises(KeyboardInterrupt):
            job.run()
        assert job.paths("_cometmq/staging/*/*/*.parquet")
        monkeypatch.undo()
        job.run()
        job.check()
        assert not job.paths("_cometmq/staging/**/*.parquet")

    def test_a_task_that_dies_is_done_again_by_spark(
        self, job: Job, topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topic.send(400)
        run_task = archive_module.run_task
        marker = str(tmp_path / "died")

        def die_once(task: Any) -> Any:
            result = run_task(task)
            if not os.path.exists(marker):
                open(marker, "w").close()
                os._exit(13)
            return result

        monkeypatch.setattr(archive_module, "run_task", die_once)
        assert job.run().records == 400
        assert os.path.exists(marker)
        job.check()

    def test_continuous_until_told_to_stop(self, job: Job, topic: Topic) -> None:
        topic.send(30)
        stop, seen = threading.Event(), []
        holder: list[ArchiveSummary] = []

        def work() -> None:
            options = {"mode": "continuous", "interval_s": 0.2, "stop": stop, "on_progress": seen.append}
            holder.append(job.run(**options))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            wait_until("the first messages", lambda: any(item.records == 30 for item in seen))
            topic.send(12)
            wait_until("the second messages", lambda: any(item.records == 42 for item in seen))
        finally:
            stop.set()
            thread.join(60)
        assert holder[0].records == 42
        job.check()


class TestLog:
    def test_completeness_is_a_query(self, job: Job, topic: Topic) -> None:
        topic.send(300)
        job.run(batch_records=100)
        topic.send(50)
        job.run()
        held = {str(queue.queue_id): bounds.maximum for queue, bounds in topic.bounds().items()}
        rows = job.completeness()
        assert {str(row.queue_id): row.end for row in rows} == held
        assert sum(row.records for row in rows) == 350
        assert all((row.start, row.gaps, row.overlaps, row.missing) == (0, 0, 0, 0) for row in rows)
        assert manifest(job.spark, job.output).filter("records > 0").count() >= 4
        assert archived(job.spark, job.output).count() == 350
        # The temporary file of a killed job does not count as a commit.
        last = job.commits()[-1]
        Path(f"{last}.0123456789ab.tmp").write_bytes(last.read_bytes())
        assert job.completeness() == rows

    def test_a_missing_commit_shows_as_a_gap(self, job: Job, topic: Topic) -> None:
        topic.send(300)
        job.run(batch_records=100)
        job.commits()[2].unlink()
        assert sum(row.gaps for row in job.completeness()) > 0

    def test_a_batch_that_does_not_add_up_is_not_committed(
        self, job: Job, topic: Topic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topic.send(100)
        real = archive_module.Job.read_batch

        def forget_one(self: Any, batch: int, ranges: Any) -> Any:
            results = real(self, batch, ranges)
            next(iter(results[0].queues.values())).records -= 1
            return results

        monkeypatch.setattr(archive_module.Job, "read_batch", forget_one)
        with pytest.raises(ArchiveError, match="not committed"):
            job.run()
        assert not job.files()

    def test_the_summary_is_machine_readable(self, job: Job, topic: Topic) -> None:
        topic.send(60)
        seen: list[ArchiveProgress] = []
        summary = msgspec.json.decode(msgspec.json.encode(job.run(on_progress=seen.append)))
        assert summary["records"] == 60
        assert sum(queue["records"] for queue in summary["queues"]) == 60
        assert summary["bytes"] > 60 * 91
        assert summary["file_bytes"] == sum(path.stat().st_size for path in job.files())
        assert (seen[-1].records, seen[-1].total) == (60, 60)


class TestTrouble:
    def test_a_start_behind_the_end_is_refused_and_not_kept(self, job: Job, topic: Topic) -> None:
        topic.send(3)
        starting = json.dumps({topic.name: {"broker-a": {"3": 1_000_000}}})
        with pytest.raises(ConfigError, match=r"starting = .*1000000.*behind the end of the queue, 0"):
            job.run(starting=starting)
        assert job.run().records == 3

    def test_one_job_at_a_time(self, job: Job, topic: Topic, output: str) -> None:
        topic.send(5)
        table = ArchiveTable(output)
        table.prepare()
        with pytest.raises(
            ArchiveError, match=f"another archive job is running on this directory: process {os.getpid()} on"
        ):
            job.run()
        table.close()
        assert job.run().records == 5

    def test_two_jobs_cannot_commit_the_same_batch(self, output: str) -> None:
        first = ArchiveTable(output)
        first.prepare()
        commit = {"batch": 0, "files": [], "quarantine": []}
        first.commit(commit)
        with pytest.raises(ArchiveError, match="another job"):
            first.commit(commit)
        first.close()

    def test_directories_of_other_files_stay_alone(self, job: Job, topic: Topic, output: str) -> None:
        topic.send(1)
        Path(output).mkdir()
        (Path(output) / "thesis.parquet").write_bytes(b"mine")
        with pytest.raises(ArchiveError, match=r"thesis\.parquet"):
            job.run()

    def test_bad_records_go_to_quarantine(
        self, job: Job, topic: Topic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topic.send(50)
        sender = Topic(topic.name, topic.namesrv, sent=list(topic.sent))
        sender.send_raw(b"not zlib at all", sys_flag=0x301)
        topic.send(10)
        with pytest.raises(ArchiveError, match=r"1 bad records.*Raise max_bad_records"):
            job.run(max_bad_records=0)
        summary = job.run()
        assert (summary.records, summary.bad, summary.complete) == (60, 1, False)
        job.check()
        (row,) = job.spark.read.parquet(f"{job.output}/_cometmq/quarantine").collect()
        assert (row.topic, row.stage) == (topic.name, "body")
        assert b"not zlib at all" in bytes(row.raw)
        assert sum(row.missing for row in job.completeness()) == 1

    @pytest.mark.parametrize(
        ("options", "key"),
        [
            ({"topics": [], "output": "x"}, "topics"),
            ({"topics": ["a"], "pattern": "b", "output": "x"}, "topics"),
            ({"topics": ["a"]}, "output"),
            ({"topics": ["a"], "output": "x", "mode": "sometimes"}, "mode"),
            ({"topics": ["a"], "output": "x", "starting": "soon"}, "starting"),
            ({"topics": ["a"], "output": "x", "namesrv": "nowhere"}, "namesrv"),
            ({"pattern": "a[", "output": "x"}, "pattern"),
            ({"topics": ["a"], "output": "x", "compression": "zip"}, "compression"),
            (
                {"topics": ["a"], "output": "x", "compression": "snappy", "compression_level": 3},
                "compression_level",
            ),
            ({"topics": ["a"], "output": "x", "batch_records": 0}, "batch_records"),
            ({"topics": ["a"], "output": "x", "pulls_in_flight": 0}, "pulls_in_flight"),
            ({"topics": ["a"], "output": "x", "pull_batch_size": 0}, "pull_batch_size"),
            ({"topics": ["a"], "output": "x", "timeout_ms": 0}, "timeout_ms"),
            ({"topics": ["a"], "output": "x", "interval_s": float("nan")}, "interval_s"),
            ({"topics": ["a"], "output": "x", "max_bad_records": -1}, "max_bad_records"),
            ({"topics": ["a"], "output": "x", "max_plain_bytes": 1 << 31}, "max_plain_bytes"),
        ],
    )
    def test_bad_settings_are_named(self, spark: SparkSession, options: dict[str, Any], key: str) -> None:
        with pytest.raises(ConfigError) as caught:
            archive(spark, **{"namesrv": "127.0.0.1:1", **options})
        assert caught.value.key == key

    def test_unknown_topics_name_who_was_asked(self, spark: SparkSession, topic: Topic, output: str) -> None:
        with pytest.raises(NoRouteError, match=topic.namesrv):
            archive(spark, topic.namesrv, ["NoSuchTopic"], output)
