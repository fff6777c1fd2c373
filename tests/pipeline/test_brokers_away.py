"""Brokers that restart or are unreachable while the pipeline reads and writes: it waits or uses others."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.kit.fakes import FakeBroker, FakeNamesrv, serving
from tests.kit.waiting import wait_until
from tests.pipeline.fake_servers import TOPIC, fake_cluster
from tests.pipeline.feeding import Topic
from tests.ports import free_port

from cometmq.errors import ConnectError, NoRouteError
from cometmq.message import MessageQueue
from cometmq.pipeline.base.options import PullOptions, Topics, write_options
from cometmq.pipeline.base.plan import QueueRange
from cometmq.pipeline.jobs.archive import ArchiveProgress, archive
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.live.reading import read_parts
from cometmq.pipeline.sink.rows import RowMessage
from cometmq.pipeline.sink.sending import Sender
from cometmq.protocol.record.arrow import arrow_schema
from cometmq.standalone import Standalone
from cometmq.testing import ServerProcess

SCHEMA = arrow_schema(["queue_id", "queue_offset", "body"])


class Restartable:
    """A cluster on fixed ports that can be restarted on the same data."""

    def __init__(self, root: Path) -> None:
        self.root, self.ports = root, (free_port(), free_port())
        self.namesrv = f"127.0.0.1:{self.ports[0]}"
        self._running = ExitStack()

    def start(self) -> None:
        self._running.enter_context(Standalone(self.root, *self.ports).run_in_thread())

    def stop(self) -> None:
        self._running.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Restartable]:
    made = Restartable(tmp_path / "cluster")
    made.start()
    yield made
    made.stop()


def ranges(topic: Topic) -> list[QueueRange]:
    return [QueueRange(queue, held.minimum, held.maximum) for queue, held in sorted(topic.bounds().items())]


def read(topic: Topic, **options: Any) -> Iterator[list[str]]:
    """Yield the bodies of each part as the parts arrive."""
    for part in read_parts((topic.namesrv,), ranges(topic), {}, SCHEMA, PullOptions(**options)):
        assert not part.bad
        assert not part.lost
        yield [body.decode() for body in part.batch.column("body").to_pylist()]


def test_a_read_goes_on_behind_a_restart(cluster: Restartable) -> None:
    topic = Topic("Restarted", cluster.namesrv)
    topic.send(5000)
    found: list[str] = []
    for number, bodies in enumerate(read(topic, batch_records=500, pull_batch_size=32)):
        found += bodies
        if number == 2:
            cluster.stop()
            threading.Timer(1.0, cluster.start).start()  # the reader first finds the port closed
    assert Counter(found) == Counter(topic.sent)


def test_a_broker_that_stays_away_is_named(cluster: Restartable) -> None:
    topic = Topic("Gone", cluster.namesrv)
    topic.send(5000)
    parts = read(topic, batch_records=500, pull_batch_size=32, timeout_ms=500)
    next(parts)
    cluster.stop()
    with pytest.raises((ConnectError, NoRouteError), match=r"127\.0\.0\.1"):
        list(parts)


def test_a_writer_goes_on_behind_a_restart(cluster: Restartable) -> None:
    topic = Topic("Written", cluster.namesrv)
    options = write_options(
        {"namesrv": cluster.namesrv, "topic": topic.name, "batchRecords": "10", "retries": "8"}
    )
    bodies = [f"{number}:" for number in range(2000)]
    with Sender(options) as sender:
        for number, body in enumerate(bodies):
            if number == 700:
                cluster.stop()
                threading.Timer(0.5, cluster.start).start()
            sender.send(RowMessage(topic.name, body.encode(), b"", 0, 0, None))
        sender.flush()
        assert sender.messages == 2000
    found = Counter(body for part in read(topic) for body in part)
    assert set(found) == set(bodies)  # at least once: messages in flight at the stop may be duplicated
    assert sum(found.values()) <= 2000 + 4 * 10


class Pair:
    """A second broker in its own process; its address changes with each start."""

    def __init__(self, root: Path, namesrv: str) -> None:
        self.namesrv = namesrv
        settings = {
            "brokerName": "broker-b", "brokerIP1": "127.0.0.1", "listenPort": 0, "namesrvAddr": namesrv,
            "storePathRootDir": root / "store", "mappedFileSizeCommitLog": 1 << 24,
            "mappedFileSizeConsumeQueue": 20 * 3000, "maxHashSlotNum": 1000, "maxIndexNum": 4000,
        }  # fmt: skip
        conf = root / "broker.conf"
        conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        self._command = [str(Path(sys.executable).parent / "mqbroker"), "-c", str(conf)]
        self.start_second()

    def stop_second(self) -> None:
        self._second.stop()

    def start_second(self) -> None:
        self._second = ServerProcess(self._command, "boot success")
        self._second.wait_ready()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    first = Standalone(tmp_path_factory.mktemp("first"), 0, 0)
    with first.run_in_thread():
        made = Pair(tmp_path_factory.mktemp("second"), first.namesrv_addr)
        yield made
        made.stop_second()


def test_messages_go_to_both_brokers_and_come_from_both(pair: Pair) -> None:
    topic = Topic("Both", pair.namesrv)
    topic.send(800)
    holders = {queue.broker_name for queue, bounds in topic.bounds().items() if bounds.maximum}
    assert holders == {"broker-a", "broker-b"}
    assert Counter(body for part in read(topic) for body in part) == Counter(topic.sent)


def test_an_archive_takes_what_it_can_and_the_rest_later(
    spark: SparkSession, pair: Pair, output: str
) -> None:
    topic = Topic("Reached", pair.namesrv)
    topic.send(600)
    pair.stop_second()
    with Cluster((topic.namesrv,), timeout_ms=5000) as cluster:
        wait_until("broker-b is out of the route", lambda: brokers_of(cluster, topic) == {"broker-a"})
        first = archive(spark, topic.namesrv, [topic.name], output)
        assert 0 < first.records < 600
        pair.start_second()
        wait_until("broker-b is back in the route", lambda: len(brokers_of(cluster, topic)) == 2)
        second = archive(spark, topic.namesrv, [topic.name], output)
        assert first.records + second.records == 600
        assert (second.away, second.complete) == ([], True)
        pair.stop_second()
        wait_until("broker-b is out of the route", lambda: brokers_of(cluster, topic) == {"broker-a"})
        third = archive(spark, topic.namesrv, output=output, pattern=topic.name)
        assert (third.records, third.away, third.complete) == (0, ["broker-b"], False)
        pair.start_second()
        wait_until("broker-b is back in the route", lambda: len(brokers_of(cluster, topic)) == 2)
    table = spark.read.parquet(output).select("body").collect()
    assert Counter(bytes(row.body).decode() for row in table) == Counter(topic.sent)


@pytest.mark.parametrize(
    ("wanted", "here", "topics", "write_only", "away"),
    [
        (Topics(names=("t",)), "ab", ["t"], "", []),
        (Topics(names=("t",)), "a", ["t"], "", ["b"]),
        (Topics(pattern="t|u"), "a", ["t"], "", ["b"]),
        (Topics(pattern="t|u"), "", [], "", ["a", "b"]),  # no topic is left that matches
        (Topics(pattern="u"), "a", ["t"], "", []),  # known, but not requested this time
        (Topics(pattern="t"), "ab", ["u"], "", []),  # the brokers are online, but the topic was deleted
        (Topics(names=("t",)), "ab", ["t"], "b", ["b"]),  # in a route, but not readable
        (Topics(names=("t",)), "abc", ["t"], "c", ["c"]),
    ],
)
def test_a_broker_is_away_if_it_is_known_and_cannot_be_read(
    wanted: Topics, here: str, topics: list[str], write_only: str, away: list[str]
) -> None:
    names = FakeNamesrv()
    for topic in topics:
        names.serve(topic, *map(FakeBroker, here))
        for queues in names.routes[topic].queue_datas:
            queues.perm = 2 if queues.broker_name in write_only else 6
    known = [MessageQueue("t", broker_name, 0) for broker_name in "ab"]
    with serving(names) as namesrv, Cluster((namesrv,), timeout_ms=5000) as cluster:
        assert cluster.away(wanted, known, cluster.queues(wanted)) == away


def test_a_replica_is_read_and_its_master_is_away(spark: SparkSession, output: str) -> None:
    with fake_cluster() as fake:
        fake.stored_ms = [1_000_000] * 5
        fake.brokers = {1: fake.addr}
        first = archive(spark, fake.addr, [TOPIC], output)
        fake.brokers = {}
        second = archive(spark, fake.addr, [TOPIC], output)
    assert (first.records, first.away, first.complete) == (5, ["broker-a"], False)
    assert (second.records, second.away, second.complete) == (0, [], True)


def test_continuous_runs_name_looks_that_failed(
    spark: SparkSession, cluster: Restartable, output: str
) -> None:
    topic = Topic("Looked", cluster.namesrv)
    topic.send(20)
    stop = threading.Event()

    def show(progress: ArchiveProgress) -> None:
        if progress.records == 20 and progress.bytes:  # bytes are counted when a batch is committed
            cluster.stop()
            threading.Timer(1.5, stop.set).start()

    summary = archive(
        spark, cluster.namesrv, [topic.name], output, mode="continuous", interval_s=0.1, timeout_ms=300,
        stop=stop, on_progress=show,
    )  # fmt: skip
    assert (summary.records, summary.complete) == (20, False)
    assert summary.put_off is not None
    assert cluster.namesrv in summary.put_off


def brokers_of(cluster: Cluster, topic: Topic) -> set[str]:
    return {queue.broker_name for queue in cluster.route(topic.name).read_queues}
