"""Apache's brokers and tools with our name server, and our files with Apache's name server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.interop import wire
from tests.interop.apache import ApacheBroker, ApacheNamesrv
from tests.interop.comet import CometNamesrv
from tests.interop.mqadmin import AdminShell
from tests.kit.waiting import wait_until

SERVER_VERSIONS = ["4.9.7", "5.5.0"]
# Broker names by version; the broker of 4.9.7 sends compressed registrations.
BROKERS = {"4.9.7": "broker-a", "5.5.0": "broker-b"}
SETTINGS = {"4.9.7": {"compressedRegister": "true"}, "5.5.0": {}}


class Mixed:
    """Our name server with one broker of 4.9 and one of 5.x."""

    def __init__(self, directory: Path, shells: Callable[[str], AdminShell]) -> None:
        self.directory = directory
        self._shells = shells
        self.name_server = CometNamesrv(directory / "namesrv")
        self.brokers: dict[str, ApacheBroker] = {}
        try:
            for version, name in BROKERS.items():
                self.brokers[version] = ApacheBroker(
                    version, directory / name, self.namesrv, name=name, settings=SETTINGS[version], wait=False
                )
            for broker in self.brokers.values():
                broker.wait_ready()
        except BaseException:
            self.kill()
            raise

    @property
    def namesrv(self) -> str:
        return f"127.0.0.1:{self.name_server.port}"

    def admin(self, version: str, *arguments: str) -> str:
        return self._shells(version).run(*arguments, "-n", self.namesrv)

    def brokers_of(self, topic: str) -> dict[str, int]:
        """Return the permissions of a topic's queues by broker name, as a current client gets them."""
        header, body = wire.call(self.name_server.port, wire.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
        if header["code"] == 17:
            return {}
        return {queue["brokerName"]: queue["perm"] for queue in json.loads(body)["queueDatas"]}

    def kill(self) -> None:
        for broker in self.brokers.values():
            if broker.process.running:
                broker.kill()
        self.name_server.kill()


@pytest.fixture(scope="module")
def mixed(
    tmp_path_factory: pytest.TempPathFactory, admin_shells: Callable[[str], AdminShell]
) -> Iterator[Mixed]:
    cluster = Mixed(tmp_path_factory.mktemp("mixed"), admin_shells)
    yield cluster
    cluster.kill()


@pytest.mark.slow("starts a broker of each version")
def test_brokers_of_both_lines_register(mixed: Mixed) -> None:
    """Both brokers send their whole topic table; that of 4.9.7 sends it compressed."""
    assert mixed.brokers_of("broker-a").keys() == {"broker-a"}
    assert mixed.brokers_of("broker-b").keys() == {"broker-b"}
    assert mixed.brokers_of("TBW102").keys() == {"broker-a", "broker-b"}


def test_the_tools_wipe_and_restore_write_permission(mixed: Mixed) -> None:
    """This test precedes all changes of topics, since registrations with a newer data version undo it."""
    wiped = mixed.admin("4.9.7", "wipeWritePerm", "-b", "broker-b")
    assert f"[{mixed.namesrv}] OK" in wiped, wiped
    assert mixed.brokers_of("broker-b") == {"broker-b": 5}  # permission 7 without the write bit
    restored = mixed.admin("5.5.0", "addWritePerm", "-b", "broker-b")
    assert f"[{mixed.namesrv}] OK" in restored, restored
    assert mixed.brokers_of("broker-b") == {"broker-b": 6}


def test_the_tools_see_what_they_know_from_their_own(mixed: Mixed) -> None:
    """Each command is run once, for one of the two brokers."""
    made = mixed.admin("4.9.7", "updateTopic", "-c", "DefaultCluster", "-t", "Made", "-r", "5", "-w", "3")
    assert "success" in made, made
    wait_until("routes", lambda: mixed.brokers_of("Made") == {"broker-a": 6, "broker-b": 6})

    listed = mixed.admin("5.5.0", "clusterList")
    assert all(name in listed for name in ("DefaultCluster", "broker-a", "broker-b")), listed
    assert "Made" in mixed.admin("4.9.7", "topicList").split()
    for version in SERVER_VERSIONS:
        route = mixed.admin(version, "topicRoute", "-t", "Made").replace(" ", "")
        assert '"readQueueNums":5' in route, route
        assert "broker-a" in route, route
    mixed.admin("5.5.0", "deleteTopic", "-c", "DefaultCluster", "-t", "Made")
    wait_until("no route", lambda: mixed.brokers_of("Made") == {})


def test_the_tools_keep_values_and_see_settings(mixed: Mixed) -> None:
    put = mixed.admin("4.9.7", "updateKvConfig", "-s", "space", "-k", "key", "-v", "värde")
    assert "success" in put, put
    header, _ = wire.call(mixed.name_server.port, 101, {"namespace": "space", "key": "key"})
    assert header["extFields"] == {"value": "värde"}
    mixed.admin("5.5.0", "deleteKvConfig", "-s", "space", "-k", "key")
    header, _ = wire.call(mixed.name_server.port, 101, {"namespace": "space", "key": "key"})
    assert header["code"] == 22

    shown = mixed.admin("5.5.0", "getNamesrvConfig")
    lines = [line.split("=") for line in shown.splitlines() if "=" in line]
    settings = {line[0].strip(): line[1].strip() for line in lines}
    assert settings["listenPort"] == str(mixed.name_server.port), shown
    assert settings["orderMessageEnable"] == "false", shown


def test_a_killed_broker_leaves_the_routes_at_once_and_returns_when_it_registers(mixed: Mixed) -> None:
    """The closed connection shows that the broker is gone, long before 120 s without heartbeats."""
    old = mixed.brokers["4.9.7"]
    old.kill()
    wait_until("no route", lambda: mixed.brokers_of("broker-a") == {})
    assert mixed.brokers_of("TBW102").keys() == {"broker-b"}

    mixed.brokers["4.9.7"] = ApacheBroker(
        "4.9.7", mixed.directory / "broker-a", mixed.namesrv, name="broker-a", settings=SETTINGS["4.9.7"]
    )
    assert mixed.brokers_of("TBW102").keys() == {"broker-a", "broker-b"}


@pytest.mark.slow("name servers of both kinds, one after the other")
@pytest.mark.parametrize("version", SERVER_VERSIONS)
def test_key_value_files_go_both_ways(tmp_path: Path, version: str) -> None:
    values = {"plain": "v", "order": "broker-a:8;broker-b:8", "text": 'åäö "quoted" \\ {}'}
    with CometNamesrv(tmp_path) as ours:
        for key, value in values.items():
            assert wire.call(ours.port, 100, {"namespace": "n", "key": key, "value": value})[0]["code"] == 0
    with ApacheNamesrv(version, tmp_path) as theirs:
        for key, value in values.items():
            header, _ = wire.call(theirs.port, 101, {"namespace": "n", "key": key})
            assert header["extFields"] == {"value": value}
        wire.call(theirs.port, 100, {"namespace": "m", "key": "k", "value": "from Apache"})
        wire.call(theirs.port, 102, {"namespace": "n", "key": "plain"})
    with CometNamesrv(tmp_path) as again:
        header, body = wire.call(again.port, 219, {"namespace": "n"})
        assert json.loads(body) == {"table": {key: value for key, value in values.items() if key != "plain"}}
        header, _ = wire.call(again.port, 101, {"namespace": "m", "key": "k"})
        assert header["extFields"] == {"value": "from Apache"}
