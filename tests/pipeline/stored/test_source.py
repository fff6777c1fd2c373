"""The Spark format `cometmq-store` and its rows."""

from __future__ import annotations

import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession
from tests.interop.stores import read_log
from tests.pipeline.feeding import Topic
from tests.pipeline.store_files import StoreFiles, positions, rows
from tests.store.planted import extract_golden

from cometmq.errors import ConfigError
from cometmq.pipeline.base.errors import BadStoreRecordError
from cometmq.pipeline.base.options import StoreOptions, Topics, store_options
from cometmq.protocol.properties.values import decode_properties
from cometmq.protocol.record.arrow import COLUMNS
from cometmq.protocol.record.layout import COMPRESSED
from cometmq.standalone import Standalone


def load(spark: SparkSession, root: Path | str, schema: str | None = None, **options: str) -> DataFrame:
    reader = spark.read.format("cometmq-store").options(**options)
    return (reader.schema(schema) if schema else reader).load(str(root))


def in_order(frame: DataFrame) -> list[Any]:
    return sorted(frame.collect(), key=lambda row: row["physical_offset"])


@pytest.fixture
def live(broker: Standalone) -> str:
    """The store of the running broker."""
    return f"{broker.data_dir}/broker-a"


@pytest.mark.slow("the first Spark jobs of a session, which are slow")
def test_the_store_of_a_running_broker_gives_the_rows_of_the_live_source(
    spark: SparkSession, topic: Topic, live: str
) -> None:
    topic.send(500)
    topic.send_raw(zlib.compress(b"squeezed " * 99), sys_flag=COMPRESSED)
    expected = in_order(spark.read.format("cometmq").options(**topic.options).load())
    frame = load(spark, live, topic=topic.name, sliceBytes="20000")
    assert frame.columns == list(COLUMNS)
    assert frame.rdd.getNumPartitions() > 1
    assert in_order(frame) == expected
    assert len(expected) == 501


def test_a_schema_is_the_projection_and_one_load_a_snapshot(
    spark: SparkSession, topic: Topic, live: str
) -> None:
    topic.send(50)
    frame = load(spark, live, "queueOffset bigint, tags string", topic=topic.name)
    assert frame.columns == ["queueOffset", "tags"]
    assert frame.filter("tags = 'A'").count() == 17
    topic.send(50)
    assert frame.count() == 50
    assert load(spark, live, "tags string", topic=topic.name).count() == 100


def test_several_stores_with_the_names_of_their_brokers(spark: SparkSession, tmp_path: Path) -> None:
    for name, count in (("broker-x", 3), ("broker-y", 4)):
        files = StoreFiles()
        for _ in range(count):
            files.add()
        files.write(tmp_path / name)
    expected = {"broker-x": 3, "broker-y": 4}
    pattern = load(spark, f"{tmp_path}/broker-*", "broker_name string")
    assert Counter(row.broker_name for row in pattern.collect()) == expected
    both = f"{tmp_path}/broker-x, {tmp_path}/broker-y"
    assert Counter(row.broker_name for row in load(spark, both, "broker_name string").collect()) == expected
    listed = spark.read.format("cometmq-store").schema("broker_name string").load(both.split(", "))
    assert Counter(row.broker_name for row in listed.collect()) == expected
    empty = StoreFiles().write(tmp_path / "empty")
    assert load(spark, empty).collect() == []


@pytest.mark.slow("a dozen Spark jobs")
def test_what_cannot_be_done_says_so(spark: SparkSession, tmp_path: Path) -> None:
    files = StoreFiles()
    files.add()
    files.add()
    root = files.write(tmp_path / "s")
    with pytest.raises(AnalysisException, match="a store"):
        load(spark, tmp_path / "none").count()
    with pytest.raises(AnalysisException, match="did you mean sliceBytes"):
        load(spark, root, sliceByte="1").count()
    with pytest.raises(AnalysisException, match="path"):
        spark.read.format("cometmq-store").load().count()
    files.log[90] ^= 1
    with pytest.raises(PythonException, match=r"log position 0 \(crc\).*onBadRecord=skip"):
        load(spark, files.write(root)).collect()
    assert [row.queue_offset for row in load(spark, root, onBadRecord="skip").collect()] == [1]
    assert load(spark, root, "topic string").count() == 2  # the bodies are not read


