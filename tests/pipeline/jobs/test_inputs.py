from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.feeding import Topic
from tests.pipeline.store_files import START_MS, StoreFiles

from cometmq.admin.dead_letters import belongs_to_system
from cometmq.errors import ConfigError
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.inputs import OF_USERS, messages
from cometmq.protocol.codes import SYSTEM_TOPICS, UNSENDABLE_TOPICS


def test_the_same_messages_of_an_archive_and_of_live_topics(
    topic: Topic, output: str, spark: SparkSession
) -> None:
    topic.send(40)
    archive(spark, topic.namesrv, [topic.name], output)
    live = messages(spark, f"live:{topic.namesrv}", [topic.name], columns=["msg_id", "store_timestamp"])
    rows = sorted(map(tuple, live.collect()))
    assert len(rows) == 40
    kept = messages(spark, output, pattern=f"{topic.name[:-1]}.", columns=["msg_id", "store_timestamp"])
    assert sorted(map(tuple, kept.collect())) == rows
    middle = sorted(row[1] for row in rows)[20]
    at_ms = int(middle.timestamp() * 1000)
    after = messages(spark, output, [topic.name], begin_ms=at_ms, columns=["msg_id", "store_timestamp"])
    before = messages(spark, output, [topic.name], end_ms=at_ms, columns=["msg_id", "store_timestamp"])
    assert sorted(map(tuple, after.collect())) == [row for row in rows if row[1] >= middle]
    assert sorted(map(tuple, before.collect())) == [row for row in rows if row[1] < middle]


def test_a_topic_whose_name_is_digits_keeps_it(topic: Topic, output: str, spark: SparkSession) -> None:
    numbers = Topic("007", topic.namesrv)
    numbers.send(3)
    archive(spark, topic.namesrv, ["007"], output)
    assert {row.topic for row in messages(spark, output, ["007"]).collect()} == {"007"}


def test_times_and_topics_of_store_directories(tmp_path: Path, spark: SparkSession) -> None:
    files = StoreFiles()
    for number in range(8):
        files.add(b"%d" % number, topic="TU"[number % 2])
    source = f"store:{files.write(tmp_path / 'store')}"
    found = messages(spark, source, ["T"], START_MS + 2, START_MS + 6, ["body"])
    assert sorted(bytes(row.body) for row in found.collect()) == [b"2", b"4"]
    assert messages(spark, source).count() == 8


def test_a_pattern_knows_the_topics_of_users() -> None:
    known = {*SYSTEM_TOPICS, *UNSENDABLE_TOPICS}
    other = {"T", "rmq_sys", "rmq_sys_x", "%RETRY%g", "a%b", *(f"{name}x" for name in known)}
    for topic in known | other:
        assert (re.fullmatch(OF_USERS, topic) is None) == belongs_to_system(topic), topic


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"source": ""}, "source"),
        ({"source": "store:"}, "source"),
        ({"source": "/nowhere"}, "source"),
        ({"source": "live:127.0.0.1:9"}, "topics"),
        ({"source": "/nowhere", "topics": ["a"], "pattern": "b"}, "topics"),
        ({"source": "/nowhere", "begin_ms": 5, "end_ms": 5}, "end"),
        ({"source": "/nowhere", "begin_ms": -1}, "begin"),
        ({"source": "store:/nowhere", "pattern": "(("}, "pattern"),
        ({"source": "/nowhere", "end_ms": 10**15}, "end"),
        ({"source": "/nowhere", "end_ms": 1_795_000_000}, "end"),  # a time in seconds where ms are expected
        ({"source": "/nowhere", "columns": ["tags", "tags"]}, "columns"),
        ({"source": "/nowhere", "columns": ["boddy"]}, "columns"),
        ({"source": "/nowhere", "columns": ["offset_msg_id"]}, "columns"),
    ],
)
def test_what_cannot_be_read_is_named(given: dict[str, object], key: str, spark: SparkSession) -> None:
    with pytest.raises(ConfigError) as raised:
        messages(spark, **given)  # type: ignore[arg-type]
    assert raised.value.key == key
