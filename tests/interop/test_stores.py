"""Stores of our broker and of Apache's 4.9.7: equal for the same input, and each opens the other's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest
from tests.interop import store_input, wire
from tests.interop.apache import ApacheBroker
from tests.interop.comet import CometBroker
from tests.interop.conftest import instead_of_ours
from tests.interop.processes import side_by_side
from tests.interop.stores import Record, Store, differences, read_store
from tests.kit.waiting import wait_until
from tests.long_form import long_form

ON_FIRST_USE = {"RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"}
"""Topics that a transaction check creates, which Apache's broker runs once at its stop."""
QUEUES = [("Alpha", each) for each in range(4)] + [("Beta", 1), ("Gamma", 0)]
Broker = ApacheBroker | CometBroker


class Start(Protocol):
    def __call__(self, kind: str, directory: Path, **settings: str) -> Broker:
        """Start a broker on a directory: ``start("ours", directory)`` or ``start("apache", directory)``."""


@pytest.fixture(scope="module")
def start(names: str) -> Iterator[Start]:
    running: list[Broker] = []

    def broker(kind: str, directory: Path, **settings: str) -> Broker:
        version = "4.9.7" if kind == "apache" else instead_of_ours()
        settings = {**store_input.TINY, **settings}
        if version:
            running.append(ApacheBroker(version, directory, names, settings=settings))
        else:
            running.append(CometBroker(directory, names, settings=settings))
        return running[-1]

    yield broker
    for each in running:
        if each.process.running:
            each.kill()


