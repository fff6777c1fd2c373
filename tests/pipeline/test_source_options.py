"""Options of the source for starts, filters and limits, with real and fake brokers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import LongType, StructField, StructType
from tests.kit.waiting import wait_until
from tests.pipeline.fake_servers import MINUTES, QUEUE, TOPIC, FakeCluster, Stream, fake_cluster, position
from tests.pipeline.feeding import Topic
from tests.ports import HOST, closed_port

from cometmq.errors import ConfigError, ConnectError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.errors import DataLossError
from cometmq.pipeline.base.options import PullOptions, Topics, read_options
from cometmq.pipeline.base.plan import QueueRange
from cometmq.pipeline.base.wire import PLAIN
from cometmq.pipeline.live import cluster as cluster_module
from cometmq.pipeline.live import reading, source
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.live.reading import read_parts
from cometmq.pipeline.live.source import CometReader, CometStreamReader, check_schema, full_schema
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.record.arrow import arrow_schema

Clock = list[float]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The source's clock, which a test advances."""
    now = [1000.0]
    monkeypatch.setattr(source.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(source, "_IDLE_POLL_S", 0.0)
    return now


def load(spark: SparkSession, topic: Topic, **options: str) -> DataFrame:
    return spark.read.format("cometmq").options(**topic.options, **options).load()


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row.body).decode().split(":")[0]) for row in frame.select("body").collect())


def test_a_queue_begins_and_ends_at_its_own_time(spark: SparkSession, topic: Topic) -> None:
    topic.send(300)
    stored_ms = F.unix_millis("store_timestamp").alias("stored_ms")
    rows = load(spark, topic).select("queue_id", "queue_offset", stored_ms).collect()
    stored = {(row.queue_id, row.queue_offset): row.stored_ms for row in rows}
    times = {0: sorted(stored.values())[100], 1: sorted(stored.values())[200]}
    tree = json.dumps({topic.name: {"broker-a": {str(queue): at for queue, at in times.items()}}})
    begun = load(spark, topic, startingOffsetsByTimestamp=tree)
    ended = load(spark, topic, endingOffsetsByTimestamp=tree)
    places = {(row.queue_id, row.queue_offset) for row in begun.collect()}
    assert places == {place for place, at in stored.items() if at >= times.get(place[0], 0)}
    others = {(row.queue_id, row.queue_offset) for row in ended.collect()}
    assert others == {place for place, at in stored.items() if at < times.get(place[0], float("inf"))}


def test_reading_goes_on_where_a_group_stands(spark: SparkSession, topic: Topic) -> None:
    topic.send(200)
    held = topic.bounds()
    with Cluster((topic.namesrv,), timeout_ms=10_000) as cluster:
        cluster.queues(Topics(names=(topic.name,)))
        cluster.commit("standing", {queue: bounds.maximum - 5 for queue, bounds in held.items()})
    frame = load(spark, topic, startingGroup="standing")
    assert frame.count() == 5 * len(held)
    with pytest.raises((AnalysisException, PythonException), match="startingGroup = 'nobody'"):
        load(spark, topic, startingGroup="nobody").count()


def test_a_group_that_stands_in_some_queues_leaves_the_rest_to_the_other_option(fake: FakeCluster) -> None:
    other = MessageQueue(TOPIC, "broker-a", 0)
    fake.stored = 17
    options = {"namesrv": fake.addr, "topic": TOPIC, "startingGroup": "g"}
    with Cluster((fake.addr,), timeout_ms=5000) as cluster:
        starting = read_options(options, streaming=False).starting
        assert cluster.resolve(starting, [other]) == {other: 17}
        fake.stored = None
        with pytest.raises(ConfigError, match="startingGroup"):
            cluster.resolve(starting, [other])


def test_messages_that_pass_an_expression(spark: SparkSession, topic: Topic) -> None:
    topic.send(3000)
    some = load(spark, topic, sql="parity = '1' AND TAGS IN ('A', 'B')")
    assert numbers(some) == [number for number in range(3000) if number % 2 and number % 3 < 2]
    assert load(spark, topic, sql="parity = '7'").count() == 0
    with pytest.raises((AnalysisException, PythonException), match="sql"):
        load(spark, topic, sql="parity >").count()


