"""Makes text from outside safe for logs and terminals."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

LIMIT = 256  # longer than any legal topic or group name
_IDEOGRAPHIC_SPACE = "\u3000"  # no printable character to Python, and common in Chinese text


def printable(text: str, limit: int | None = LIMIT) -> str:
    """`text` without what a terminal or a reader of lines would act on, in about `limit` characters at most.

    Control characters, line separators, marks of direction and lone surrogates are written as their escapes
    (`\\x1b`, `\\u2028`). A text longer than `limit` is cut, and its length added; None is no limit.
    """
    text = shortened(text, limit)
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char == _IDEOGRAPHIC_SPACE
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def is_utf8(text: str) -> bool:
    """Whether an argument or a name of the system was UTF-8: Python hides other bytes in lone surrogates."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def shortened(text: str, limit: int | None = LIMIT) -> str:
    """`text`, or its first `limit` characters and its length."""
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}... ({len(text)} characters)"


def seconds(span: float) -> str:
    """A time span for a sentence: `3 s`, `0.25 s`, never `4.99921 s`."""
    return f"{round(span, 2 if abs(span) >= 0.1 else 4):g} s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean X?" with the nearest of the known names, in any case, or "" if none is near."""
    from difflib import get_close_matches

    names = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), names, n=1)
    return f" Did you mean {names[near[0]]}?" if near else ""


def rate(count: int, span_s: float) -> str:
    """Return a rate such as `1,234/s`, `-` where nothing was counted."""
    return f"{count / span_s:,.0f}/s" if count and span_s > 0 else "-"


def printable_lines(text: str) -> str:
    """As `printable`, but line ends and tabs stay."""
    return re.sub(r"[^\n\t]+", lambda found: printable(found[0], None), text)


def printable_json(data: bytes) -> bytes:
    """JSON of the same value in which characters that a terminal would act on are written as `\\uXXXX`."""
    text = data.decode("utf-8")
    lines = text.split("\n")  # a line end within a string is escaped already: these are the layout's
    if all(map(str.isprintable, lines)):
        return data
    return "\n".join("".join(map(_json_char, line)) for line in lines).encode("utf-8")


def _json_char(char: str) -> str:
    if char.isprintable() or char == _IDEOGRAPHIC_SPACE:
        return char
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def local_time(epoch_ms: int, millis: str = "") -> str:
    """Local time as `2026-01-31 23:59:59`, and the milliseconds behind the mark `millis` if one is given.

    Empty for 0, which means no time. A number beyond the calendar, or before 1970, is shown as it is.
    """
    if epoch_ms == 0:
        return ""
    try:
        moment = datetime.fromtimestamp(epoch_ms // 1000)
    except (OverflowError, ValueError, OSError):
        moment = None
    if moment is None or epoch_ms < 0:
        return f"{epoch_ms} ms"
    return f"{moment:%Y-%m-%d %H:%M:%S}" + (f"{millis}{epoch_ms % 1000:03d}" if millis else "")


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 message`, `2 messages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
