"""Address patterns: Apache's forms; each part is matched literally."""

from __future__ import annotations

import pytest

from cometmq.broker.access.addresses import AddressPattern, split_patterns
from cometmq.errors import ConfigError


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("*", ["1.2.3.4", "::1", "anything"], []),
        ("*.*.*.*", ["1.2.3.4"], []),
        ("10.1.2.3", ["10.1.2.3", "::ffff:10.1.2.3"], ["10.1.2.30", "", "10.1.2", "x"]),
        ("10.1.2.*", ["10.1.2.0", "10.1.2.255"], ["10.1.3.2", "::1"]),
        ("10.1.*.*", ["10.1.9.9"], ["10.2.1.1"]),
        ("10.1.2-4.*", ["10.1.2.1", "10.1.4.1"], ["10.1.1.1", "10.1.5.1"]),
        ("10.1.2.{1,3}", ["10.1.2.1", "10.1.2.3"], ["10.1.2.2"]),
        ("10.0.0.1,10.0.0.2", ["10.0.0.1", "10.0.0.2"], ["10.0.0.3"]),
        ("10.0.0.{1,2},10.0.1.*", ["10.0.0.2", "10.0.1.9"], ["10.0.0.3"]),
        ("fe80::1", ["fe80::1", "[fe80::1]", "fe80:0:0:0:0:0:0:1"], ["fe80::2", "1.2.3.4"]),
        ("fe80::*", ["fe80::ffff"], ["fe80::1:1"]),
        ("1050::5:600:300c:1-200", ["1050::5:600:300c:1ff"], ["1050::5:600:300c:201"]),
        (
            "1050:0:0:0:5:600:300c:{3,aE0}",
            ["1050::5:600:300c:3", "1050::5:600:300c:ae0"],
            ["1050::5:600:300c:4"],
        ),
    ],
)
def test_a_pattern_means_these_addresses(pattern: str, inside: list[str], outside: list[str]) -> None:
    found = AddressPattern(pattern)

    assert [host for host in inside if not found.matches(host)] == []
    assert [host for host in outside if found.matches(host)] == []


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "10.1.2", "10.1.2.3.4", "10.1.2.256", "10.1.2.x", "10.1.2.-3", "10.1.2.5-3", "10.1.2.{}"),
        *(
            "10.1.2.{1",
            "1::2::3",
            "1:2:3",
            "fe80::12345",
            "1:2:3:4:5:6:7:8:9",
            "10.0.0.1,",
            "1.1.1.1e",
            "\u0661.1.1.1",
        ),
        "1" * 5000,
    ],
)
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected an address"):
        AddressPattern(text)


def test_lists_are_divided_outside_of_braces() -> None:
    found = split_patterns("10.0.0.{1,2}, 10.0.1.*,,::1")

    assert [pattern.text for pattern in found] == ["10.0.0.{1,2}", "10.0.1.*", "::1"]