def test_the_path_is_the_topic(spark: SparkSession, topic: Topic) -> None:
    topic.send(12)
    assert spark.read.format("cometmq").option("namesrv", topic.namesrv).load(topic.name).count() == 12


def test_batches_limited_by_bytes_take_everything(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    topic.send(200, body_size=1000)
    frame = spark.readStream.format("cometmq").options(
        **topic.options, startingOffsets="earliest", maxBytesPerTrigger="60000"
    )
    writer = frame.load().select("body").writeStream.format("parquet")
    query = (
        writer.option("checkpointLocation", str(tmp_path / "cp")).trigger(availableNow=True)
        .start(str(tmp_path / "table"))
    )  # fmt: skip
    assert query.awaitTermination(90)
    counts = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
    assert sum(counts) == 200
    assert max(counts) <= 60  # 1 KiB plus the rest of a record


class TestAStreamThatWaitsForMore:
    @pytest.fixture
    def stream(self, fake: FakeCluster, clock: Clock) -> Iterator[Stream]:
        made = Stream(fake, minOffsetsPerTrigger="10", maxOffsetsPerTrigger="25", maxTriggerDelay="60s")
        yield made
        made.reader.stop()

    def test_the_first_batch_goes_at_once_the_next_when_enough_has_come(
        self, fake: FakeCluster, stream: Stream
    ) -> None:
        start = position(37)
        end = stream.next(start)  # three records are available
        assert end[TOPIC] == position(40)[TOPIC]
        fake.stored_ms += [MINUTES[-1]] * 9
        assert stream.next(end) is end
        fake.stored_ms.append(MINUTES[-1])
        assert stream.next(end)[TOPIC] == position(50)[TOPIC]

    def test_it_waits_no_longer_than_the_delay(self, fake: FakeCluster, stream: Stream, clock: Clock) -> None:
        end = stream.next(position(37))
        fake.stored_ms.append(MINUTES[-1])
        clock[0] += 59.9
        assert stream.next(end) is end
        clock[0] += 0.2
        later = stream.next(end)
        assert later[TOPIC] == position(41)[TOPIC]
        fake.stored_ms.append(MINUTES[-1])
        assert stream.next(later) is later, "the delay begins anew with each batch"

    def test_more_than_the_most_is_shared_out_and_all_of_it_is_taken_if_spark_says_so(
        self, fake: FakeCluster, stream: Stream
    ) -> None:
        end = stream.next(position(0))
        assert end[TOPIC] == position(25)[TOPIC]
        assert stream.next(end)[TOPIC] == position(40)[TOPIC]  # 15 records start a batch
        fake.stored_ms.append(MINUTES[-1])
        everything = stream.reader.latestOffset(position(40), ReadAllAvailable())
        assert everything[TOPIC] == position(41)[TOPIC]

    def test_new_queues_are_taken_note_of_meanwhile(
        self, topic: Topic, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cluster_module, "_ROUTE_S", 0.0)
        second = Topic(f"{topic.name}s", topic.namesrv)
        options = {
            "namesrv": topic.namesrv,
            "subscribePattern": f"{topic.name}s?",
            "minOffsetsPerTrigger": "50",
        }
        reader = CometStreamReader(full_schema(), read_options(options, streaming=True))

        def look(start: dict[str, Any]) -> dict[str, Any]:
            return reader.latestOffset(start, reader.getDefaultReadLimit())

        topic.send(5)
        start = look(reader.initialOffset())
        topic.send(5)
        end = look(start)
        topic.send(40)
        assert look(end) is end
        second.send(3)
        with Cluster((topic.namesrv,), timeout_ms=10_000) as cluster:
            wait_until("the new topic", lambda: bool(cluster.queues(Topics(pattern=second.name))))
        later = look(end)
        reader.stop()
        assert later[topic.name] == end[topic.name] != start[topic.name]
        assert later[second.name]["broker-a"] == {str(number): 0 for number in range(4)}

    def test_available_now_takes_the_rest_too(self, fake: FakeCluster, stream: Stream) -> None:
        stream.reader.prepareForTriggerAvailableNow()
        end = stream.next(position(8))
        assert end[TOPIC] == position(33)[TOPIC]
        assert stream.next(end)[TOPIC] == position(40)[TOPIC]


class TestABrokerWhoseMasterIsGoneThoughItIsRouted:
    """The route still names the master, but nothing listens at its address."""

    @pytest.fixture
    def fake(self, fake: FakeCluster) -> Iterator[FakeCluster]:
        with closed_port() as port:
            fake.brokers = {0: f"{HOST}:{port}", 2: fake.addr}
            yield fake

    def test_a_batch_is_planned_and_read_from_its_replica(self, fake: FakeCluster) -> None:
        with Cluster((fake.addr,), timeout_ms=5000) as cluster:
            (held,) = cluster.bounds(cluster.queues(Topics(names=(TOPIC,)))).values()
            assert (held.maximum, held.replica) == (40, True)
            assert cluster.addresses([QUEUE]) == {"broker-a": fake.addr}
            assert cluster.offset_at(QUEUE, held, MINUTES[7]) == 7
            fake.requests.clear()
            assert cluster.bounds([QUEUE]) == {QUEUE: held}
            assert not fake.requests.count(RequestCode.GET_ROUTEINFO_BY_TOPIC), (
                "the dead address is not tried again"
            )
        assert read(fake, fake.brokers[0]) == list(range(40))

    def test_what_the_replica_lacks_is_read_from_the_master_when_it_is_back(self, fake: FakeCluster) -> None:
        with fake_cluster() as master:
            master.stored_ms = [*MINUTES, MINUTES[-1] + 1]
            back = {0: master.addr, 2: fake.addr}
            threading.Timer(0.3, lambda: setattr(fake, "brokers", back)).start()
            assert read(fake, fake.addr, end=41) == list(range(41))

    def test_a_replica_that_may_not_be_read_is_left_when_the_master_is_back(self, fake: FakeCluster) -> None:
        """5.x refuses reads from a replica without slaveReadEnable."""
        fake.refuse_always = ResponseCode.SYSTEM_BUSY
        with fake_cluster() as master:
            master.stored_ms = list(MINUTES)
            back = {0: master.addr, 2: fake.addr}
            threading.Timer(0.3, lambda: setattr(fake, "brokers", back)).start()
            assert read(fake, fake.addr) == list(range(40))

    def test_a_stream_reads_the_replica_and_goes_back(self, fake: FakeCluster) -> None:
        stream = Stream(fake)
        try:
            end = stream.next(position(10))
            assert end[TOPIC] == position(40)[TOPIC]
            (task,) = stream.reader.partitions(position(10), end)
            assert task.addresses == {"broker-a": fake.addr}
        finally:
            stream.reader.stop()

    def test_all_addresses_away_is_the_masters_failure(self, fake: FakeCluster) -> None:
        gone = fake.brokers[0]
        fake.brokers = {0: gone, 1: "127.0.0.1:1"}
        with Cluster((fake.addr,), timeout_ms=300) as cluster, pytest.raises(ConnectError) as caught:
            cluster.bounds([QUEUE])
        assert caught.value.addr in fake.brokers.values()


def read(fake: FakeCluster, address: str, end: int = 40) -> list[int]:
    schema = arrow_schema(["queue_offset"])
    ranges = [QueueRange(QUEUE, 0, end)]
    parts = read_parts((fake.addr,), ranges, {"broker-a": address}, schema, PullOptions(timeout_ms=5000))
    try:
        return [offset for part in parts for offset in part.batch.column("queue_offset").to_pylist()]
    finally:
        reading.idle_wires(PLAIN).close()


def test_a_stream_does_not_ask_for_its_route_at_each_look(fake: FakeCluster) -> None:
    stream = Stream(fake)
    end = stream.next(position(0))
    fake.requests.clear()
    for _ in range(5):
        stream.next(end)
    stream.reader.stop()
    assert fake.requests.count(RequestCode.GET_MAX_OFFSET) == 5
    assert not fake.requests.count(RequestCode.GET_ROUTEINFO_BY_TOPIC)


def test_times_of_many_queues_are_looked_up_together(topic: Topic) -> None:
    topic.send(400)
    held = topic.bounds()
    with Cluster((topic.namesrv,), timeout_ms=10_000) as cluster:
        cluster.queues(Topics(names=(topic.name,)))
        now = round(time.time() * 1000)
        assert cluster.offsets_at(dict.fromkeys(held, 0), held) == {q: b.minimum for q, b in held.items()}
        ends = cluster.offsets_at(dict.fromkeys(held, now + 60_000), held)
        assert ends == {q: b.maximum for q, b in held.items()}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"attributes": {"cleanup.policy": "COMPACTION"}}, "is compacted"),
        ({"attributes": {"message.type": "LITE"}}, "light topics"),
        ({"moving": {"broker-a": {"topic": TOPIC}}}, "is static"),
    ],
)
def test_topics_whose_offsets_mean_something_else_are_refused_by_name(
    fake: FakeCluster, what: dict[str, Any], words: str
) -> None:
    for name, value in what.items():
        setattr(fake, name, value)
    with (
        Cluster((fake.addr,), timeout_ms=5000) as cluster,
        pytest.raises(ConfigError, match=f"subscribe = '{TOPIC}'.*{words}"),
    ):
        cluster.queues(Topics(names=(TOPIC,)))
    stream = Stream(fake)
    with pytest.raises(ConfigError, match=words):
        stream.next(position(0))
    stream.reader.stop()