def test_options() -> None:
    given = store_options({
        "path": "/a, /b/*", "topic": "T,U", "startingTimestamp": "5", "endingTimestamp": "9",
        "sliceBytes": "1000", "batchRecords": "7", "batchBytes": "8", "maxPlainBytes": "9",
        "checkCrc": "false", "decompress": "FALSE", "failOnDataLoss": "false", "onBadRecord": "skip",
    })  # fmt: skip
    assert given == StoreOptions(
        ("/a", "/b/*"), Topics(names=("T", "U")), 5, 9,
        slice_bytes=1000, batch_records=7, batch_bytes=8, max_plain_bytes=9,
        check_crc=False, decompress=False, fail_on_data_loss=False, on_bad_record="skip",
    )  # fmt: skip
    assert store_options({"path": "/a"}) == StoreOptions(("/a",))
    assert store_options({"path": "/a", "subscribePattern": "T.*"}).topics == Topics(pattern="T.*")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("path", " , "), ("paths", "[1"), ("paths", "{}"), ("sliceBytes", "0"), ("onBadRecord", "drop"),
        ("startingTimestamp", "-1"),
        ("subscribePattern", "("), ("subscribe", " "), ("namesrv", "a:1"), ("startingOffsets", "earliest"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        store_options({"path": "/a"} | {key: value})
    assert caught.value.key == key


def test_every_record_that_apaches_broker_wrote(tmp_path: Path) -> None:
    """The recorded store of 4.9.7 has delayed messages, batches, and bodies wrongly marked as compressed."""
    root = extract_golden(tmp_path)
    expected = list(read_log(root / "commitlog"))
    for slice_bytes in (1000, 1 << 30):
        found = rows(root, list(COLUMNS), slice_bytes=slice_bytes, decompress=False)
        assert [row["physical_offset"] for row in found] == [each.position for each in expected]
        for row, each in zip(found, expected, strict=True):
            assert (row["topic"], row["queue_id"], row["queue_offset"]) == (
                each.topic, each.queue_id, each.queue_offset,
            )  # fmt: skip
            assert (row["sys_flag"], row["body_crc"], row["store_size"]) == (
                each.sys_flag, each.crc, each.size,
            )  # fmt: skip
            assert row["properties"] == decode_properties("\x02".join(each.properties).encode())
            assert row["body"] == each.body
    assert {"Alpha", "SCHEDULE_TOPIC_XXXX"} <= {row["topic"] for row in found}


@pytest.mark.parametrize(
    ("topics", "wanted"),
    [
        (Topics(names=("T",)), {"T"}),
        (Topics(names=("U", "%RETRY%g", "absent")), {"U", "%RETRY%g"}),
        (Topics(pattern="[TU]"), {"T", "U"}),
        (None, {"T", "U", "%RETRY%g", "RMQ_SYS_TRANS_HALF_TOPIC"}),
    ],
)
def test_topics(tmp_path: Path, topics: Topics | None, wanted: set[str]) -> None:
    files = StoreFiles()
    for topic, sys_flag in (("T", 0), ("U", 0), ("%RETRY%g", 0), ("RMQ_SYS_TRANS_HALF_TOPIC", 4)) * 50:
        files.add(topic=topic, sys_flag=sys_flag)
    found = rows(files.write(tmp_path), slice_bytes=1000, topics=topics)
    assert Counter(row["topic"] for row in found) == dict.fromkeys(wanted, 50)


def test_bodies_as_stored_and_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = StoreFiles()
    files.add(packed := zlib.compress(b"plain " * 100), sys_flag=COMPRESSED)
    files.add(b"no zlib", sys_flag=COMPRESSED)
    root = files.write(tmp_path)
    with pytest.raises(BadStoreRecordError, match="cannot decompress"):
        rows(root)
    (row,) = rows(root, on_bad_record="skip")
    assert row["body"] == b"plain " * 100
    assert f"log position {files.places[1]} (body)" in caplog.text
    assert [row["body"] for row in rows(root, decompress=False)] == [packed, b"no zlib"]
    with pytest.raises(BadStoreRecordError, match="maxPlainBytes"):
        rows(root, max_plain_bytes=599)


def test_a_wrong_body_is_found_when_it_is_asked_for(tmp_path: Path) -> None:
    files = StoreFiles()
    for _ in range(3):
        files.add()
    files.log[files.places[1] + 90] ^= 1
    root = files.write(tmp_path)
    with pytest.raises(BadStoreRecordError, match="CRC-32") as caught:
        positions(root)
    assert (caught.value.position, caught.value.stage) == (files.places[1], "crc")
    assert positions(root, on_bad_record="skip") == [files.places[0], files.places[2]]
    assert len(positions(root, check_crc=False)) == 3
    assert len(rows(root, ("topic",))) == 3


def test_a_copy_without_queues_gives_the_same(live: str, topic: Topic, tmp_path: Path) -> None:
    topic.send(100)
    shutil.copytree(f"{live}/commitlog", tmp_path / "commitlog")
    topics = Topics(names=(topic.name,))
    assert rows(tmp_path, topics=topics) == rows(live, topics=topics, slice_bytes=30_000)
