"""Masters and slaves of both implementations that stop, replace each other, and are compared."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.interop import store_input, wire
from tests.interop.apache import ApacheBroker
from tests.interop.comet import CometBroker
from tests.interop.processes import QUICK
from tests.interop.stores import Record, loads, units_of
from tests.kit.waiting import wait_until
from tests.ports import free_port

OURS = "ours"
ROLES = {
    "master": {"brokerRole": "SYNC_MASTER", "brokerId": "0"},
    "slave": {"brokerRole": "SLAVE", "brokerId": "1"},
}
OK, FLUSH_SLAVE_TIMEOUT, SLAVE_NOT_AVAILABLE = 0, 12, 11
ALONE = {OURS: SLAVE_NOT_AVAILABLE, "4.9.7": SLAVE_NOT_AVAILABLE, "5.5.0": FLUSH_SLAVE_TIMEOUT}
"""The status that a SYNC_MASTER returns for a send without a slave."""
SETTINGS = {
    **store_input.TINY,
    "maxIndexNum": "10000",  # Apache's broker reuses the name of an index file within a millisecond
    "slaveTimeout": "10000",
}
TOPICS, OFFSETS, DELAYS, GROUPS = 21, 43, 45, 201
COPIED_WITHIN_S = 150.0
"""Limit, in seconds, for copies of tables.

Slaves copy every 10 s, but 5.5's slave, which checks every 3 s, copies once a minute.
"""
REFUSE_READS = ("5.5.0",)
"""Slaves that refuse reads (code 2) while slaveReadEnable is false, the default."""
NO_MESSAGE = 0x7FFFFFFF
"""The size in the filler units before the first unit of a queue that does not begin at 0."""
SMALL_JVM = ["-Xms128m", "-Xmx384m", *QUICK]


@dataclass
class Replicas:
    """A SYNC_MASTER and its slave, each with a port and a directory that survive its process.

    `makes` is OURS or a version of Apache's, by role.
    """

    directory: Path
    names: str
    name: str
    makes: dict[str, str]
    settings: dict[str, str] = field(default_factory=lambda: dict(SETTINGS))
    brokers: dict[str, ApacheBroker | CometBroker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ports = {role: free_port() for role in self.makes}

    def start(self, role: str) -> None:
        """Start or restart "master" or "slave"."""
        make, directory = self.makes[role], self.directory / role
        settings = {**self.settings, **ROLES[role]}
        place: dict[str, Any] = {"name": self.name, "port": self._ports[role]}
        if make == OURS:
            self.brokers[role] = CometBroker(directory, self.names, settings=settings, **place)
        else:
            # Without this setting 5.x's SYNC_MASTER waits for no slave.
            settings |= {"inSyncReplicas": "2"} if make == "5.5.0" else {}
            self.brokers[role] = ApacheBroker(
                make, directory, self.names, settings=settings, jvm=SMALL_JVM, **place
            )

    def replace(self, role: str, make: str, *, kill: bool = False) -> None:
        """Stop or kill a broker; a broker of another implementation continues with its directory."""
        _ = self.brokers[role].kill() if kill else self.brokers[role].stop()
        self.makes[role] = make
        self.start(role)

    def port(self, role: str) -> int:
        return self._ports[role]

    def store(self, role: str) -> Path:
        return self.directory / role / "store"

    def end(self, role: str) -> int:
        """Return the end of a broker's log; -1 if the broker does not respond."""
        with suppress(OSError):
            return int(wire.runtime_info(self.port(role)).get("commitLogMaxOffset", -1))
        return -1

    def send(self, count: int = 1, size: int = 100, topic: str = "Alpha", *, wait: bool = True) -> list[int]:
        """Send `count` messages to the master and return the response codes; `wait`: wait for the slave."""
        codes = []
        with wire.Connection(self.port("master"), timeout_s=20.0) as connection:
            feeder = store_input.Feeder(connection)
            for number in range(count):
                try:
                    feeder.send(
                        topic, number % 4, bytes(size), [("KEYS", f"k{number}"), ("WAIT", str(wait).lower())]
                    )
                    codes.append(OK)
                except store_input.RefusedError as error:
                    codes.append(error.args[1])
        return codes

    def alone(self) -> None:
        """Wait until the master reports that it has no slave."""
        wait_until("no slave", lambda: self.send() == [ALONE[self.makes["master"]]], every_s=0.5)

    def in_step(self) -> None:
        """Wait until the master waits for the slave, and the slave has everything."""
        wait_until("a send with a slave", lambda: self.send() == [OK], every_s=0.5)
        self.equal()

    def equal(self) -> None:
        wait_until("as long a log", lambda: 0 <= self.end("slave") == self.end("master"), every_s=0.2)

    def under_way(self) -> None:
        """Wait until the slave has the master's present log; under load it never has all of it."""
        wait_until("a send with a slave", lambda: self.send() == [OK], 120.0, 0.5)
        end = self.end("master")
        wait_until(f"the slave has {end}", lambda: self.end("slave") >= end, 120.0, 0.2)

    def log(self, role: str) -> dict[int, bytes]:
        """Return the written parts of the segments by first position."""
        end = self.end(role)
        files = sorted((self.store(role) / "commitlog").iterdir())
        return {
            int(file.name): file.read_bytes()[: end - int(file.name)]
            for file in files
            if int(file.name) < end
        }

    def table(self, role: str, code: int) -> dict[str, Any]:
        """Return a table as slaves request it."""
        header, body = wire.call(self.port(role), code)
        assert header["code"] == OK, header
        found: dict[str, Any] = loads(body.decode())
        return found

    def kill(self) -> None:
        for broker in self.brokers.values():
            if broker.process.running:
                broker.kill()


def same(pair: Replicas, queues: list[tuple[str, int]]) -> None:
    """Check that both logs are equal from the slave's beginning on, and that the queues are equal.

    Both brokers must serve the same messages.
    """
    of_master, of_slave = pair.log("master"), pair.log("slave")
    assert list(of_master)[-len(of_slave) :] == list(of_slave)
    assert len(of_slave) > 1
    for base, data in of_slave.items():
        assert data == of_master[base], base
    for topic, queue in queues:
        wait_until(f"the same units of {topic} {queue}", partial(same_units, pair, topic, queue), every_s=0.5)
        if pair.makes["slave"] not in REFUSE_READS:
            whole = store_input.served(pair.port("master"), topic, queue)
            copy = of_slave_queue(pair, topic, queue)
            assert copy == whole[len(whole) - len(copy) :]
            assert len(copy) > 3


def same_units(pair: Replicas, topic: str, queue: int) -> bool:
    whole, copy = (
        [
            unit
            for unit in units_of(pair.store(role) / "consumequeue" / topic / str(queue))
            if unit[1] != NO_MESSAGE
        ]
        for role in ("master", "slave")
    )
    return len(copy) > 3 and whole[-len(copy) :] == copy


def of_slave_queue(pair: Replicas, topic: str, queue: int) -> list[Record]:
    """Return the messages that the slave serves once it knows the topic."""
    found: list[Record] = []

    def served() -> bool:
        with suppress(AssertionError):
            # For a lower offset than its own minimum a slave refers readers to its master.
            first = store_input.min_offset(pair.port("slave"), topic, queue)
            found[:] = store_input.served(pair.port("slave"), topic, queue, first)
            return True
        return False

    wait_until("the topic", served, COPIED_WITHIN_S, 0.5)
    return found
