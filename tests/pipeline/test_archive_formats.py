"""The archive job with Delta and Iceberg tables: the same guarantees through the tables' transactions."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession
from tests.long_form import long_form
from tests.pipeline.feeding import Topic
from tests.pipeline.test_jobs_killed import kill, start, wait_for_progress

from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import ArchiveError
from cometmq.pipeline.jobs import archive as archive_module
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.archive_query import archived, completeness, manifest
from cometmq.pipeline.table.formats import TableFormat, open_table


@pytest.fixture(params=["delta", "iceberg"])
def kind(request: pytest.FixtureRequest) -> TableFormat:
    name: TableFormat = request.param
    return name


def own_reader(kind: TableFormat, output: str) -> pa.Table:
    """Read the table with deltalake or pyiceberg."""
    if kind == "delta":
        return pa.table(QueryBuilder().register("t", DeltaTable(output)).execute("select * from t"))
    from pyiceberg.catalog.sql import SqlCatalog

    with closing(SqlCatalog("cometmq", uri=f"sqlite:///{output}/_cometmq/catalog.db")) as catalogue:
        return catalogue.load_table("cometmq.archive").scan().to_arrow()


def bodies(rows: pa.Table) -> Counter[str]:
    return Counter(body.as_py().decode() for body in rows["body"])


@pytest.mark.slow("several readers of each table format")
def test_all_is_there_for_every_reader(
    spark: SparkSession, topic: Topic, output: str, kind: TableFormat
) -> None:
    odd = Topic(f"%DLQ%{topic.name}", topic.namesrv)
    topic.send(2000, body_size=100)
    odd.send(10)
    names = [topic.name, odd.name]
    summary = archive(spark, topic.namesrv, names, output, table_format=kind, batch_records=1000)
    assert (summary.records, summary.complete, summary.batches > 1) == (2010, True, True)
    sent = Counter(topic.sent) + Counter(odd.sent)
    assert bodies(own_reader(kind, output)) == sent
    table = archived(spark, output)
    assert Counter(bytes(row.body).decode() for row in table.select("body").collect()) == sent
    source = spark.read.format("cometmq").options(namesrv=topic.namesrv, subscribe=",".join(names)).load()
    plain = [name for name in source.columns if name not in ("properties", "offset_msg_id")]
    assert table.select(plain).exceptAll(source.select(plain)).count() == 0
    found = completeness(spark, output).collect()
    assert sum(row.records for row in found) == 2010
    assert {(row.gaps, row.overlaps, row.missing) for row in found} == {(0, 0, 0)}
    assert manifest(spark, output).filter("records > 0").select("batch").distinct().count() > 1
    times = table.selectExpr("dt", "hour", "date_format(store_timestamp, 'yyyy-MM-dd H') AS text").distinct()
    assert {f"{row.dt} {row.hour}" for row in times.collect()} == {row.text for row in times.collect()}


@pytest.mark.parametrize("uri", ["", "file://"])
def test_the_wrong_format_is_answered_with_the_right_one(output: str, kind: TableFormat, uri: str) -> None:
    for made, asked in ((kind, "parquet"), ("parquet", kind)):
        place = f"{uri}{output}-{made}"
        with closing(open_table(place, made)) as table:
            assert table.prepare() is None
        with (
            closing(open_table(place, asked)) as table,
            pytest.raises(ArchiveError, match=f"--format {made}"),
        ):
            table.prepare()


def test_it_goes_on_where_it_stopped(
    spark: SparkSession, topic: Topic, output: str, kind: TableFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.send(100)
    with monkeypatch.context() as dying:

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        dying.setattr(archive_module.Job, "_commit", die)
        with pytest.raises(KeyboardInterrupt):
            archive(spark, topic.namesrv, [topic.name], output, table_format=kind)
    first = archive(spark, topic.namesrv, [topic.name], output, table_format=kind)
    topic.send(50)
    second = archive(spark, topic.namesrv, [topic.name], output, table_format=kind)
    assert (first.records, second.records) == (100, 50)
    assert second.resumed_behind_batch == 1
    assert bodies(own_reader(kind, output)) == Counter(topic.sent)


@long_form("kills jobs")
def test_killed_anywhere_it_has_each_message_once(
    spark: SparkSession, topic: Topic, output: str, kind: TableFormat
) -> None:
    topic.send(20_000)
    with start(topic, output, 1000, "archive_job.py", kind) as process:
        wait_for_progress(process, random.randint(3, 8))
        time.sleep(random.uniform(0, 0.3))
        kill(process, with_children=True)
    summary = archive(spark, topic.namesrv, [topic.name], output, table_format=kind)
    assert 0 < summary.records < 20_000, "it went on where the killed one stopped"
    assert bodies(own_reader(kind, output)) == Counter(topic.sent)


def test_a_second_job_fails_and_nothing_is_doubled(
    spark: SparkSession, topic: Topic, output: str, kind: TableFormat
) -> None:
    topic.send(100)
    archive(spark, topic.namesrv, [topic.name], output, table_format=kind)
    topic.send(100)
    others: list[int] = []

    def interfere(_: object) -> None:
        if not others:
            others.append(0)
            others[0] = archive(spark, topic.namesrv, [topic.name], output, table_format=kind).records

    with pytest.raises(ArchiveError, match="another job writes here"):
        archive(spark, topic.namesrv, [topic.name], output, table_format=kind, on_progress=interfere)
    assert others == [100]
    assert bodies(own_reader(kind, output)) == Counter(topic.sent)


def test_a_format_that_is_not_there(spark: SparkSession, topic: Topic, output: str) -> None:
    with pytest.raises(ConfigError, match="table_format"):
        archive(spark, topic.namesrv, [topic.name], output, table_format="hudi")  # type: ignore[arg-type]
    assert not Path(output).exists()


@pytest.mark.parametrize("table_format", ["parquet", "delta", "iceberg"])
def test_a_topic_called_what_means_null_in_a_directory_with_an_odd_name(
    spark: SparkSession, topic: Topic, tmp_path: Path, table_format: TableFormat
) -> None:
    """The topic is named like Hive's null, and the path has characters that Spark takes for a pattern."""
    odd = Topic("__HIVE_DEFAULT_PARTITION__", topic.namesrv)
    try:
        odd.send(10)
        topic.send(10)
        for name in ("a[1]{b}", "a*"):
            output = str(tmp_path / name)
            archive(spark, topic.namesrv, [topic.name, odd.name], output, table_format=table_format)
            rows = archived(spark, output).select("topic", "body").collect()
            assert Counter(row.topic for row in rows) == {odd.name: 10, topic.name: 10}
            assert Counter(bytes(row.body).decode() for row in rows) == Counter(odd.sent + topic.sent)
    finally:
        odd.delete()


def test_a_topic_of_which_no_directory_can_be_made(spark: SparkSession, topic: Topic, output: str) -> None:
    long = Topic("%" * 120, topic.namesrv)
    try:
        long.send(1)
        with pytest.raises(ConfigError, match=r"topics = '%%%.* of which directories can be made"):
            archive(spark, topic.namesrv, [long.name], output)
    finally:
        long.delete()
