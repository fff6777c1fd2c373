"""Store directories of earlier versions of CometMQ are opened with all that is in them.

`python -m tests.golden.test_own_stores` records one of the current version in tests/data, for a release.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

import pytest
from tests.kit.waiting import wait_until

from cometmq import Message, SyncProducer, SyncPullConsumer, SyncSimpleConsumer, __version__
from cometmq.testing import LocalBroker, local_broker

DATA = Path(__file__).parents[1] / "data"
STORES = sorted(DATA.glob("store-cometmq-*.tar.gz"))
TOPIC, DELAYED, POPPED, GROUP = "Orders", "Later", "Tasks", "shop"
SETTINGS = {
    "mappedFileSizeCommitLog": "262144",
    "mappedFileSizeConsumeQueue": "2000",
    "maxHashSlotNum": "100",
    "maxIndexNum": "400",
}
BODIES = [b"%d" % number * 50 for number in range(20)]


def record(directory: Path) -> None:
    """Fill a directory: messages with keys, tags and properties, offsets, delayed and leased messages."""
    with local_broker(directory, SETTINGS) as broker, SyncProducer(GROUP, namesrv=broker.namesrv) as producer:
        for number, body in enumerate(BODIES):
            properties = {"number": str(number)}
            producer.send(Message(TOPIC, body, tags="a", keys=[f"key-{number}"], properties=properties))
        producer.send(Message(DELAYED, b"by level", delay_level=3))
        producer.send(Message(DELAYED, b"by time", delay_ms=10_000))
        producer.send_many([Message(POPPED, b"%d" % number) for number in range(3)])
        with SyncPullConsumer(GROUP, namesrv=broker.namesrv) as consumer:
            for queue in consumer.fetch_queues(TOPIC):
                consumer.update_offset(queue, consumer.max_offset(queue) - 1)
        with SyncSimpleConsumer(GROUP, POPPED, namesrv=broker.namesrv) as consumer:
            (first, *_) = received(consumer, 3)
            consumer.ack(first)


def received(consumer: SyncSimpleConsumer, count: int) -> list[object]:
    found: list[object] = []
    wait_until("messages are received", lambda: found.extend(consumer.receive()) or len(found) >= count)
    return found


def read(broker: LocalBroker, topic: str, *, committed: bool = False) -> set[bytes]:
    """Return the bodies of a topic's messages: all, or those behind the offsets of the group."""
    with SyncPullConsumer(GROUP, namesrv=broker.namesrv) as consumer:
        found = set()
        for queue in consumer.fetch_queues(topic):
            offset = consumer.committed(queue) if committed else consumer.min_offset(queue)
            while offset < consumer.max_offset(queue):
                result = consumer.pull(queue, offset)
                found |= {message.body for message in result.messages}
                offset = result.next_begin_offset
        return found


def test_the_current_minor_version_has_its_store() -> None:
    minor = __version__.rpartition(".")[0]
    assert [path for path in STORES if path.name.startswith(f"store-cometmq-{minor}.")]


@pytest.mark.parametrize("archive", STORES, ids=lambda path: path.name)
def test_all_that_an_earlier_version_has_stored_is_there(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as stored:
        stored.extractall(tmp_path, filter="data")
    with local_broker(tmp_path / "store", SETTINGS) as broker:
        assert read(broker, TOPIC) == set(BODIES)
        assert read(broker, TOPIC, committed=True) == {BODIES[16], BODIES[17], BODIES[18], BODIES[19]}
        with SyncProducer(GROUP, namesrv=broker.namesrv) as producer:
            (found,) = producer.query_messages(TOPIC, "key-7")
            assert (found.tags, found.properties["number"]) == ("a", "7")
        wait_until("what is due is delivered", lambda: read(broker, DELAYED) == {b"by level", b"by time"})
        with SyncSimpleConsumer(GROUP, POPPED, namesrv=broker.namesrv) as consumer:
            assert len(received(consumer, 2)) == 2


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        record(Path(directory) / "store")
        with tarfile.open(DATA / f"store-cometmq-{__version__}.tar.gz", "w:gz") as archive:
            archive.add(Path(directory) / "store", "store")
