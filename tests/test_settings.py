"""Settings as text: properties files, lists of addresses, and the source that an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.errors import ConfigError
from cometmq.settings import check_addresses, read_properties_file


@pytest.mark.parametrize(
    ("data", "pairs"),
    [
        (b"brokerName=broker-a\nlistenPort = 10911\n", {"brokerName": "broker-a", "listenPort": "10911"}),
        (b"\xef\xbb\xbfbrokerName=b\n", {"brokerName": "b"}),
        ("brokerName=é".encode(), {"brokerName": "é"}),
        ("brokerName=é".encode("latin-1"), {"brokerName": "é"}),
    ],
)
def test_a_file_is_read_whatever_its_encoding(tmp_path: Path, data: bytes, pairs: dict[str, str]) -> None:
    path = tmp_path / "broker.conf"
    path.write_bytes(data)

    assert read_properties_file(str(path)) == pairs


def test_broken_text_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("a=1\nb=\\u12")

    with pytest.raises(ConfigError) as raised:
        read_properties_file(str(path))

    assert f"{path} line 2" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "checked"),
    [
        ("127.0.0.1:9876", ["127.0.0.1:9876"]),
        (" a:1 ; b.example.:2 ,", ["a:1", "b.example.:2"]),
        ("[::1]:9876", ["[::1]:9876"]),
    ],
)
def test_a_good_list_of_addresses_is_taken_apart(text: str, checked: list[str]) -> None:
    assert check_addresses("namesrvAddr", text) == checked


@pytest.mark.parametrize(
    "text",
    [
        *("", ";", "host", "host:", ":9876", "host:0", "host:65536", "a:1;b", "a:\uff19"),
        *("..:1", "a b:1", "a\0:1", "h" * 64 + ":1", "[::1:1", "[a]b:1"),
    ],
)
def test_a_bad_list_of_addresses_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_addresses("namesrvAddr", text)

    assert raised.value.key == "namesrvAddr"
