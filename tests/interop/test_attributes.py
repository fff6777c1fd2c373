"""Attributes of topics and purges, which Apache's 4.9 does not know, and its 4.9.7 broker on such a store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.interop import store_input, wire
from tests.interop.apache import ApacheBroker, ApacheNamesrv
from tests.interop.comet import CometBroker
from tests.interop.conftest import instead_of_ours
from tests.interop.processes import wait_until

PURGE_TOPIC = 21001
DELETE_EXPIRED = 329
SETTINGS = {**store_input.TINY, "cleanResourceInterval": "100"}
ATTRIBUTES = {"retention.ms": "3600000", "retention.bytes": "1000", "message.type": "NORMAL"}


@pytest.fixture
def names(tmp_path: Path) -> Iterator[str]:
    server = ApacheNamesrv("4.9.7", tmp_path / "names")
    yield f"127.0.0.1:{server.port}"
    server.kill()


def update_topic(feeder: store_input.Feeder, topic: str, attributes: dict[str, str] | None = None) -> None:
    ext = {
        "topic": topic, "defaultTopic": "TBW102", "readQueueNums": "1", "writeQueueNums": "1", "perm": "6",
        "order": "false", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0",
    }  # fmt: skip
    if attributes:
        ext["attributes"] = ",".join(f"+{name}={value}" for name, value in attributes.items())
    feeder.ask(store_input.UPDATE_TOPIC, ext)


def attributes_of(directory: Path, topic: str) -> dict[str, str] | None:
    table = json.loads((directory / "store/config/topics.json").read_text())
    found: dict[str, str] | None = table["topicConfigTable"][topic].get("attributes")
    return found


def bodies(port: int, topic: str, first: int = 0) -> list[bytes]:
    """All that a broker serves of the topic's queue from an offset on."""
    with wire.Connection(port) as connection:
        found: list[bytes] = []
        while True:
            header, body = connection.call(
                store_input.PULL,
                {
                    "consumerGroup": store_input.PROBE, "topic": topic, "queueId": "0",
                    "queueOffset": str(first + len(found)), "maxMsgNums": "32", "sysFlag": "4",
                    "commitOffset": "0", "suspendTimeoutMillis": "0", "subscription": "*", "subVersion": "0",
                    "expressionType": "TAG",
                },
            )  # fmt: skip
            if header["code"] != 0:
                return found
            found += [record.body for record in store_input.records_in(body)]


def minimum(port: int, topic: str) -> int:
    header, _ = wire.call(port, 31, {"topic": topic, "queueId": "0"})
    return int(header["extFields"]["offset"])


@pytest.mark.skipif(bool(instead_of_ours()), reason="is about our own broker's store")
def test_apache_opens_serves_and_forgets_the_attributes(names: str, tmp_path: Path) -> None:
    ours = CometBroker(tmp_path, names, settings=SETTINGS)
    with wire.Connection(ours.port) as connection:
        feeder = store_input.Feeder(connection)
        update_topic(feeder, "Short", ATTRIBUTES)
        update_topic(feeder, "Purged")
        sent = [b"%02d" % number + bytes(150) for number in range(20)]
        for body in sent:
            feeder.send("Short", 0, body, [])
            feeder.send("Purged", 0, body, [])
        feeder.ask(PURGE_TOPIC, {"topic": "Purged", "execute": "true"})
    wait_until("the topic's own retention", lambda: minimum(ours.port, "Short") > 0, 20)
    floor = minimum(ours.port, "Short")
    assert bodies(ours.port, "Short", floor) == sent[floor:]
    assert minimum(ours.port, "Purged") == 20
    ours.stop()
    assert attributes_of(tmp_path, "Short") == ATTRIBUTES

    apache = ApacheBroker("4.9.7", tmp_path, names, settings=SETTINGS)
    assert bodies(apache.port, "Short") == sent  # what its segments hold can be read again
    assert bodies(apache.port, "Purged") == sent
    assert attributes_of(tmp_path, "Short") == ATTRIBUTES  # until it writes the table
    with wire.Connection(apache.port) as connection:
        feeder = store_input.Feeder(connection)
        assert feeder.send("Short", 0, b"by Apache", [])["queueOffset"] == "20"
        assert feeder.send("Purged", 0, b"by Apache", [])["queueOffset"] == "20"
        update_topic(feeder, "Another")
    apache.stop()
    assert not attributes_of(tmp_path, "Short")

    ours = CometBroker(tmp_path, names, settings=SETTINGS)
    assert minimum(ours.port, "Short") == floor  # hidden again: that stands in a table of our own
    assert bodies(ours.port, "Short", floor) == [*sent[floor:], b"by Apache"]
    assert bodies(ours.port, "Purged", 20) == [b"by Apache"]
    with wire.Connection(ours.port) as connection:
        for _ in range(20):
            store_input.Feeder(connection).send("Short", 0, bytes(150), [])
        store_input.Feeder(connection).ask(DELETE_EXPIRED, {})  # returns when a pass is done
    assert minimum(ours.port, "Short") == floor  # without its attributes the topic keeps everything
    ours.stop()
