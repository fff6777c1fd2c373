"""Values as texts: numbers with their units, times, ages. An unknown value is shown as unavailable."""

from __future__ import annotations

import time
from collections.abc import Callable

from cometmq.console.base.texts import text
from cometmq.console.widgets.rows import Cell
from cometmq.protocol.codes import Perm
from cometmq.text import local_time

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MAX_TEXT_LENGTH = 2000


def formatted(language: str, kind: str, value: Cell) -> str:
    """Return a value as a text. `kind` is a key of KINDS."""
    return text(language, "common.unknown") if value is None else KINDS[kind](language, value)


def number(value: float) -> str:
    """Return a number as `1,234,567` or `0.25`."""
    whole = isinstance(value, int) or abs(value) >= 100
    return f"{value:,.0f}" if whole else f"{value:,.2f}".rstrip("0").rstrip(".")


def size(count: float) -> str:
    """Return a number of bytes as a text such as `1.5 GiB`."""
    step = 0
    while abs(count) >= 1024 and step < len(_BYTES) - 1:
        count, step = count / 1024, step + 1
    return f"{count:,.0f} B" if step == 0 else f"{count:,.1f} {_BYTES[step]}"


def span(language: str, span_s: float) -> str:
    """Return a duration as a text with at most two units, such as `3 d 4 h` or `12 s`."""
    rest = max(0, round(span_s))
    parts: list[str] = []
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count, rest = divmod(rest, length)
        if count or (unit == "second" and not parts):
            parts.append(text(language, f"common.{unit}", n=count))
        elif parts:
            break
    return " ".join(parts[:2])


def perm(bits: int) -> str:
    """Return a topic's permission in RocketMQ's form: `RW-`."""
    return ("R" if bits & Perm.READ else "-") + ("W" if bits & Perm.WRITE else "-") + "-"


def _text(_language: str, value: Cell) -> str:
    whole = str(value)
    cut = f"{whole[:_MAX_TEXT_LENGTH]}… ({len(whole)})"
    return whole if len(whole) <= _MAX_TEXT_LENGTH else cut


def _time(language: str, value: Cell) -> str:
    return local_time(int(value or 0)) or text(language, "common.never")


def _ago(language: str, value: Cell) -> str:
    if not value:
        return text(language, "common.never")
    return text(language, "common.ago", span=span(language, time.time() - int(value) / 1000))


def _number(_language: str, value: Cell) -> str:
    return number(value) if isinstance(value, int | float) else str(value)


KINDS: dict[str, Callable[[str, Cell], str]] = {
    "text": _text,
    "flag": lambda language, value: text(language, "common.yes" if value else "common.no"),
    "number": _number,
    "rate": lambda language, value: text(language, "common.per_second", n=_number(language, value)),
    "size": lambda _language, value: size(float(value or 0)),
    "percent": lambda _language, value: f"{float(value or 0) * 100:.1f} %",
    "time": _time,
    "ago": _ago,
    "perm": lambda _language, value: perm(int(value or 0)),
}
"""Formats of columns and facts.

The formats expect: rate, a number per second; size, bytes; percent, a share from 0 to 1; time and ago,
milliseconds since 1970, or 0 for never; perm, a topic's permission bits.
"""
RIGHT_ALIGNED = {"number", "rate", "size", "percent"}
