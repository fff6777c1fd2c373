"""The filter servers that a broker starts, and the registrations that it accepts."""

from __future__ import annotations

import os
import re

import pytest
from tests.filtersrv.conftest import EVEN
from tests.kit.brokers import refused, running
from tests.kit.waiting import until

from cometmq.broker import filter_servers
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import KNOWN_KEYS, NOT_BY_REQUEST, BrokerConfig
from cometmq.broker.filter_servers import FilterServers
from cometmq.errors import CommandError, ConfigError
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import RegisterFilterServerRequestHeader
from cometmq.store import Clock
from cometmq.store.base.clock import ManualClock

TOKEN = "0" * 64


class Registrar:
    """A recorder of the registrations that name servers would receive."""

    def __init__(self) -> None:
        self.filter_servers: list[str] = []
        self.told: list[list[str]] = []

    def register(self) -> None:
        self.told.append(self.filter_servers)


class Connection:
    """A connection that records whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def registration(addr: str, token: str | None = TOKEN) -> Frame:
    header = RegisterFilterServerRequestHeader(filter_server_addr=addr, token=token)
    return Frame.request(RequestCode.REGISTER_FILTER_SERVER, header)


@pytest.fixture
def registrar() -> Registrar:
    return Registrar()


@pytest.fixture
async def table(registrar, monkeypatch) -> FilterServers:
    monkeypatch.setattr(filter_servers.secrets, "token_hex", lambda _size: TOKEN)
    config = BrokerConfig(broker_name="broker-a", broker_ip1="127.0.0.1")
    return FilterServers(config, Clock(), BrokerAddress(config, "127.0.0.1"), registrar)


async def test_those_that_register_are_told_once_and_those_that_go_too(table, registrar):
    first, second = Connection(), Connection()
    answer = table.register_filter_server(first, registration("h:1"))
    assert answer.ext == {"brokerName": "broker-a", "brokerId": "0"}
    table.register_filter_server(first, registration("h:1"))
    table.register_filter_server(second, registration("h:2"))
    table.closed(Connection())
    table.closed(first)
    assert registrar.told == [["h:1"], ["h:1", "h:2"], ["h:2"]]


async def test_one_that_is_silent_loses_its_connection(table, monkeypatch):
    silent = Connection()
    monkeypatch.setattr(filter_servers, "awake_ms", lambda _clock: 0)
    table.register_filter_server(silent, registration("h:1"))
    for now_ms, closed in ((30_000, False), (30_001, True)):
        monkeypatch.setattr(filter_servers, "awake_ms", lambda _clock, now_ms=now_ms: now_ms)
        table.look_round()
        assert silent.closed is closed


async def test_after_the_machine_has_slept_they_get_their_time_to_register(registrar, monkeypatch):
    monkeypatch.setattr(filter_servers.secrets, "token_hex", lambda _size: TOKEN)
    config, clock, slow = BrokerConfig(broker_name="broker-a"), ManualClock(), Connection()
    table = FilterServers(config, clock, BrokerAddress(config, "127.0.0.1"), registrar)
    table.register_filter_server(slow, registration("h:1"))
    clock.sleep(3_600)
    table.look_round()
    assert not slow.closed


@pytest.mark.parametrize("token", [None, "", "1" * 64, TOKEN[:-1], "\u00e9" * 64])
async def test_strangers_may_not_register(table, registrar, token):
    with pytest.raises(CommandError, match="has started") as raised:
        table.register_filter_server(Connection(), registration("h:1", token))
    assert (raised.value.code, registrar.told) == (16, [])


async def test_an_address_that_cannot_be_dialled_is_refused(table, registrar):
    with pytest.raises(CommandError, match="filterServerAddr"):
        table.register_filter_server(Connection(), registration("no port"))
    assert registrar.told == []


async def test_by_default_none_is_started_and_none_may_register(cluster, peer):
    assert cluster.broker.parts.filter_servers.processes == []
    header = RegisterFilterServerRequestHeader(filter_server_addr="127.0.0.1:1")
    refused(await peer.call(RequestCode.REGISTER_FILTER_SERVER, header), 16, "filterServerNums")
    assert cluster.broker.parts.registrar.filter_servers == ()


async def test_where_classes_cannot_be_confined_the_broker_serves_and_starts_no_more(
    tmp_path, monkeypatch, caplog
):
    ends = (filter_servers.sys.executable, "-c", f"raise SystemExit({os.EX_UNAVAILABLE})")
    monkeypatch.setattr(filter_servers, "COMMAND", ends)
    monkeypatch.setattr(filter_servers, "SCAN_S", 0.05)
    async with running(tmp_path, filterServerNums="2") as (broker, peer):
        await until(lambda: broker.parts.filter_servers.processes == [])
        assert (await peer.call(RequestCode.GET_BROKER_CONFIG)).code == 0
    assert caplog.text.count("filter servers cannot run on this machine") == 1


async def test_a_broker_runs_no_class_itself(peer):
    answer = await peer.call(RequestCode.REGISTER_MESSAGE_FILTER_CLASS, None, EVEN.encode())
    refused(answer, 3, "not supported")


@pytest.mark.parametrize("key", ["filterServerNums", "rocketmqHome"])
async def test_no_request_starts_one(tmp_path, key):
    """CVE-2023-33246: by filterServerNums a request made Apache's broker run a command."""
    async with running(tmp_path, filterServerNums="0") as (broker, peer):
        for body in (
            f"{key}=1\n",
            f" {key} : 1\n",
            f"regionId=x\n{key}=-c $@|sh . echo id;\n",
            f"\\u00{ord(key[0]):02x}{key[1:]}=1\n",
        ):
            refused(await peer.call(RequestCode.UPDATE_BROKER_CONFIG, None, body.encode()), 16, key)
        broker.parts.filter_servers.look_round()
        assert broker.parts.filter_servers.processes == []
        assert broker.config.region_id == "DefaultRegion"


def test_no_request_sets_a_path_a_command_or_what_code_is_run():
    names = re.compile("path|home|plugin|command|class|filterserver|url", re.IGNORECASE)
    assert {key for key in KNOWN_KEYS if names.search(key)} - NOT_BY_REQUEST == set()


@pytest.mark.parametrize("value", ["-1", "65", "1; id"])
def test_their_number_is_bounded(value):
    with pytest.raises(ConfigError, match="filterServerNums"):
        BrokerConfig.from_properties({"filterServerNums": value})
