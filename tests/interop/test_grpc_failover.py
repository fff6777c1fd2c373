"""Apache's clients of 5.x with a raft group of ours, whose leader is killed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.interop import wire
from tests.interop.comet import CometBroker, CometNamesrv
from tests.interop.grpc_clients import Program, has, start_client
from tests.interop.test_grpc_clients import sent
from tests.kit.waiting import wait_until
from tests.ports import HOST, free_port

pytestmark = pytest.mark.foreign("Apache's clients of 5.x")
BOUND_S = 60.0
"""The maximum time without a leader that a client may notice. It is 2 s without other work."""
GET_RAFT_STATUS = 21003


class RaftServers:
    """A name server and three members of a raft group, which serve 5.x clients."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names = CometNamesrv(directory)
        self._members = ";".join(f"n{number}-{HOST}:{free_port()}" for number in range(3))
        self._ports = [(free_port(), free_port()) for _ in range(3)]
        self.brokers: list[CometBroker] = [self._started(number) for number in range(3)]

    def _started(self, number: int) -> CometBroker:
        port, grpc_port = self._ports[number]
        settings = {
            "grpcPort": str(grpc_port),
            "enableDLegerCommitLog": "true",
            "dLegerGroup": "broker-a",
            "dLegerPeers": self._members,
            "dLegerSelfId": f"n{number}",
        }
        directory, names = self._directory / f"n{number}", f"{HOST}:{self._names.port}"
        broker = CometBroker(directory, names, port=port, settings=settings, wait=False)
        broker.process.wait_ready("ports open", lambda: wire.listens(port) and wire.listens(grpc_port))
        return broker

    @property
    def endpoint(self) -> str:
        return ";".join(f"{HOST}:{port}" for _, port in self._ports)

    def leader(self) -> CometBroker:
        """Wait until a member leads, and return it."""
        leaders: list[CometBroker] = []

        def is_led() -> bool:
            leaders[:] = [each for each in self.brokers if each.process.running and leads(each)]
            return len(leaders) == 1

        wait_until("a leader", is_led, BOUND_S)
        return leaders[0]

    def stop(self) -> None:
        for broker in self.brokers:
            broker.kill()
        self._names.stop()


def leads(broker: CometBroker) -> bool:
    try:
        _, body = wire.call(broker.port, GET_RAFT_STATUS)
    except OSError:
        return False
    return bool(json.loads(body)["role"] == "leader")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[RaftServers]:
    made = RaftServers(tmp_path / "servers")
    yield made
    made.stop()


@pytest.fixture(params=["python-5.1.2", "java-5.2.0", "node-1.0.8"])
def program(request: pytest.FixtureRequest, tmp_path: Path, servers: RaftServers) -> Iterator[Program]:
    directory = tmp_path / "client"
    directory.mkdir()
    remote = start_client(request.param, directory, directory / "no-authority")
    found = Program(request.param, remote, servers)  # type: ignore[arg-type]
    yield found
    found.close()
    remote.stop()


def test_clients_go_on_after_the_leader_was_killed(program: Program, servers: RaftServers) -> None:
    leader = servers.leader()
    endpoint = servers.endpoint
    if program.remote.process.name.startswith("node"):  # It accepts one endpoint: that of a follower
        endpoint = endpoint.split(";")[servers.brokers.index(leader) - 1]
    producer = program.producer(endpoint=endpoint)
    consumer = program.push(endpoint=endpoint)
    wait_until("a send", lambda: sent(program, producer, b"before"), BOUND_S)
    program.remote.wait_delivered(consumer, has(b"before"), BOUND_S)
    leader.kill()
    began = time.monotonic()
    wait_until("a send to the next leader", lambda: sent(program, producer, b"after"), BOUND_S)
    program.remote.wait_delivered(consumer, has(b"after"), BOUND_S)
    print(f"consumed after {time.monotonic() - began:.1f} s")
