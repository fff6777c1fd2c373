"""Stores whose older part retention has deleted: each broker continues the other's store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.interop import store_input, wire
from tests.interop.apache import ApacheBroker
from tests.interop.comet import CometBroker
from tests.interop.conftest import instead_of_ours
from tests.interop.stores import Record
from tests.kit.waiting import wait_until
from tests.long_form import long_form

DELETE_EXPIRED, MIN_OFFSET = 329, 31
GONE = 20  # Apache's broker begins a queue with its first file and skips expired messages
SETTINGS = {**store_input.TINY, "cleanResourceInterval": "200", "deleteConsumeQueueFilesInterval": "1"}
Broker = ApacheBroker | CometBroker
Start = Callable[..., Broker]
QUEUES = [("Alpha", 1), ("Alpha", 2), ("Beta", 1), ("Gamma", 0)]

SLOW = long_form("Apache's broker begins to delete a minute after its start")
pytestmark = pytest.mark.skipif(bool(instead_of_ours()), reason="is about our own broker's store")


@pytest.fixture
def start(names: str, tmp_path: Path) -> Iterator[Start]:
    """``start("ours")``, ``start("apache")``: a broker on the test's single store."""
    running: list[Broker] = []

    def broker(kind: str, **settings: str) -> Broker:
        settings = {**SETTINGS, **settings}
        if kind == "apache":
            running.append(ApacheBroker("4.9.7", tmp_path, names, settings=settings))
        else:
            running.append(CometBroker(tmp_path, names, settings=settings))
        return running[-1]

    yield broker
    for each in running:
        if each.process.running:
            each.kill()


def bound(port: int, code: int, topic: str, queue: int) -> int:
    header, _ = wire.call(port, code, {"topic": topic, "queueId": str(queue)})
    return int(header["extFields"]["offset"])


def served(port: int, topic: str, queue: int) -> list[Record]:
    """Return all messages of a queue."""
    first = bound(port, MIN_OFFSET, topic, queue)
    return store_input.served(port, topic, queue, first, step_over=(GONE,))


def bounds(port: int) -> list[tuple[int, int]]:
    return [
        (bound(port, MIN_OFFSET, topic, queue), bound(port, store_input.MAX_OFFSET, topic, queue))
        for topic, queue in QUEUES
    ]


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "store/commitlog").iterdir())


@pytest.mark.slow("Apache's broker starts and stops")
@pytest.mark.parametrize(
    ("writer", "reader", "end"),
    [
        pytest.param("ours", "apache", "stopped", marks=SLOW),
        ("ours", "apache", "killed"),
        pytest.param("apache", "ours", "stopped", marks=SLOW),
    ],
)
def test_each_broker_goes_on_behind_what_the_other_deleted(
    writer: str, reader: str, end: str, start: Start, tmp_path: Path
) -> None:
    broker = start(writer)
    store_input.feed(broker.port)
    before = {place: store_input.served(broker.port, *place) for place in QUEUES}
    old = segments(tmp_path)[0]
    os.utime(old, (1, 1))
    wire.call(broker.port, DELETE_EXPIRED, {})
    wait_until("the deletion", lambda: not old.exists(), 100)
    first = int(segments(tmp_path)[0].name)
    wait_until("the minimum offsets", lambda: bounds(broker.port)[0][0] > 0)
    left = {
        place: [record for record in records if record.position >= first] for place, records in before.items()
    }
    assert {place: served(broker.port, *place) for place in QUEUES} == left
    known = bounds(broker.port)
    if end == "stopped":
        broker.stop()
    else:
        broker.kill()

    broker = start(reader)
    assert [high for _, high in bounds(broker.port)] == [high for _, high in known]
    assert {place: served(broker.port, *place) for place in QUEUES} == left
    with wire.Connection(broker.port) as connection:
        feeder = store_input.Feeder(connection)
        for (topic, queue), (_, high) in zip(QUEUES, known, strict=True):
            assert feeder.send(topic, queue, b"and on", [])["queueOffset"] == str(high)
    broker.stop()


@pytest.mark.slow("Apache's broker starts and stops")
def test_apaches_broker_goes_on_where_tiered_storage_has_taken_segments_away(
    start: Start, tmp_path: Path
) -> None:
    """It serves the local segments. Afterwards, our broker serves what the object store has, too."""
    tiered = {"tieredStoreUri": f"file://{tmp_path / 'objects'}", "tieredLocalReservedTime": "0"}
    broker = start("ours")
    store_input.feed(broker.port)
    before = {place: store_input.served(broker.port, *place) for place in QUEUES}
    broker.stop()
    broker = start("ours", **tiered)
    wait_until("the deletion", lambda: len(segments(tmp_path)) == 1, 100)
    first = int(segments(tmp_path)[0].name)
    assert first > 0
    assert {place: served(broker.port, *place) for place in QUEUES} == before
    known = bounds(broker.port)
    broker.stop()

    broker = start("apache")
    left = {
        place: [record for record in records if record.position >= first] for place, records in before.items()
    }
    assert [high for _, high in bounds(broker.port)] == [high for _, high in known]
    assert {place: served(broker.port, *place) for place in QUEUES} == left
    broker.stop()

    broker = start("ours", **tiered)
    for place in QUEUES:
        found = served(broker.port, *place)
        assert left[place] == found[len(found) - len(left[place]) :]
        assert found == before[place][len(before[place]) - len(found) :]
    broker.stop()
