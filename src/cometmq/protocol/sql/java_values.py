"""Java's values as SQL92 filters compare them (docs/reference/storage.md, SQL92 filter).

Texts become numbers by the rules of Java, values of different kinds are compared by those of RocketMQ.

`None` is null; `bool`, `str`, `int` (Integer), `Long` and `float` (Double) are the other kinds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final


class Mismatch(Exception):
    """Java would throw here: the whole expression has no value, and the message does not match."""


class Long(int):
    """A number that Java keeps in 64 bits; a plain `int` has 32."""

    __slots__ = ()


Value = None | bool | int | float | str

INT_MAX: Final = (1 << 31) - 1
LONG_MAX: Final = (1 << 63) - 1
_MOST_DIGITS: Final = 4_000
"""Python refuses longer numbers, and Java finds them too large unless they begin with thousands of zeros."""
_SURELY_FITS: Final = 9  # digits
# No two neighbours here match the same characters: a long text would take the square of its length.
_WHOLE = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_HEX = re.compile(r"[+-]?0[xX](?:[0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+")
_NAMED = {
    f"{sign}{name}": value for name, value in (("NaN", math.nan), ("Infinity", math.inf)) for sign in "+"
}
_NAMED |= {"NaN": math.nan, "-NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_BLANKS = "".join(map(chr, range(33)))


def to_int(text: str) -> int:
    """Integer.valueOf."""
    return _whole(text, INT_MAX)


def to_long(text: str) -> Long:
    """Long.valueOf."""
    return Long(_whole(text, LONG_MAX))


def _whole(text: str, most: int) -> int:
    if len(text) <= _SURELY_FITS and text.isascii() and text.isdigit():
        return int(text)
    # Java looks at UTF-16 units: the digits beyond them are none for it.
    if len(text) > _MOST_DIGITS or not _WHOLE.fullmatch(text) or max(text) > "\uffff":
        raise Mismatch
    number = int(text)
    if not -most - 1 <= number <= most:
        raise Mismatch
    return number


def to_double(text: str) -> float:
    """Double.valueOf."""
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
    """Boolean.valueOf."""
    return text.lower() == "true"


_OF_KIND: dict[type, Callable[[str], Value]] = {bool: to_bool, int: to_int, Long: to_long, float: to_double}


def order(left: Value, right: Value) -> int:
    """Below 0, 0 or above 0, as left is below, equal to or above right; neither is null.

    A text is read as what the other side is. Kinds that cannot be compared are never equal. Raises Mismatch.
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
    """Where Double.compare has it: NaN above everything, -0.0 below 0.0."""
    return (True, 0.0, 0.0) if number != number else (False, number, math.copysign(1.0, number))
