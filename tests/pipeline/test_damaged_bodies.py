"""A body that was corrupted on the broker's disk does not match the CRC in its record.

Every reader of the pipeline reports or skips it, as configured, and none returns it as data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.sql import SparkSession
from tests.pipeline.feeding import Topic

from cometmq.pipeline.jobs.archive import archive
from cometmq.standalone import Standalone

VICTIM = 37  # index of the damaged message, of 60


@pytest.fixture(scope="module")
def topic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topic]:
    """Create 60 messages on a broker, one of them damaged.

    The broker is stopped for the damage, because a running broker serves new messages from memory.
    """
    directory = tmp_path_factory.mktemp("damaged")
    before = Standalone(directory, namesrv_port=0, broker_port=0)
    with before.run_in_thread():
        topic = Topic("Damaged", before.namesrv_addr)
        topic.send(60, body_size=80)
    (segment,) = directory.glob("broker-a/commitlog/*")
    with open(segment, "r+b") as file:
        at = file.read().index(topic.sent[VICTIM].encode())
        file.seek(at + 60)
        file.write(b"X")
    after = Standalone(directory, namesrv_port=0, broker_port=0)
    with after.run_in_thread():
        yield Topic(topic.name, after.namesrv_addr, topic.sent)


@pytest.fixture
def damaged(topic: Topic) -> str:
    """The damaged message's original body."""
    return topic.sent[VICTIM]


def rest(topic: Topic, damaged: str) -> Counter[str]:
    return Counter(topic.sent) - Counter([damaged])


def test_a_read_fails_and_names_queue_and_offset(spark: SparkSession, topic: Topic, damaged: str) -> None:
    frame = spark.read.format("cometmq").options(**topic.options).load()
    with pytest.raises(PythonException, match=rf"bad record at {topic.name} broker-a \d offset \d+ \(crc\)"):
        frame.collect()


def test_a_read_that_skips_bad_records_has_the_rest(spark: SparkSession, topic: Topic, damaged: str) -> None:
    frame = spark.read.format("cometmq").options(**topic.options, onBadRecord="skip").load()
    assert Counter(bytes(row.body).decode() for row in frame.collect()) == rest(topic, damaged)


def test_a_read_that_was_told_not_to_check_has_all(spark: SparkSession, topic: Topic, damaged: str) -> None:
    frame = spark.read.format("cometmq").options(**topic.options, checkCrc="false").load()
    found = Counter(bytes(row.body).decode() for row in frame.collect())
    assert found - rest(topic, damaged) == Counter([damaged[:60] + "X" + damaged[61:]])


@pytest.mark.slow("two streams of several batches")
def test_a_stream_fails_or_goes_on(spark: SparkSession, topic: Topic, damaged: str, tmp_path: Path) -> None:
    def run(name: str, **options: str) -> Counter[str]:
        frame = spark.readStream.format("cometmq").options(**topic.options, **options)
        frame = frame.option("startingOffsets", "earliest").schema("body binary").load()
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / f"{name}-c"))
        query = writer.trigger(availableNow=True).start(str(tmp_path / name))
        assert query.awaitTermination(90)
        rows = spark.read.parquet(str(tmp_path / name)).collect()
        return Counter(bytes(row.body).decode() for row in rows)

    with pytest.raises(StreamingQueryException, match=r"\(crc\)"):
        run("fails")
    assert run("skips", onBadRecord="skip") == rest(topic, damaged)


def test_the_archive_sets_it_aside(spark: SparkSession, topic: Topic, damaged: str, output: str) -> None:
    summary = archive(spark, topic.namesrv, [topic.name], output)
    assert (summary.records, summary.bad, summary.complete) == (59, 1, False)
    rows = spark.read.parquet(output).select("body").collect()
    assert Counter(bytes(row.body).decode() for row in rows) == rest(topic, damaged)
    (row,) = spark.read.parquet(f"{output}/_cometmq/quarantine").collect()
    assert (row.topic, row.stage) == (topic.name, "crc")
