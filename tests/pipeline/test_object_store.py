"""The archive job on an object store: each message once, with two jobs at once and with kills."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.long_form import long_form
from tests.pipeline.feeding import Topic
from tests.pipeline.s3_server import BUCKET, KEY, S3, SECRET
from tests.pipeline.test_jobs_killed import kill, start, wait_for_progress

from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.jobs import archive as archive_module
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.archive_query import archived, completeness, files
from cometmq.pipeline.jobs.compaction import compact

RECORDS = 20_000


def bodies(spark: SparkSession, output: str) -> Counter[str]:
    return Counter(bytes(row.body).decode() for row in archived(spark, output).select("body").collect())


def test_the_table_is_the_same_as_on_a_disk(
    spark: SparkSession, topic: Topic, s3: S3, at: str, output: str
) -> None:
    odd = Topic(f"%DLQ%{topic.name}", topic.namesrv)
    topic.send(300)
    odd.send(20)
    for place in (s3.uri(at), output):
        summary = archive(spark, topic.namesrv, [topic.name, odd.name], place, batch_records=100)
        assert (summary.records, summary.complete) == (320, True)
        assert summary.output == (output if place == output else f"s3://{BUCKET}/{at}")
    on_disk, stored = archived(spark, output, read_as=f"file://{output}"), archived(spark, s3.uri(at))
    plain = [name for name in stored.columns if name != "properties"]
    assert stored.schema == stored.select(on_disk.columns).schema
    assert stored.select(plain).exceptAll(on_disk.select(plain)).count() == 0
    assert stored.count() == on_disk.count() == 320
    assert {row.missing for row in completeness(spark, s3.uri(at)).collect()} == {0}
    names = s3.paths(at)
    assert not [name for name in names if "staging" in name or "published" in name or "lock" in name]
    for name in s3.paths(at, ".json"):
        with s3.files.open_input_stream(f"{BUCKET}/{at}/{name}") as stream:
            text = stream.read().decode()
        assert KEY not in text
        assert SECRET not in text
        assert json.loads(text)


def test_through_spark_connect(connected: SparkSession, topic: Topic, s3: S3, at: str) -> None:
    topic.send(50)
    archive(connected, topic.namesrv, [topic.name], s3.uri(at), batch_records=20)
    assert bodies(connected, s3.uri(at)) == Counter(topic.sent)


def test_two_jobs_race_for_a_batch(
    spark: SparkSession, topic: Topic, s3: S3, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.send(200)
    archive(spark, topic.namesrv, [topic.name], s3.uri(at))
    topic.send(300)
    barrier, real = threading.Barrier(2), archive_module.Job.read_batch

    def both(self: Any, *arguments: Any) -> Any:
        results = real(self, *arguments)
        barrier.wait(60)
        return results

    monkeypatch.setattr(archive_module.Job, "read_batch", both)
    outcomes: list[Any] = []

    def job() -> None:
        try:
            outcomes.append(archive(spark, topic.namesrv, [topic.name], s3.uri(at)).records)
        except ArchiveError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=job) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert min(map(str, outcomes)) == "300"
    lost = f"s3://{BUCKET}/{at}: _cometmq/commits/{2:020d}.json exists: another job writes to this archive"
    assert lost in outcomes
    assert bodies(spark, s3.uri(at)) == Counter(topic.sent)
    # The files of the job that lost are nobody's.
    live, objects = files(spark, s3.uri(at)).count(), len(s3.paths(at, ".parquet"))
    assert objects > live
    monkeypatch.undo()
    summary = compact(spark, s3.uri(at), retention_s=0, older_than_s=0)
    assert summary.deleted == objects - live
    assert bodies(spark, s3.uri(at)) == Counter(topic.sent)


@long_form("kills jobs")
def test_jobs_killed_anywhere(
    spark: SparkSession, topic: Topic, s3: S3, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    output = s3.uri(at)  # the workers of this session have another environment
    topic.send(RECORDS)
    for with_children in (True, False):
        with start(topic, f"s3://{BUCKET}/{at}", batch_records=2500) as process:
            wait_for_progress(process, random.randint(2, 4))
            time.sleep(random.uniform(0, 0.3))  # into pulling, writing or committing
            kill(process, with_children=with_children)
        assert max(bodies(spark, output).values()) == 1
    summary = archive(spark, topic.namesrv, [topic.name], output)
    assert 0 < summary.records < RECORDS, "it went on where the killed ones stopped"
    assert bodies(spark, output) == Counter(topic.sent)
    assert {row.missing for row in completeness(spark, output).collect()} == {0}
