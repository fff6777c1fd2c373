"""Messages made to end a read: they are bad records, and everything else of their topic is read."""

from __future__ import annotations

from collections import Counter

import pytest
from pyspark.errors import PythonException
from pyspark.sql import SparkSession
from tests.pipeline.feeding import Topic

from cometmq.pipeline.jobs.archive import archive
from cometmq.protocol.compression import Compression, compress

BOMBS = 9


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """8 KB that become 255 MiB."""
    made = compress(bytes(255 << 20), Compression.ZSTD)
    assert len(made) < 10_000
    return made


@pytest.fixture
def attacked(topic: Topic, bomb: bytes) -> Topic:
    topic.send(50)
    for _ in range(BOMBS):
        topic.send_raw(bomb, Compression.ZSTD.sys_flag)
    for born_ms in (2**62, -(2**63)):
        topic.send_raw(b"never", 0, born_ms)
    topic.send(50)
    return topic


def test_a_read_names_the_first_or_leaves_them_out(spark: SparkSession, attacked: Topic) -> None:
    reader = spark.read.format("cometmq").options(**attacked.options)
    with pytest.raises(
        PythonException, match=rf"bad record at {attacked.name} broker-a 0 offset \d+ \(body\)"
    ):
        reader.load().collect()
    rows = reader.option("onBadRecord", "skip").load().collect()
    assert Counter(bytes(row.body).decode() for row in rows) == Counter(attacked.sent)


def test_an_archive_puts_them_into_quarantine(spark: SparkSession, attacked: Topic, output: str) -> None:
    summary = archive(spark, attacked.namesrv, [attacked.name], output)
    assert (summary.records, summary.bad, summary.lost) == (100, BOMBS + 2, 0)
    rows = spark.read.parquet(f"{output}/_cometmq/quarantine").collect()
    assert Counter(row.stage for row in rows) == {"body": BOMBS, "time": 2}
    assert all(row.topic == attacked.name and row.queue_id == 0 for row in rows)
    assert archive(spark, attacked.namesrv, [attacked.name], output).records == 0
