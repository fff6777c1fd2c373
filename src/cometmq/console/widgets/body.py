"""Conversion of a message body to text, JSON or rows of hexadecimal bytes. Each form has a maximum length."""

from __future__ import annotations

import codecs

import msgspec

MAX_TEXT_LENGTH = 64 * 1024
MAX_JSON_BYTES = 256 * 1024
"""Maximum size of a body that is shown as JSON, in bytes."""
MAX_JSON_DEPTH = 64
MAX_HEX_BYTES = 4096
MAX_PREVIEW_BYTES = 120
_ROW_BYTES = 16


def is_text(body: bytes) -> bool:
    """Return whether a body is UTF-8 text whose only control characters are tabs and line ends."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return not any(ord(each) < 32 and each not in "\t\n\r" for each in text[:MAX_TEXT_LENGTH])


def as_text(body: bytes) -> str:
    """Return the beginning of a body as text, with U+FFFD for invalid UTF-8."""
    # Decode four times as many bytes as the maximum number of characters, because a character may have four
    # bytes.
    return body[: 4 * MAX_TEXT_LENGTH].decode("utf-8", "replace")[:MAX_TEXT_LENGTH]


def as_json(body: bytes) -> str | None:
    """Return the JSON of a body with indentation, but with its digits and its order unchanged.

    Return None if the body is not JSON, too large, or nested too deeply.
    """
    if not body or len(body) > MAX_JSON_BYTES or _depth(body) > MAX_JSON_DEPTH:
        return None
    try:
        return msgspec.json.format(body, indent=2).decode("utf-8", "replace")[:MAX_TEXT_LENGTH]
    except (msgspec.DecodeError, RecursionError):
        return None


def _depth(body: bytes) -> int:
    """Return the maximum depth of nested brackets. Brackets inside strings are counted, too."""
    depth = deepest = 0
    for byte in body:
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def as_hex(body: bytes) -> str:
    """Return rows of 16 bytes: position, hexadecimal bytes, printable characters."""
    rows = []
    for at in range(0, min(len(body), MAX_HEX_BYTES), _ROW_BYTES):
        row = body[at : min(at + _ROW_BYTES, MAX_HEX_BYTES)]
        letters = "".join(chr(each) if 32 <= each < 127 else "." for each in row)
        rows.append(f"{at:06x}  {row.hex(' '):<{3 * _ROW_BYTES}} {letters}")
    return "\n".join(rows)


def preview(body: bytes) -> str:
    """Return the beginning of a body in one line, as text or, if it is not text, as hexadecimal bytes."""
    try:
        # Truncation may have split the last character, which only an incremental decoder accepts.
        text = codecs.getincrementaldecoder("utf-8")().decode(body[:MAX_PREVIEW_BYTES])
    except UnicodeDecodeError:
        return body[:_ROW_BYTES].hex(" ")
    return "".join(each if each.isprintable() else " " for each in text)
