"""Brokers that restart or are away while the pipeline reads and writes: they are waited for or gone round."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.pipeline.feeding import Topic, wait_for

from cometmq.errors import ConnectError, NoRouteError
from cometmq.pipeline.archive import archive
from cometmq.pipeline.cluster import Cluster
from cometmq.pipeline.options import PullOptions, write_options
from cometmq.pipeline.plan import QueueRange
from cometmq.pipeline.reading import read_parts
from cometmq.pipeline.rows import Outgoing
from cometmq.pipeline.sending import Sender
from cometmq.protocol.columnar import arrow_schema
from cometmq.remoting import new_event_loop
from cometmq.standalone import Standalone, finish_loop

SCHEMA = arrow_schema(["queue_id", "queue_offset", "body"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Restartable:
    """A cluster on fixed ports that can be stopped and started on its data."""

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
    """The bodies of each part, as the parts come."""
    for part in read_parts((topic.namesrv,), ranges(topic), {}, SCHEMA, PullOptions(**options)):
        assert not part.bad
        assert not part.lost
        yield [body.decode() for body in part.batch.column("body").to_pylist()]


def test_a_read_goes_on_behind_a_restart(cluster: Restartable) -> None:
    topic = Topic("Restarted", cluster.namesrv)
    topic.send(5000)
    found: list[str] = []
    for number, bodies in enumerate(read(topic, batch_records=500)):
        found += bodies
        if number == 2:
            cluster.stop()
            threading.Timer(1.0, cluster.start).start()  # the reader meets a closed port first
    assert Counter(found) == Counter(topic.sent)


def test_a_broker_that_stays_away_is_named(cluster: Restartable) -> None:
    topic = Topic("Gone", cluster.namesrv)
    topic.send(5000)
    parts = read(topic, batch_records=500, timeout_ms=500)
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
            sender.send(Outgoing(topic.name, body.encode(), b"", 0, 0, None))
        sender.flush()
        assert sender.messages == 2000
    found = Counter(body for part in read(topic) for body in part)
    assert set(found) == set(bodies)  # at least once: what was under way when it stopped may be there twice
    assert sum(found.values()) <= 2000 + 4 * 10


class Pair:
    """A name server and two brokers, each a process to stop and start; addresses change, names stay."""

    def __init__(self, root: Path) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._standalone = Standalone(root, 0, 0, brokers=2)
        self._run(self._standalone.start())
        self.namesrv = self._standalone.namesrv_addr

    def _run(self, step: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(step, self._loop).result(30)

    def stop_second(self) -> None:
        self._run(self._standalone._children[1].stop())

    def start_second(self) -> None:
        self._run(self._standalone._children[1].start())

    def close(self) -> None:
        self._run(self._standalone.stop())
        self._run(finish_loop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


def test_messages_go_to_both_brokers_and_come_from_both(pair: Pair) -> None:
    topic = Topic("Both", pair.namesrv)
    topic.send(800)
    holders = {queue.broker_name for queue, bounds in topic.bounds().items() if bounds.maximum}
    assert holders == {"broker-a", "broker-b"}
    assert Counter(body for part in read(topic) for body in part) == Counter(topic.sent)


def test_an_archive_takes_what_it_can_reach_and_the_rest_later(
    spark: SparkSession, pair: Pair, output: str
) -> None:
    topic = Topic("Reached", pair.namesrv)
    topic.send(600)
    pair.stop_second()
    with Cluster((topic.namesrv,), timeout_ms=5000) as cluster:
        wait_for(lambda: brokers_of(cluster, topic) == {"broker-a"}, "broker-b is out of the route")
        first = archive(spark, topic.namesrv, [topic.name], output)
        assert 0 < first.records < 600
        pair.start_second()
        wait_for(lambda: len(brokers_of(cluster, topic)) == 2, "broker-b is back in the route")
    second = archive(spark, topic.namesrv, [topic.name], output)
    assert first.records + second.records == 600
    table = spark.read.parquet(output).select("body").collect()
    assert Counter(bytes(row.body).decode() for row in table) == Counter(topic.sent)


def brokers_of(cluster: Cluster, topic: Topic) -> set[str]:
    return {queue.broker_name for queue in cluster.route(topic.name).read_queues}
