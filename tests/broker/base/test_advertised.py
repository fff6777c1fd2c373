"""The address that a broker advertises is checked at its start."""

from __future__ import annotations

import socket

import pytest
from tests.kit.brokers import running
from tests.kit.waiting import until

from cometmq.broker.base import advertised
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.errors import ConfigError


@pytest.mark.parametrize(
    ("ip", "words"),
    [
        ("0.0.0.0", "0.0.0.0 is an address to listen on (that is bindAddress)"),
        ("::", ":: is an address to listen on"),
        ("224.0.0.1", "224.0.0.1 is a multicast address"),
        ("255.255.255.255", "255.255.255.255 is the broadcast address"),
    ],
)
async def test_an_address_that_nobody_can_connect_to_stops_the_start(tmp_path, ip, words):
    with pytest.raises(ConfigError) as raised:
        async with running(tmp_path / "store", brokerIP1=ip):
            pass
    assert raised.value.key == "brokerIP1"
    assert words in str(raised.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("ip", "bind", "own", "problem", "words"),
    [
        ("127.0.0.1", "127.0.0.1", True, "", []),
        ("10.0.0.1", "", True, "", []),
        ("10.0.0.1", "10.0.0.1", True, "", []),
        ("127.0.0.1", "", True, "", ["loopback"]),
        ("127.0.1.1", "0.0.0.0", True, "", ["loopback"]),
        ("::1", "", True, "", ["loopback"]),
        ("10.0.0.1", "", False, "", ["no address of this machine"]),
        ("fe80::1%eth0", "", False, "", ["no address of this machine"]),
        ("10.0.0.1", "10.0.0.2", True, "refused", ["no server answers there (refused)"]),
        ("10.0.0.1", "", False, "refused", ["no address of this machine", "answers there (refused)"]),
    ],
)
def test_one_that_may_be_wrong_is_doubted(ip, bind, own, problem, words):
    config = BrokerConfig(broker_ip1=ip, bind_address=bind)
    found = advertised.doubts(BrokerAddress(config, ip, 10911), own=own, problem=problem)
    assert len(found) == len(words)
    for doubt, word in zip(found, words, strict=True):
        assert f"brokerIP1={ip}" in doubt
        assert word in doubt


@pytest.mark.parametrize(
    ("bind", "settings", "words"),
    [
        ("", {"acl_enable": True}, "port 10912, where slaves connect, ignores aclEnable: "),
        ("10.0.0.1", {"tls_server_mode": "enforcing"}, "ignores tls.server.mode=enforcing: "),
        ("", {"acl_enable": True, "tls_server_mode": "enforcing"}, "aclEnable and tls.server.mode"),
        ("", {"tls_server_mode": "permissive"}, ""),
        *((local, {"acl_enable": True}, "") for local in ("127.0.0.1", "::1", "localhost")),
    ],
)
def test_a_port_that_accounts_do_not_guard_is_said(bind, settings, words):
    config = BrokerConfig(broker_ip1="10.0.0.1", bind_address=bind, **settings)
    said = advertised.unguarded(BrokerAddress(config, "10.0.0.1", 10911), 10912, "slaves")
    assert words in said
    assert bool(said) == bool(words)


@pytest.mark.parametrize(("ip", "own"), [("127.0.0.1", True), ("::1", True), ("192.0.2.1", False)])
def test_addresses_of_this_machine_are_known(ip, own):
    if ip == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    assert advertised.is_own(ip) is own


class TestAStart:
    @pytest.mark.parametrize("bind", ["127.0.0.1", "localhost"])
    async def test_nothing_is_said_of_an_address_that_answers(self, tmp_path, caplog, bind):
        async with running(tmp_path, bindAddress=bind) as (broker, _):
            await advertised.look(BrokerAddress(broker.config, "127.0.0.1", broker.port))
        assert "brokerIP1" not in caplog.text

    async def test_another_machines_address_is_doubted_in_the_log(self, tmp_path, caplog, monkeypatch):
        monkeypatch.setattr(advertised, "ANSWER_S", 0.1)
        async with running(tmp_path, brokerIP1="192.0.2.1") as (broker, _):
            await until(lambda: "no server answers there" in caplog.text)
            assert "brokerIP1=192.0.2.1 is no address of this machine" in caplog.text
            assert f"clients receive 192.0.2.1:{broker.port}, but" in caplog.text

    async def test_an_interface_where_it_does_not_listen_is_too(self, tmp_path, caplog):
        async with running(tmp_path, brokerIP1="127.0.0.2"):
            await until(lambda: "no server answers there" in caplog.text)
        assert "no address of this machine" not in caplog.text
