"""Master and slave of both makes over the HA port: our slave under Apache's 4.9.7 master, and the reverse
(docs/reference/storage.md, HA port)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.interop import store_input, wire
from tests.interop.apache import ApacheBroker
from tests.interop.comet import CometBroker
from tests.interop.processes import broker_port, side_by_side, wait_until
from tests.interop.stores import Record
from tests.long_form import long_form

RUNTIME_INFO = 28
OK, SLAVE_NOT_AVAILABLE = 0, 11
SEGMENT = int(store_input.TINY["mappedFileSizeCommitLog"])
Broker = ApacheBroker | CometBroker
QUEUES = [("Alpha", each) for each in range(4)] + [("Beta", 1), ("Gamma", 0)]


class Pair:
    """A SYNC_MASTER and its slave, each of its make."""

    def __init__(self, directory: Path, names: str, makes: dict[str, str]) -> None:
        self._directory = directory
        self._names = names
        self._makes = makes
        self._ports = {role: broker_port() for role in makes}
        self.brokers: dict[str, Broker] = {}

    def start(self, role: str) -> None:
        """Start "master" or "slave", again too, on its port and directory."""
        roles = {
            "master": {"brokerRole": "SYNC_MASTER"},
            "slave": {"brokerRole": "SLAVE", "brokerId": "1"},
        }
        settings = {**store_input.TINY, "slaveTimeout": "10000", **roles[role]}
        directory = self._directory / role
        name, port = f"pair-{self._makes['master']}", self._ports[role]
        if self._makes[role] == "apache":
            self.brokers[role] = ApacheBroker(
                "4.9.7", directory, self._names, name=name, port=port, settings=settings
            )
        else:
            self.brokers[role] = CometBroker(directory, self._names, name=name, port=port, settings=settings)

    def port(self, role: str) -> int:
        return self._ports[role]

    def end(self, role: str) -> int:
        """Where a broker's log ends."""
        _, body = wire.call(self.port(role), RUNTIME_INFO)
        found = re.search(rb'"commitLogMaxOffset":"(\d+)"', body)
        return int(found[1]) if found else -1

    def send(self, count: int = 1, size: int = 100) -> list[int]:
        """The codes of so many sends to the master."""
        codes = []
        with wire.Connection(self.port("master"), timeout_s=20.0) as connection:
            feeder = store_input.Feeder(connection)
            for number in range(count):
                try:
                    feeder.send("Alpha", number % 4, bytes(size), [("KEYS", f"k{number}")])
                    codes.append(OK)
                except store_input.RefusedError as error:
                    codes.append(error.args[1])
        return codes

    def in_step(self) -> None:
        """The slave is waited for, and has everything."""
        wait_until("a send with a slave", lambda: self.send() == [OK], 60.0, 0.5)
        self.equal()

    def equal(self) -> None:
        wait_until("as long a log", lambda: self.end("slave") == self.end("master"), 60.0, 0.2)

    def log(self, role: str) -> dict[int, bytes]:
        """Segments by their first position, as far as they are written."""
        end = self.end(role)
        files = sorted((self._directory / role / "store" / "commitlog").iterdir())
        return {
            int(file.name): file.read_bytes()[: end - int(file.name)]
            for file in files
            if int(file.name) < end
        }

    def kill(self) -> None:
        for broker in self.brokers.values():
            if broker.process.running:
                broker.kill()


@pytest.fixture
def pairs(tmp_path: Path, names: str) -> Iterator[list[Pair]]:
    kinds = [("apache", "ours"), ("ours", "apache")]
    made = [Pair(tmp_path / master, names, {"master": master, "slave": slave}) for master, slave in kinds]
    yield made
    for pair in made:
        pair.kill()


@long_form("a minute and a half: a slave of Apache's first reports after 5 s")
def test_master_and_slave_of_both_makes(pairs: list[Pair]) -> None:
    side_by_side(replicate, [(pair,) for pair in pairs])


def replicate(pair: Pair) -> None:
    pair.start("master")
    assert pair.send() == [SLAVE_NOT_AVAILABLE]
    pair.start("slave")
    pair.in_step()
    # A slave under load, over several segments.
    with wire.Connection(pair.port("master")) as connection:
        feeder = store_input.Feeder(connection)
        for topic in ("Alpha", "Beta", "Gamma"):
            feeder.update_topic(topic, 4)
    store_input.feed(pair.port("master"))
    pair.equal()
    same(pair)
    # It comes back behind its master, after a stop and after a kill.
    for end in ("stop", "kill"):
        getattr(pair.brokers["slave"], end)()
        wait_until("no slave", lambda: pair.send() == [SLAVE_NOT_AVAILABLE], 60.0, 0.5)
        assert set(pair.send(40, size=50_000)) == {SLAVE_NOT_AVAILABLE}
        pair.start("slave")
        pair.in_step()
        same(pair)
    # Its master is away, and comes back; reads go on.
    for end in ("stop", "kill"):
        getattr(pair.brokers["master"], end)()
        assert len(store_input.served(pair.port("slave"), "Beta", 1)) == 8
        pair.start("master")
        pair.in_step()
    same(pair)


def same(pair: Pair) -> None:
    """Both logs hold the same bytes, from where the slave's begins, and both brokers serve the same."""
    of_master, of_slave = pair.log("master"), pair.log("slave")
    assert list(of_master)[-len(of_slave) :] == list(of_slave)
    assert len(of_slave) > 1
    for base, data in of_slave.items():
        assert data == of_master[base], base
    for topic, queue in QUEUES:
        whole = store_input.served(pair.port("master"), topic, queue)
        copy = of_slave_queue(pair, topic, queue)
        assert copy == whole[len(whole) - len(copy) :]
        assert len(copy) > 3


def of_slave_queue(pair: Pair, topic: str, queue: int) -> list[Record]:
    """What the slave serves, once it knows the topic: within the 10 s of its next round."""
    found: list[Record] = []

    def served() -> bool:
        with suppress(AssertionError):
            found[:] = store_input.served(pair.port("slave"), topic, queue)
            return True
        return False

    wait_until("the topic", served, 30.0, 0.5)
    return found
