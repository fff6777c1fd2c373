"""Jobs of the pipeline with Apache's servers: archive, replay, a stream, lag, audit, resend."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.interop.apache import ApacheCluster, mqadmin
from tests.interop.driver import Driver, body_of, message
from tests.interop.space import Space
from tests.kit.waiting import wait_until
from tests.long_form import long_form
from tests.pipeline.feeding import Topic

from cometmq.errors import BrokerError
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.jobs.audit import audit
from cometmq.pipeline.jobs.dlq import dlq, redrive
from cometmq.pipeline.jobs.inputs import messages
from cometmq.pipeline.jobs.lag import lag
from cometmq.pipeline.jobs.replay.replay import replay
from cometmq.pipeline.session import spark_session

pytestmark = long_form("Spark beside Apache's servers")
MESSAGES, LETTERS = 600, 6


@pytest.fixture(scope="module", params=["4.9.7", "5.5.0"])
def cluster(request: pytest.FixtureRequest, apache_clusters: Callable[[str], ApacheCluster]) -> ApacheCluster:
    return apache_clusters(request.param)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    found = SparkSession.getActiveSession()  # the session of the pipeline's own tests
    local = {"spark.local.dir": str(tmp_path_factory.mktemp("spark")), "spark.sql.shuffle.partitions": "2"}
    session = spark_session("interop", master="local[2]", memory="512m", quick_start=True, conf=local)
    yield session
    if found is None:
        session.stop()


@pytest.fixture
def space(java_clients: Callable[[str], Driver], cluster: ApacheCluster) -> Iterator[Space]:
    room = Space(java_clients("4.9.8"), cluster)
    yield room
    room.close()


def bodies(spark: SparkSession, source: str, topic: str) -> Counter[bytes]:
    return Counter(bytes(row.body) for row in messages(spark, source, [topic], columns=["body"]).collect())


def test_an_archive_and_its_replay(
    spark: SparkSession, cluster: ApacheCluster, space: Space, tmp_path: Path
) -> None:
    topic = Topic(f"Jobs{space.topic}", cluster.namesrv)
    topic.send(MESSAGES)
    sent, live = Counter(body.encode() for body in topic.sent), f"live:{cluster.namesrv}"
    wait_until("all are in queues", lambda: sum(held.maximum for held in topic.bounds().values()) == MESSAGES)
    output, target = str(tmp_path / "archive"), f"{topic.name}-replay"
    stood = spark.createDataFrame(
        [("g", topic.name, queue.broker_name, queue.queue_id, 10) for queue in topic.bounds()],
        "group string, topic string, broker_name string, queue_id int, offset bigint",
    )
    version = cluster.version
    summary = archive(spark, cluster.namesrv, [topic.name], output, batch_records=200)
    assert (summary.records, summary.complete) == (MESSAGES, True)
    assert bodies(spark, output, topic.name) == sent

    def run(source: str, state: str, **given: Any) -> tuple[int, int, list[str], bool]:
        done = replay(spark, source, cluster.namesrv, state=str(tmp_path / state), positions=stood, **given)
        return done.messages, done.positions, done.targets_read, done.complete

    if version == "5.5.0":
        with pytest.raises(BrokerError, match="create the group"):
            run(output, "state", topics=[topic.name])
        mqadmin(version, tmp_path, "updateSubGroup", "-n", cluster.namesrv, "-c", "DefaultCluster", "-g", "g")
    done = run(output, "state", topics=[topic.name])
    assert done == (0 if version == "5.5.0" else MESSAGES, len(topic.bounds()), [], True)
    assert run(output, "state", topics=[topic.name]) == (0, 0, [], True)
    wait_until("all are in its queues", lambda: bodies(spark, live, target) == sent)
    assert set(Topic(target, cluster.namesrv).committed("g").values()) == {10}
    spelled = f"live:localhost:{cluster.namesrv.rpartition(':')[2]}"
    again = run(spelled, "other", pattern=f"{topic.name}.*", into=f"{topic.name}-all")
    assert (again[0], again[3]) == (2 * MESSAGES, True)
    again = run(spelled, "other", pattern=f"{topic.name}.*", into=f"{topic.name}-all")
    assert (again[0], again[2]) == (0, [f"{topic.name}-all"])


def test_a_stream_in_batches_by_bytes_and_what_lag_and_audit_say_of_it(
    spark: SparkSession, cluster: ApacheCluster, space: Space, tmp_path: Path
) -> None:
    topic, group = Topic(f"Stream{space.topic}", cluster.namesrv), space.group
    consumer = space.push()  # a broker knows only groups that were online before
    topic.send(MESSAGES, body_size=1000)
    wait_until("all are in queues", lambda: sum(held.maximum for held in topic.bounds().values()) == MESSAGES)
    options = topic.options | {"consumerGroup": group, "startingOffsets": "earliest"}
    options |= {"maxBytesPerTrigger": "200000", "minOffsetsPerTrigger": "50"}
    stream = spark.readStream.format("cometmq").options(**options).schema("body binary").load()
    writer = stream.writeStream.format("parquet").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "cp")).start(str(tmp_path / "out"))
    assert query.awaitTermination(120)
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert Counter(bytes(row.body).decode() for row in rows) == Counter(topic.sent)
    batches = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
    assert len(batches) >= 3, batches

    published = sum(topic.committed(group).values())  # Spark does not confirm the last batch
    assert 0 < published <= MESSAGES
    space.stop(consumer)  # for an online group brokers list only subscribed topics
    found = lag(spark, cluster.namesrv, [group], samples=1)
    assert {(row.group, row.lag) for row in found.groups} == {(group, MESSAGES - published)}
    checked = audit(
        spark, f"live:{cluster.namesrv}", topics=[topic.name], end_ms=time.time_ns() // 1_000_000, delay_s=0
    )
    assert (checked.messages, checked.missing, checked.doubled) == (MESSAGES, 0, 0)


def test_dead_letters_of_a_java_group_are_sent_again_once(
    spark: SparkSession, cluster: ApacheCluster, space: Space, tmp_path: Path
) -> None:
    sent = [f'{{"n": {number}}}'.encode() for number in range(LETTERS)]
    space.java.send(space.producer(), [message(space.topic, body, keys="k") for body in sent], "async")
    consumer = space.push(failTimes=99, failDelayLevel=1, maxReconsumeTimes=1)
    space.java.wait_delivered(consumer, 2 * LETTERS)
    source = f"live:{cluster.namesrv}"
    wait_until("all are dead", lambda: dlq(spark, source, [space.group]).messages == LETTERS)
    output = str(tmp_path / "archive")
    archive(spark, cluster.namesrv, [f"%DLQ%{space.group}"], output)
    bodiless = {"body_format": "json", "body_schema": "n bigint", "keep_body": False}
    archive(spark, cluster.namesrv, [f"%DLQ%{space.group}"], f"{output}-hollow", **bodiless)
    (count,) = dlq(spark, output, reason="concat('after ', reconsume_times)").counts
    assert (count.group, count.topic, count.reason) == (space.group, space.topic, "after 2")

    def run(source: str, **given: Any) -> tuple[int, int, int, bool]:
        done = redrive(
            spark, source, cluster.namesrv, where="keys = 'k'", output=str(tmp_path / "dlq"), **given
        )
        return done.resent, done.skipped, done.without_body, done.complete

    assert run(f"{output}-hollow") == (0, 0, LETTERS, False)
    assert run(output) == (LETTERS, 0, 0, True)
    again = space.java.wait_delivered(consumer, 4 * LETTERS)[2 * LETTERS :]
    for tries in (0, 1):  # the resent messages fail as before
        assert Counter(body_of(each) for each in again if each["reconsumeTimes"] == tries) == Counter(sent)
    assert {each["properties"]["DLQ_RESEND_TIMES"] for each in again} == {"1"}
    assert run(output) == (0, LETTERS, 0, True), "the brokers know what was sent"
