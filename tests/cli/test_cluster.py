"""`cometmq cluster`: real processes in each mode are started, killed, healed and stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import wait_until

from cometmq.broker.base.config import BrokerConfig
from cometmq.cli.cluster import MODES, modes
from cometmq.settings import read_properties_file

MODE = "2m-noslave"


class Cluster:
    """A runner of the command, with a cluster of its own."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "clusters"
        self.env = {**os.environ, "COMETMQ_RUN_DIR": str(directory / "run")}

    def run(self, command: str, *arguments: str, mode: str = MODE) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "cometmq", "cluster", command, mode, *arguments]
        return subprocess.run(
            [*words, "--data", str(self.data)], env=self.env, capture_output=True, text=True, timeout=120
        )

    def status(self, mode: str = MODE) -> dict[str, dict[str, object]]:
        lines = self.run("status", "--json", mode=mode).stdout.splitlines()
        return {line["member"]: line for line in map(json.loads, lines)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.run("down")


@pytest.mark.slow("starts a cluster of processes and kills some")
def test_a_cluster_is_started_killed_healed_and_stopped(cluster: Cluster) -> None:
    up = cluster.run("up", "--namesrv-port", "0", "--broker-port", "0")
    assert up.returncode == 0, up.stderr
    before = cluster.status()
    assert list(before) == ["namesrv", "broker-a", "broker-b"]
    assert all(member["pid"] for member in before.values())
    assert [before[name]["brokerId"] for name in ("broker-a", "broker-b")] == [0, 0]

    assert cluster.run("kill").returncode == 0  # kills the master of the first broker
    assert cluster.run("kill", "broker-b").returncode == 0
    killed = cluster.status()
    assert [member["pid"] is None for member in killed.values()] == [False, True, True]
    again = cluster.run("kill", "broker-b")
    assert (again.returncode, again.stderr.strip()) == (1, "cometmq: broker-b does not run")
    assert cluster.run("kill").stderr.strip() == "cometmq: no master is running; name the member to kill"

    assert cluster.run("heal").returncode == 0
    healed = cluster.status()
    assert {name: member["addr"] for name, member in healed.items()} == {
        name: member["addr"] for name, member in before.items()
    }
    assert all(member["pid"] for member in healed.values())
    assert healed["broker-a"]["pid"] != before["broker-a"]["pid"]

    assert cluster.run("down").returncode == 0
    assert not any(member["pid"] for member in cluster.status().values())


@pytest.mark.slow("waits for an election of three servers")
def test_a_raft_group_has_a_leader_again_when_its_leader_was_killed(cluster: Cluster) -> None:
    assert cluster.run("up", "--namesrv-port", "0", "--broker-port", "0", mode="raft-3").returncode == 0

    def leader() -> str:
        members = cluster.status("raft-3")
        return next((name for name, member in members.items() if member.get("brokerId") == 0), "")

    first = wait_until("somebody leads", leader)
    assert cluster.run("kill", mode="raft-3").returncode == 0
    assert wait_until("another leads", leader) != first
    assert cluster.run("heal", mode="raft-3").returncode == 0
    cluster.run("down", mode="raft-3")


@pytest.mark.slow("runs nine commands")
@pytest.mark.representative
def test_what_cannot_be_is_said(cluster: Cluster) -> None:
    assert "'9m' is not one of" in cluster.run("up", mode="9m").stderr
    missing = cluster.run("heal")
    assert missing.returncode == 1
    assert f"there is no cluster of mode {MODE} in {cluster.data / MODE}" in missing.stderr
    (cluster.data / MODE).mkdir(parents=True)
    (cluster.data / MODE / "cluster.json").write_text('{"mode": "2m-noslave", "members": []')
    assert "cluster.json cannot be read" in cluster.run("status").stderr
    (cluster.data / MODE / "cluster.json").write_text('{"mode": "1m-noslave", "members": []}')
    assert f"does not describe a cluster of mode {MODE}" in cluster.run("status").stderr


@pytest.mark.parametrize(
    "path", sorted(MODES.glob("*/broker-*")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_each_file_of_a_mode_is_a_broker_that_could_start(path: Path) -> None:
    BrokerConfig.from_properties(read_properties_file(str(path))).check()


def test_the_modes_of_rocketmq_are_there() -> None:
    assert modes() == [
        "1m-noslave", "2m-2s-async", "2m-2s-sync", "2m-noslave", "3m-noslave", "4m-noslave", "raft-3",
    ]  # fmt: skip
