"""The archive job on an object store: each message once, with concurrent jobs and with kills."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
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
from cometmq.pipeline.table.directory import ArchiveTable, Table, this_process
from cometmq.pipeline.table.formats import TableFormat, open_table

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
    named = f"{lost} ({this_process()}, run "
    assert [text for text in outcomes if str(text).startswith(named)]
    assert bodies(spark, s3.uri(at)) == Counter(topic.sent)
    # No commit contains the files of the job that lost.
    live, objects = files(spark, s3.uri(at)).count(), len(s3.paths(at, ".parquet"))
    assert objects > live
    monkeypatch.undo()
    assert compact(spark, s3.uri(at), retention_s=0).deleted == 0, "they may be of a running job"
    now = timedelta(seconds=-5)
    assert ArchiveTable(s3.uri(at)).vacuum(now, now) == objects - live
    assert bodies(spark, s3.uri(at)) == Counter(topic.sent)


@long_form("kills jobs")
def test_jobs_killed_anywhere(
    spark: SparkSession, topic: Topic, s3: S3, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    output = s3.uri(at)  # the workers of this session have a different environment
    topic.send(RECORDS)
    for with_children in (True, False):
        with start(topic, f"s3://{BUCKET}/{at}", batch_records=2500) as process:
            wait_for_progress(process, random.randint(2, 4))
            time.sleep(random.uniform(0, 0.3))  # the kill hits a pull, write or commit
            kill(process, with_children=with_children)
        assert max(bodies(spark, output).values()) == 1
    summary = archive(spark, topic.namesrv, [topic.name], output)
    assert 0 < summary.records < RECORDS, "it went on where the killed ones stopped"
    assert bodies(spark, output) == Counter(topic.sent)
    assert {row.missing for row in completeness(spark, output).collect()} == {0}


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_table_with_transactions_of_its_own(
    spark: SparkSession, topic: Topic, s3: S3, at: str, tmp_path: Path, kind: TableFormat
) -> None:
    odd = Topic(f"%DLQ%{topic.name}", topic.namesrv)
    uri = s3.uri(at)

    def run() -> int:
        names = [topic.name, odd.name]
        return archive(spark, topic.namesrv, names, uri, table_format=kind, groups=["*"], **given).records

    topic.send(100)
    odd.send(20)
    catalogue = tmp_path / "catalog.db"
    given: dict[str, Any] = {"catalogue": str(catalogue)} if kind == "iceberg" else {}
    assert run() == 120
    topic.send(30)
    given.clear()  # the archive has stored the option
    left = f"topic={topic.name}/dt=2026-11-23/hour=00/part-{0:032x}.parquet"
    with s3.files.open_output_stream(f"{BUCKET}/{at}/{left}") as stream:
        stream.write(b"of a killed job")
    assert run() == 30
    assert bodies(spark, uri) == Counter(topic.sent + odd.sent)
    assert {row.missing for row in completeness(spark, uri).collect()} == {0}
    rows = archived(spark, uri).groupBy("topic").count().collect()
    assert {row.topic: row["count"] for row in rows} == {topic.name: 130, odd.name: 20}
    assert archived(spark, uri).filter("date_format(store_timestamp, 'yyyy-MM-dd') != dt").count() == 0
    assert compact(spark, uri).deleted == 0
    assert left in s3.paths(at)
    if kind == "delta":
        own = DeltaTable(f"s3://{BUCKET}/{at}", storage_options=s3.environment | {"AWS_ALLOW_HTTP": "true"})
        assert sum(pa.table(own.get_add_actions())["num_records"].to_pylist()) == 150
    else:
        assert SECRET.encode() not in catalogue.read_bytes()
        catalogue.rename(tmp_path / "elsewhere")
        with pytest.raises(ArchiveError, match=r"the catalogue .*catalog\.db is not on this machine"):
            run()
        assert not catalogue.exists()
    logs = [path for path in s3.paths(at) if path.endswith(".json")]
    content = b"".join(s3.files.open_input_stream(f"{BUCKET}/{at}/{path}").read() for path in logs)
    assert SECRET.encode() not in content


@pytest.mark.slow("four jobs write to one table at the same time")
@pytest.mark.representative
def test_of_two_jobs_one_commits_to_a_delta_table(s3: S3, at: str) -> None:
    tables = [open_table(s3.uri(at), "delta") for _ in range(4)]
    barrier, winners, losers = threading.Barrier(4), [], []
    for table in tables:
        assert table.prepare() is None

    def job(table: Table) -> None:
        commit = {"batch": 0, "run": table.run_id, "files": [], "quarantine": [], "offsets": {}}
        barrier.wait(30)
        try:
            table.commit(commit)
            winners.append(table.run_id)
        except ArchiveError as error:
            losers.append(str(error))

    threads = [threading.Thread(target=job, args=(table,)) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = winners
    lost = f"another job writes here (run {winner}, batch 0): batch 0 does not follow 0"
    assert losers == [f"s3://{BUCKET}/{at}: {lost}"] * 3
