"""Topic attributes and purges, which Apache's 4.9 does not have, and its 4.9.7 broker on such a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.interop import store_input, wire
from tests.interop.apache import ApacheBroker
from tests.interop.comet import CometBroker
from tests.interop.conftest import instead_of_ours
from tests.kit.waiting import wait_until

PURGE_TOPIC = 21001
DELETE_EXPIRED = 329
SETTINGS = {**store_input.TINY, "cleanResourceInterval": "100"}
ATTRIBUTES = {"retention.ms": "3600000", "retention.bytes": "1000", "message.type": "NORMAL"}


def attributes_of(directory: Path, topic: str) -> dict[str, str] | None:
    table = json.loads((directory / "store/config/topics.json").read_text())
    found: dict[str, str] | None = table["topicConfigTable"][topic].get("attributes")
    return found


def bodies(port: int, topic: str, first: int = 0) -> list[bytes]:
    """Return all bodies that a broker serves from the topic's queue, beginning with an offset."""
    return [record.body for record in store_input.served(port, topic, 0, first)]


def minimum(port: int, topic: str) -> int:
    header, _ = wire.call(port, 31, {"topic": topic, "queueId": "0"})
    return int(header["extFields"]["offset"])


@pytest.mark.slow("waits for Apache's 10 s stop")
@pytest.mark.skipif(bool(instead_of_ours()), reason="is about our own broker's store")
def test_apache_opens_serves_and_forgets_the_attributes(names: str, tmp_path: Path) -> None:
    ours = CometBroker(tmp_path, names, settings=SETTINGS)
    with wire.Connection(ours.port) as connection:
        feeder = store_input.Feeder(connection)
        feeder.update_topic(
            "Short", 1, attributes=",".join(f"+{name}={value}" for name, value in ATTRIBUTES.items())
        )
        feeder.update_topic("Purged", 1)
        sent = [b"%02d" % number + bytes(150) for number in range(20)]
        for body in sent:
            feeder.send("Short", 0, body, [])
            feeder.send("Purged", 0, body, [])
        feeder.ask(PURGE_TOPIC, {"topic": "Purged", "execute": "true"})
    wait_until("the topic's own retention", lambda: minimum(ours.port, "Short") > 0)
    floor = minimum(ours.port, "Short")
    assert bodies(ours.port, "Short", floor) == sent[floor:]
    assert minimum(ours.port, "Purged") == 20
    ours.stop()
    assert attributes_of(tmp_path, "Short") == ATTRIBUTES

    apache = ApacheBroker("4.9.7", tmp_path, names, settings=SETTINGS)
    assert bodies(apache.port, "Short") == sent  # Apache's broker serves the hidden messages
    assert bodies(apache.port, "Purged") == sent
    assert attributes_of(tmp_path, "Short") == ATTRIBUTES  # Apache's broker has not rewritten the table yet
    with wire.Connection(apache.port) as connection:
        feeder = store_input.Feeder(connection)
        assert feeder.send("Short", 0, b"by Apache", [])["queueOffset"] == "20"
        assert feeder.send("Purged", 0, b"by Apache", [])["queueOffset"] == "20"
        feeder.update_topic("Another", 1)
    apache.stop()
    assert not attributes_of(tmp_path, "Short")

    ours = CometBroker(tmp_path, names, settings=SETTINGS)
    assert minimum(ours.port, "Short") >= floor  # hidden again by a table of our own
    floor = minimum(ours.port, "Short")  # may have grown since the first look-up
    assert bodies(ours.port, "Short", floor) == [*sent[floor:], b"by Apache"]
    assert bodies(ours.port, "Purged", 20) == [b"by Apache"]
    with wire.Connection(ours.port) as connection:
        for _ in range(20):
            store_input.Feeder(connection).send("Short", 0, bytes(150), [])
        store_input.Feeder(connection).ask(DELETE_EXPIRED, {})  # returns after a retention pass
    assert minimum(ours.port, "Short") == floor  # without attributes the topic keeps everything
    ours.stop()