@pytest.fixture(scope="module")
def written(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """``written("ours", "stopped")``: the store of a broker that was stopped cleanly or killed."""
    made: dict[tuple[str, str], Path] = {}

    def directory(kind: str, end: str) -> Path:
        if (kind, end) not in made:
            path = tmp_path_factory.mktemp(f"{kind}-{end}")
            broker = start(kind, path)
            store_input.feed(broker.port)
            if end == "killed":
                broker.kill()
            else:
                # A JVM ended by SIGTERM returns 143 even after a clean stop.
                assert broker.stop() in (0, 143)
            made[kind, end] = path
        return made[kind, end]

    return directory


def read_tiny(directory: Path) -> Store:
    return read_store(directory / "store", slots=store_input.TINY_SLOTS)


@pytest.mark.slow("Apache's broker starts and stops")
def test_the_same_input_gives_the_same_files(written: Callable[[str, str], Path]) -> None:
    apache, ours = (read_tiny(written(kind, "stopped")) for kind in ("apache", "ours"))
    assert len(apache.records) == 814
    assert len(apache.indexes) > 1
    assert differences(apache, ours) == []


def test_the_configuration_tables_say_the_same(written: Callable[[str, str], Path]) -> None:
    apache, ours = (read_tiny(written(kind, "stopped")).tables for kind in ("apache", "ours"))
    for name, table in (
        ("topics.json", "topicConfigTable"),
        ("subscriptionGroup.json", "subscriptionGroupTable"),
    ):
        wanted = {key: value for key, value in apache[name][table].items() if key not in ON_FIRST_USE}
        assert ours[name][table] == wanted
        assert set(ours[name]) == set(apache[name])
    assert ours["consumerOffset.json"]["offsetTable"] == apache["consumerOffset.json"]["offsetTable"]


@pytest.mark.slow("eight brokers, and Apache's take ten seconds to stop")
@pytest.mark.representative
def test_each_broker_opens_what_the_other_wrote(
    start: Start, written: Callable[[str, str], Path], tmp_path: Path
) -> None:
    cases = []
    for writer, reader in (("ours", "apache"), ("apache", "ours")):
        for end in ("stopped", "killed"):
            place = tmp_path / f"{writer}-{end}"
            shutil.copytree(written(writer, end) / "store", place / "store")
            cases.append((reader, end, place, start))
    side_by_side(opens, cases)


def opens(reader: str, end: str, place: Path, start: Start) -> None:
    before = read_tiny(place)
    assert (place / "store" / "abort").exists() == (end == "killed")
    broker = start(reader, place)
    wanted = {(topic, queue): _records_of(before, topic, queue) for topic, queue in QUEUES}
    assert {name: len(records) for name, records in wanted.items()} == dict(
        zip(QUEUES, [125, 126, 125, 125, 8, 300], strict=True)
    )
    for (topic, queue), records in wanted.items():
        assert store_input.served(broker.port, topic, queue)[: len(records)] == records
    _answers_by_key(broker.port, before)
    if end == "stopped":
        for queue in range(4):
            assert store_input.consumer_offset(broker.port, store_input.GROUP, "Alpha", queue) == 10 + queue
    _goes_on(broker.port, wanted)
    # Apache rebuilds the lost end of queues before it knows the delay levels, and delivers those messages
    # early.
    rebuilt_by_apache = (reader, end) == ("apache", "killed")
    _delivers_what_was_due(broker.port, before, early=rebuilt_by_apache)
    broker.stop()
    after = read_tiny(place)
    assert after.records[: len(before.records)] == before.records


@long_form("four brokers one after the other")
def test_a_log_over_two_directories_goes_from_one_broker_to_the_other(start: Start, tmp_path: Path) -> None:
    both = [("ours", "apache"), ("apache", "ours")]
    side_by_side(lambda *case: hand_over(*case, start, tmp_path / case[0]), both)


def hand_over(writer: str, reader: str, start: Start, place: Path) -> None:
    paths = {"storePathCommitLog": f"{place / 'a'},{place / 'b'}"}
    broker = start(writer, place, **paths)
    store_input.feed(broker.port)
    wanted = {name: store_input.served(broker.port, *name) for name in QUEUES}
    assert all(wanted.values())
    broker.stop()
    names = {name: sorted(int(path.name) >> 20 for path in (place / name).iterdir()) for name in "ab"}
    assert names["a"][:2] == [0, 2]
    assert names["b"][:1] == [1]
    again = start(reader, place, **paths)
    for (topic, queue), records in wanted.items():
        assert store_input.served(again.port, topic, queue)[: len(records)] == records
    again.stop()


@long_form("three brokers one after the other")
def test_directories_elsewhere_and_apaches_broker(start: Start, tmp_path: Path) -> None:
    """Apache's broker ignores these settings: it rebuilds its queues from the log, or follows links."""
    away, root = tmp_path / "away", tmp_path / "store"
    names = {
        "consumequeue": "storePathConsumeQueue",
        "index": "storePathIndex",
        "checkpoint": "storeCheckpoint",
    }
    settings = {key: str(away / name) for name, key in names.items()} | {"abortFile": str(away / "abort")}
    broker = start("ours", tmp_path, **settings)
    store_input.feed(broker.port)
    wanted = {name: store_input.served(broker.port, *name) for name in QUEUES}
    assert (away / "abort").exists()
    broker.stop()
    assert sorted(each.name for each in away.iterdir()) == sorted(names)
    assert not any((root / name).exists() for name in names)
    broker = start("apache", tmp_path, **settings)
    for (topic, queue), records in wanted.items():
        assert store_input.served(broker.port, topic, queue)[: len(records)] == records
    with wire.Connection(broker.port) as connection:
        store_input.Feeder(connection).send("Gamma", 0, b"from apache", [("KEYS", "from apache")])
    wait_until("the message of Apache's", partial(_ends_with, broker.port, "Gamma", 0, b"from apache"))
    assert broker.stop() in (0, 143)
    for name in ("consumequeue", "index"):
        shutil.rmtree(root / name)
        (root / name).symlink_to(away / name)
    for kind in ("ours", "apache"):
        broker = start(kind, tmp_path, **settings)
        for (topic, queue), records in wanted.items():
            assert store_input.served(broker.port, topic, queue)[: len(records)] == records
        assert _ends_with(broker.port, "Gamma", 0, b"from apache")
        assert broker.stop() in (0, 143)


def _records_of(store: Store, topic: str, queue: int) -> list[Record]:
    """Read the log instead of the queue files, which may lack their end after a kill."""
    return [each for each in store.records if (each.topic, each.queue_id) == (topic, queue)]


def _answers_by_key(port: int, before: Store) -> None:
    for topic, key in (("Gamma", "p3.7"), ("Alpha", "k7"), ("Beta", "big400000"), ("Alpha", f"{9:032X}")):
        wanted = [each for each in before.records if each.topic == topic and key in store_input.keys(each)]
        assert store_input.by_key(port, topic, key) == wanted != []


def _goes_on(port: int, wanted: dict[tuple[str, int], list[Record]]) -> None:
    """Check that new messages get the next offsets of their queues."""
    with wire.Connection(port) as connection:
        feeder = store_input.Feeder(connection)
        for (topic, queue), records in wanted.items():
            if (topic, queue) == ("Alpha", 0):
                continue  # delayed messages are delivered here at their own time
            answer = feeder.send(topic, queue, b"appended", [("KEYS", "appended")])
            assert answer["queueOffset"] == str(len(records))
            # Apache's broker responds to a send before it has written the queue's unit.
            wait_until("the appended message", partial(_ends_with, port, topic, queue, b"appended"))


def _ends_with(port: int, topic: str, queue: int, body: bytes) -> bool:
    return store_input.served(port, topic, queue)[-1].body == body


def _delivers_what_was_due(port: int, before: Store, *, early: bool) -> None:
    """Level 3 is ten seconds after the writer stored the message, and no message is delivered earlier."""
    delays_ms = {b"later 3": 10_000, b"later 4": 30_000, b"later 5": 60_000, b"later 18": 7_200_000}
    stored = {each.body: each.stored for each in before.records if each.body in delays_ms}
    assert stored.keys() == delays_ms.keys()

    def late() -> list[Record]:
        return [each for each in store_input.served(port, "Alpha", 0) if each.body in delays_ms]

    wait_until("the delayed message", lambda: b"later 3" in [each.body for each in late()], every_s=0.3)
    got = late()
    assert len({each.body for each in got}) == len(got)
    if not early:
        for each in got:
            assert each.stored >= stored[each.body] + delays_ms[each.body]
