"""Java's values as SQL92 filters compare them (docs/reference/storage.md, SQL92 filter).

Texts become numbers by Java's rules, and values of different types are compared by RocketMQ's rules. `None`
is null; the other types are `bool`, `str`, `int` (Integer), `Long` and `float` (Double).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final


class Mismatch(Exception):
    """Java would throw an exception: the expression has no value, and the message does not match."""


class Long(int):
    """An integer that has 64 bits in Java. A plain `int` stands for one with 32 bits."""

    __slots__ = ()


Value = None | bool | int | float | str

INT_MAX: Final = (1 << 31) - 1
LONG_MAX: Final = (1 << 63) - 1
_MAX_DIGITS: Final = 4_000
"""The maximum number of digits of an integer: Python refuses longer ones, which are too large for Java."""
_SURELY_FITS: Final = 9  # An integer with at most this number of digits always fits into 32 bits
# In these patterns, no two adjacent parts match the same characters, so matching takes linear time.
_WHOLE = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_HEX = re.compile(r"[+-]?0[xX](?:[0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+")
_NAMED = {"NaN": math.nan, "+NaN": math.nan, "-NaN": math.nan}
_NAMED |= {"Infinity": math.inf, "+Infinity": math.inf, "-Infinity": -math.inf}
_BLANKS = "".join(map(chr, range(33)))


def to_int(text: str) -> int:
    """Return what Java's Integer.valueOf returns for a text. Raises Mismatch where Java would throw."""
    return _whole(text, INT_MAX)


def to_long(text: str) -> Long:
    """Return what Java's Long.valueOf returns for a text. Raises Mismatch where Java would throw."""
    return Long(_whole(text, LONG_MAX))


def _whole(text: str, most: int) -> int:
    if len(text) <= _SURELY_FITS and text.isascii() and text.isdigit():
        return int(text)
    # Java reads UTF-16 units, so a digit beyond the basic plane is no digit for Java.
    if len(text) > _MAX_DIGITS or not _WHOLE.fullmatch(text) or max(text) > "\uffff":
        raise Mismatch
    number = int(text)
    if not -most - 1 <= number <= most:
        raise Mismatch
    return number


def to_double(text: str) -> float:
    """Return what Java's Double.valueOf returns for a text. Raises Mismatch where Java would throw."""
    text = text.strip(_BLANKS)
    named = _NAMED.get(text)
    if named is not None:
        return named
    if text[-1:] in ("d", "D", "f", "F") and not text[:-1].endswith(("x", "X")):
        text = text[:-1]
    if _DECIMAL.fullmatch(text):
        return float(text)
    if _HEX.fullmatch(text):
        try:
            return float.fromhex(text)
        except OverflowError:
            return -math.inf if text[0] == "-" else math.inf
    raise Mismatch


def to_bool(text: str) -> bool:
    """Return what Java's Boolean.valueOf returns for a text."""
    return text.lower() == "true"


_OF_KIND: dict[type, Callable[[str], Value]] = {bool: to_bool, int: to_int, Long: to_long, float: to_double}


def order(left: Value, right: Value) -> int:
    """Compare two values that are not null, and return a number below 0, 0 or above 0.

    A string is converted to the type of the other value before the comparison. A Boolean and a number differ:
    the result is -1.

    Raises:
        Mismatch: A string cannot be converted, or `left` is a Boolean and `right` is a string.
    """
    kind, other = type(left), type(right)
    if kind is not other:
        if kind is bool:
            if other is str:
                raise Mismatch
            return -1
        if kind is str:
            left = _OF_KIND[other](left)  # type: ignore[arg-type]
        elif other is str:
            right = _OF_KIND[kind](right)  # type: ignore[arg-type]
        elif other is bool:
            return -1
        elif kind is float or other is float:
            left, right = float(left), float(right)  # type: ignore[arg-type]
    if type(left) is float:
        left, right = _place(left), _place(right)  # type: ignore[arg-type, assignment]
    return (left > right) - (left < right)  # type: ignore[operator]


def _place(number: float) -> tuple[bool, float, float]:
    """Return a key that sorts doubles like Java's Double.compare: NaN above all others, -0.0 below 0.0."""
    return (True, 0.0, 0.0) if number != number else (False, number, math.copysign(1.0, number))