def test_ordinary_attributes_are_no_obstacle_and_asked_for_once(fake: FakeCluster) -> None:
    fake.attributes = {"cleanup.policy": "DELETE", "message.type": "NORMAL", "retention.ms": "1000"}
    with Cluster((fake.addr,), timeout_ms=5000) as cluster:
        for _ in range(3):
            assert cluster.queues(Topics(names=(TOPIC,))) == [QUEUE]
    assert fake.requests.count(RequestCode.GET_TOPIC_CONFIG) == 1


class TestEndsThatAreNone:
    """The fake queue has the offsets 0 to 39."""

    def planned(self, fake: FakeCluster, **options: str) -> list[Any]:
        given = {"namesrv": fake.addr, "topic": TOPIC, "timeoutMs": "1000", **options}
        return list(CometReader(full_schema(), read_options(given, streaming=False)).partitions())

    @pytest.mark.parametrize(
        "options",
        [
            {"startingOffsets": json.dumps(position(41))},
            {"startingTimestamp": str(MINUTES[20]), "endingOffsets": json.dumps(position(3))},
        ],
        ids=["a start behind the end", "an end before the start"],
    )
    def test_are_no_empty_read(
        self, fake: FakeCluster, options: dict[str, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(DataLossError, match="the range ends before it starts"):
            self.planned(fake, **options)
        assert self.planned(fake, failOnDataLoss="false", **options) == []
        assert "are not a valid range" in caplog.text

    def test_a_stored_offset_behind_the_end_is_none_either(self, fake: FakeCluster) -> None:
        fake.stored = 1000
        with pytest.raises(DataLossError, match="the range ends before it starts"):
            self.planned(fake, startingGroup="g")

    def test_a_group_that_goes_on_meanwhile_is_not_behind_the_end(
        self, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        committed = Cluster.committed

        def consume(*given: Any) -> dict[MessageQueue, int]:
            fake.stored_ms.append(MINUTES[-1])
            fake.stored = len(fake.stored_ms)
            return committed(*given)

        monkeypatch.setattr(Cluster, "committed", consume)
        assert self.planned(fake, startingGroup="g") == []

    @pytest.mark.parametrize(
        "options",
        [
            {"startingOffsets": json.dumps(position(40))},  # offset of the next message
            {"startingOffsets": "latest"},
            {"startingTimestamp": str(MINUTES[-1] + 1)},
            {"endingTimestamp": str(MINUTES[0])},
        ],
    )
    def test_a_span_without_messages_is_an_empty_read(
        self, fake: FakeCluster, options: dict[str, str]
    ) -> None:
        assert self.planned(fake, **options) == []


@pytest.mark.parametrize("names", [("tags", "tags"), ("queueOffset", "queue_offset")])
def test_a_column_that_is_named_twice_is_refused(names: tuple[str, str]) -> None:
    schema = StructType([StructField(name, LongType()) for name in names])
    with pytest.raises(ConfigError, match="each column once"):
        check_schema(schema)
