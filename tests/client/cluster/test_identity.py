"""Client ids, unique keys, and the name servers that a client uses."""

from __future__ import annotations

import os
import time
from datetime import datetime

import pytest
from tests.kit.unique_keys import decode_unique_key

from cometmq.client import ClientOptions
from cometmq.client.cluster import identity
from cometmq.client.cluster.identity import KeyMaker, client_id_of, local_address
from cometmq.client.cluster.options import environment_address_map, namesrv_addresses
from cometmq.errors import ConfigError
from cometmq.settings import NAMESRV_ENV


def test_client_ids_are_unique_unless_named() -> None:
    options = ClientOptions()
    assert client_id_of("10.0.0.1", options) != client_id_of("10.0.0.1", options)
    assert client_id_of("10.0.0.1", options).startswith(f"10.0.0.1@{os.getpid()}#")
    named = ClientOptions(instance_name="one", unit_name="u")
    assert client_id_of("10.0.0.1", named) == "10.0.0.1@one@u"


@pytest.mark.parametrize("towards", ["127.0.0.1:9876", "localhost:9876"])
def test_the_local_address_towards_this_machine(towards: str) -> None:
    assert local_address(towards) == "127.0.0.1"


def test_keys_are_unique_and_tell_when_they_were_made() -> None:
    keys = KeyMaker("10.1.2.3")
    before = int(time.time() * 1000)
    made = [keys.make() for _ in range(70_000)]
    after = int(time.time() * 1000)
    assert len(set(made)) == len(made)
    key = decode_unique_key(made[0])
    assert (key.address, key.pid) == ("10.1.2.3", os.getpid() & 0xFFFF)
    now = datetime.now()
    month_ms = int(datetime(now.year, now.month, 1).timestamp() * 1000)
    assert before - 1 <= month_ms + key.since_month_ms <= after


def test_a_clock_that_is_set_back_repeats_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = datetime(2026, 12, 3).timestamp()
    made: list[str] = []
    keys = KeyMaker("10.1.2.3")
    for step_s, count in ((0.0, 1), (60.0, 65_535), (0.0, 100), (-3600.0, 65_537)):
        monkeypatch.setattr(identity.time, "time", lambda at=now_s + step_s: at)
        made += [keys.make() for _ in range(count)]
    assert len(set(made)) == len(made)


def test_keys_of_two_makers_differ() -> None:
    assert KeyMaker("10.1.2.3").make()[:20] != KeyMaker("10.1.2.3").make()[:20]


def test_a_new_month_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    december = datetime(2026, 12, 31, 23, 59, 59).timestamp()
    monkeypatch.setattr(identity.time, "time", lambda: december)
    keys = KeyMaker("::1")
    assert decode_unique_key(keys.make()).since_month_ms == 31 * 86_400_000 - 1000
    monkeypatch.setattr(identity.time, "time", lambda: december + 2)
    assert decode_unique_key(keys.make()).since_month_ms == 1000


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("10.0.0.1:9876", ("10.0.0.1:9876",)),
        ("a:1;b:2", ("a:1", "b:2")),
        (" a:1 , b:2; ", ("a:1", "b:2")),
        ("http://a:1", ("a:1",)),
        (["a:1", "[::1]:2"], ("a:1", "[::1]:2")),
        ("a:1;a:1", ("a:1",)),
    ],
)
def test_name_server_addresses(given: str | list[str], expected: tuple[str, ...]) -> None:
    assert namesrv_addresses(given) == expected


@pytest.mark.parametrize("given", ["", ";", "host", "host:", ":1", "host:port", "host:70000", []])
def test_what_is_no_address(given: str | list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMESRV_ENV:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"^namesrv = .*host:port"):
        namesrv_addresses(given)


def test_without_an_argument_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "e:1;f:2")
    assert namesrv_addresses(None) == ("e:1", "f:2")
    monkeypatch.setenv("COMETMQ_NAMESRV", "g:3")
    assert namesrv_addresses(None) == ("g:3",)
    for name in NAMESRV_ENV:
        monkeypatch.delenv(name)
    assert namesrv_addresses(None) == ("127.0.0.1:9876",)


@pytest.mark.parametrize(
    "given", [{"a:1": "b"}, {"a": "b:1"}, {"a:1": "b:x"}, {"": "b"}, {"a b": "c"}, {"a:1": "b:99999"}]
)
def test_addresses_are_mapped_to_addresses_and_hosts_to_hosts(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="host:port=host:port, or host=host"):
        ClientOptions(address_map=given)
    monkeypatch.setenv("COMETMQ_ADDRESS_MAP", ";".join("=".join(pair) for pair in given.items()))
    with pytest.raises(ConfigError, match="COMETMQ_ADDRESS_MAP"):
        environment_address_map()


def test_the_environment_maps_addresses_unless_the_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMETMQ_ADDRESS_MAP", "172.18.0.3:10911=127.0.0.1:20911; broker = db.example;")
    assert ClientOptions().addresses == {"172.18.0.3:10911": "127.0.0.1:20911", "broker": "db.example"}
    assert ClientOptions(address_map={"a": "b"}).addresses == {"a": "b"}
    assert ClientOptions(address_map={}).addresses == {}
