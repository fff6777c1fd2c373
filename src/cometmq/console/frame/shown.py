"""Values as people read them: numbers with their unit, times, ages; what is not known says so."""

from __future__ import annotations

import time
from collections.abc import Callable

from cometmq.console.frame.rows import Cell
from cometmq.console.texts import text
from cometmq.protocol.codes import Perm
from cometmq.text import local_time

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TEXT_MAX = 2000


def shown(language: str, kind: str, value: Cell) -> str:
    """A value as a kind of KINDS; what is not known in the words for that."""
    return text(language, "common.unknown") if value is None else KINDS[kind](language, value)


def number(value: float) -> str:
    """`1,234,567`, or `0.25`."""
    whole = isinstance(value, int) or abs(value) >= 100
    return f"{value:,.0f}" if whole else f"{value:,.2f}".rstrip("0").rstrip(".")


def size(count: float) -> str:
    """Bytes: `1.5 GiB`."""
    step = 0
    while abs(count) >= 1024 and step < len(_BYTES) - 1:
        count, step = count / 1024, step + 1
    return f"{count:,.0f} B" if step == 0 else f"{count:,.1f} {_BYTES[step]}"


def span(language: str, span_s: float) -> str:
    """A time span in its two largest units at most: `3 d 4 h`, `12 s`."""
    whole = max(0, round(span_s))
    parts: list[str] = []
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        count, whole = divmod(whole, length)
        if count or (unit == "second" and not parts):
            parts.append(text(language, f"common.{unit}", n=count))
        elif parts:
            break
    return " ".join(parts[:2])


def perm(bits: int) -> str:
    """A topic's permission as RocketMQ writes it: `RW-`."""
    return ("R" if bits & Perm.READ else "-") + ("W" if bits & Perm.WRITE else "-") + "-"


def _text(_language: str, value: Cell) -> str:
    said = str(value)
    return said if len(said) <= _TEXT_MAX else f"{said[:_TEXT_MAX]}… ({len(said)})"


def _flag(language: str, value: Cell) -> str:
    return text(language, "common.yes" if value else "common.no")


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
    "flag": _flag,
    "number": _number,
    "rate": lambda language, value: text(language, "common.per_second", n=_number(language, value)),
    "size": lambda _language, value: size(float(value or 0)),
    "percent": lambda _language, value: f"{float(value or 0) * 100:.1f} %",
    "time": _time,
    "ago": _ago,
    "perm": lambda _language, value: perm(int(value or 0)),
}
"""How a column or fact is shown. rate: a second; size: bytes; percent: of a share from 0 to 1; time and ago:
of ms since 1970, 0 for never; perm: of a topic's bits."""
RIGHT = {"number", "rate", "size", "percent"}
"""Those that stand at the right of their column."""
