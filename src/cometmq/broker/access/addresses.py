"""Patterns of client addresses in plain_acl.yml (docs/reference/remoting.md, ACL).

  *                                every address
  192.168.0.1   fe80::1            one address
  192.168.0.*   192.168.1-4.*      addresses in which a part is any number, or a number in a range
  192.168.0.{1,4}                  addresses in which a part is one of several numbers
  10.0.0.1,10.0.0.2                several addresses

The parts of IPv6 addresses are hexadecimal.
"""

from __future__ import annotations

import ipaddress
import re

from cometmq.errors import ConfigError

ALL = frozenset({"*", "*.*.*.*", "*:*:*:*:*:*:*:*"})
EXPECTED = "an address, or a pattern such as 192.168.0.*, 192.168.0.1-20, 192.168.0.{1,4}, fe80::*"
MAX_LENGTH = 4096
_BETWEEN = re.compile(r",(?![^{]*\})")

Part = tuple[tuple[int, int], ...]
"""The inclusive ranges (first, last) of one part of an address. The part matches if any range contains it."""


class AddressPattern:
    """An address pattern of a white list. Raises ConfigError for an invalid pattern."""

    __slots__ = ("_all", "_patterns", "text")

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        if not self.text or len(self.text) > MAX_LENGTH:
            raise _wrong(self.text)
        self._all = self.text in ALL
        self._patterns = [] if self._all else [_parts(item.strip()) for item in _BETWEEN.split(self.text)]

    def __repr__(self) -> str:
        return f"AddressPattern({self.text!r})"

    def matches(self, host: str) -> bool:
        """Return whether the pattern matches an address without a port."""
        if self._all:
            return True
        numbers = _numbers(host)
        return any(
            len(parts) == len(numbers)
            and all(
                any(low <= n <= high for low, high in part) for part, n in zip(parts, numbers, strict=True)
            )
            for parts in self._patterns
        )


def split_patterns(text: str) -> list[AddressPattern]:
    """Parse address patterns that are separated by commas. Raises ConfigError for an invalid pattern."""
    return [AddressPattern(item) for item in _BETWEEN.split(text) if item.strip()]


def _wrong(text: str) -> ConfigError:
    return ConfigError("remote address", text, EXPECTED)


def _numbers(host: str) -> tuple[int, ...]:
    """Return the parts of an address as numbers (4 for IPv4, 8 for IPv6), or () for an invalid address."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return ()
    if address.version == 6 and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.version == 4:
        return tuple(address.packed)
    return tuple(int.from_bytes(address.packed[at : at + 2], "big") for at in range(0, 16, 2))


def _parts(text: str) -> tuple[Part, ...]:
    if ":" not in text:
        words = text.split(".")
        if len(words) != 4:
            raise _wrong(text)
        return tuple(_part(text, word, 10, 255) for word in words)
    if text.count("::") > 1:
        raise _wrong(text)
    left, gap, right = text.partition("::")
    before, behind = (side.split(":") if side else [] for side in (left, right))
    missing = 8 - len(before) - len(behind)
    if missing < (1 if gap else 0) or (missing and not gap):
        raise _wrong(text)
    words = [*before, *["0"] * missing, *behind]
    return tuple(_part(text, word, 16, 0xFFFF) for word in words)


def _part(text: str, word: str, base: int, most: int) -> Part:
    word = word.strip()
    if word == "*":
        return ((0, most),)
    if word.startswith("{") and word.endswith("}"):
        return tuple((n, n) for n in (_number(text, each, base, most) for each in word[1:-1].split(",")))
    low, dash, high = word.partition("-")
    first = _number(text, low, base, most)
    last = _number(text, high, base, most) if dash else first
    if first > last:
        raise _wrong(text)
    return ((first, last),)


def _number(text: str, word: str, base: int, most: int) -> int:
    word = word.strip()
    if not re.fullmatch(r"[0-9a-fA-F]{1,4}" if base == 16 else r"[0-9]{1,3}", word):
        raise _wrong(text)
    number = int(word, base)
    if number > most:
        raise _wrong(text)
    return number
