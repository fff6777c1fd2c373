"""Functions that make text safe for logs and terminals, because it comes from other programs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import datetime
from typing import TextIO

LIMIT = 256  # Maximum length of an untrusted text in characters; no legal topic or group name is longer
_IDEOGRAPHIC_SPACE = "\u3000"  # This space is common in Chinese text, but `str.isprintable` is False for it


def printable(text: str, limit: int | None = LIMIT) -> str:
    """Return a text with its control characters escaped, in at most about `limit` characters.

    Control characters, line separators, direction marks and lone surrogates are written as escapes (`\\x1b`,
    `\\u2028`). If the text is longer than `limit`, only its beginning is returned, followed by its length.
    A `limit` of None means no limit.
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


def in_color(stream: TextIO) -> bool:
    """Return whether to write colours to a stream: to a terminal, or if FORCE_COLOR is set.

    NO_COLOR prevents both. An empty variable counts as not set.
    """
    return not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or stream.isatty())


def is_utf8(text: str) -> bool:
    """Return whether a text from the system was valid UTF-8. If not, Python stored lone surrogates in it."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def shortened(text: str, limit: int | None = LIMIT) -> str:
    """Return a short text unchanged. Of a longer text, return its first `limit` characters and its length."""
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}... ({len(text)} characters)"


def seconds(span: float) -> str:
    """Return a duration for use in a sentence: `3 s`, `0.25 s`, never `4.99921 s`."""
    return f"{round(span, 2 if abs(span) >= 0.1 else 4):g} s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean X?" for the known name X that is most similar to `name`, or ""."""
    from difflib import get_close_matches

    names = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), names, n=1)
    return f" Did you mean {names[near[0]]}?" if near else ""


def rate(count: int, span_s: float) -> str:
    """Return a rate per second such as `1,234/s`, or `-` for a count of 0."""
    return f"{count / span_s:,.0f}/s" if count and span_s > 0 else "-"


def printable_lines(text: str) -> str:
    """Return a text as `printable` does, but keep line ends and tabs."""
    return re.sub(r"[^\n\t]+", lambda found: printable(found[0], None), text)


def printable_json(data: bytes) -> bytes:
    """Return JSON with characters that could control a terminal written as `\\uXXXX`."""
    text = data.decode("utf-8")
    lines = text.split("\n")  # JSON escapes line ends in strings, so each LF here separates two lines.
    if all(map(str.isprintable, lines)):
        return data
    return "\n".join("".join(map(_json_char, line)) for line in lines).encode("utf-8")


def _json_char(char: str) -> str:
    if char.isprintable() or char == _IDEOGRAPHIC_SPACE:
        return char
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def local_time(epoch_ms: int, millis: str = "") -> str:
    """Return local time as `2026-01-31 23:59:59`, with `,123` appended if `millis` is ",".

    0 stands for an unknown time, so the result is an empty text. A time before 1970, or outside of Python's
    calendar, is returned as a number of milliseconds.
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


def counted(number: int, noun: str, form: str = "") -> str:
    """Return a number, formatted by `form` (`,`: 1,000), and its noun: `1 message`, `2 messages`."""
    return f"{number:{form}} {noun}" if number == 1 else f"{number:{form}} {noun}s"
