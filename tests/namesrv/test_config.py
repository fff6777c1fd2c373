"""Parsing the name server's settings from the pairs of a properties file."""

from __future__ import annotations

import logging

import pytest

from cometmq.errors import ConfigError
from cometmq.namesrv.config import FIELDS, RANGES, NamesrvConfig


def test_defaults_are_apaches() -> None:
    config = NamesrvConfig()

    assert (config.listen_port, config.order_message_enable) == (9876, False)
    assert config.kv_config_path.endswith("/namesrv/kvConfig.json")
    assert config.config_store_path.endswith("/namesrv/namesrv.properties")
    assert config.server_channel_max_idle_time_seconds == 120


def test_known_keys_are_read_and_shown_again() -> None:
    pairs = {"listenPort": " 1234 ", "orderMessageEnable": "TRUE", "kvConfigPath": "/a b/kv.json"}
    config = NamesrvConfig.from_properties(pairs)
    shown = config.to_properties()

    assert (config.listen_port, config.order_message_enable) == (1234, True)
    assert config.kv_config_path == "/a b/kv.json"
    assert (shown["listenPort"], shown["orderMessageEnable"]) == ("1234", "true")
    assert NamesrvConfig.from_properties(shown).to_properties() == shown


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("listenPort", "abc"),
        ("listenPort", ""),
        ("listenPort", "1_0"),
        ("listenPort", "1.5"),
        ("listenPort", "\u0661"),
        ("listenPort", "-1"),
        ("listenPort", "65536"),
        ("orderMessageEnable", "yes"),
        ("orderMessageEnable", ""),
        ("scanNotActiveBrokerInterval", "0"),
        ("serverChannelMaxIdleTimeSeconds", "0"),
        ("scanNotActiveBrokerInterval", "9" * 400),
        ("bindAddress", "a b"),
        ("kvConfigPath", ""),
        ("configStorePath", "a\0b"),
        ("serverWorkerThreads", "-1"),
        ("serverWorkerThreads", "many"),
    ],
)
def test_a_bad_value_names_key_value_and_form(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NamesrvConfig.from_properties({key: value})

    assert (caught.value.key, caught.value.value) == (key, value)
    assert caught.value.expected


def test_every_number_has_a_range_and_keeps_to_it() -> None:
    numbers = {key for key, field in FIELDS.items() if type(getattr(NamesrvConfig(), field)) is int}
    assert numbers == RANGES.keys()
    for key, (low, high, _) in RANGES.items():
        for value in (low - 1, high + 1):
            with pytest.raises(ConfigError, match=f"^{key} = .* {low} to {high}$"):
                NamesrvConfig.from_properties({key: str(value)})
            with pytest.raises(ConfigError, match=key):
                NamesrvConfig(**{FIELDS[key]: value}).check()


def test_modes_that_are_not_built_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        NamesrvConfig.from_properties({"clusterTest": "FALSE", "supportActingMaster": "false"})
        assert caplog.text == ""
        NamesrvConfig.from_properties({"needWaitForService": "true"})
    assert "needWaitForService=true has no effect" in caplog.text


def test_unknown_keys_are_kept_and_warned_about_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = NamesrvConfig.from_properties(
            {"orderMesageEnable": "true", "zzz": "1", "serverWorkerThreads": "4"}
        )

    assert [record.getMessage() for record in caplog.records] == [
        "unknown setting orderMesageEnable (did you mean orderMessageEnable?)",
        "unknown setting zzz",
    ]
    assert config.to_properties()["zzz"] == "1"
    assert config.to_properties()["serverWorkerThreads"] == "4"
    assert not config.order_message_enable
