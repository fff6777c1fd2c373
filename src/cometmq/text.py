"""Text from outside as logs and terminals may show it."""

from __future__ import annotations

__all__ = ["printable", "seconds", "shortened"]

LIMIT = 256  # longer than any legal topic or group name
_IDEOGRAPHIC_SPACE = "\u3000"  # no printable character to Python, and common in Chinese text


def printable(text: str, limit: int | None = LIMIT) -> str:
    """`text` without anything that a terminal or a reader of lines obeys, in at most some `limit` characters.

    Control characters, line separators, marks of direction and lone surrogates are written as their escapes
    (`\\x1b`, `\\u2028`); a text longer than `limit` is cut, and says how long it was. None is no limit.
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


def shortened(text: str, limit: int | None = LIMIT) -> str:
    """`text`, or its first `limit` characters and its length."""
    if limit is None or len(text) <= limit:
        return text
    return f"{text[:limit]}... ({len(text)} characters)"


def seconds(span: float) -> str:
    """A time as a sentence has it: `3 s`, `0.25 s`, never `4.99921 s`."""
    return f"{round(span, 2 if abs(span) >= 0.1 else 4):g} s"
