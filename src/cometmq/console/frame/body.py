"""A message's body as people read it: text, JSON, hex, each bounded."""

from __future__ import annotations

import codecs

import msgspec

TEXT_MAX = 64 * 1024
"""Characters that are shown."""
JSON_MAX = 256 * 1024
"""Bytes of a body that is looked at as JSON."""
DEPTH_MAX = 64
HEX_MAX = 4096
"""Bytes that are shown as hex."""
PREVIEW_MAX = 120
_ROW = 16


def is_text(body: bytes) -> bool:
    """Whether a body is UTF-8 text without control characters but for blanks."""
    try:
        said = body.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return not any(ord(each) < 32 and each not in "\t\n\r" for each in said[:TEXT_MAX])


def as_text(body: bytes) -> str:
    """As UTF-8; what is none is shown as U+FFFD."""
    # A character has four bytes at most: no more than these are needed.
    return body[: 4 * TEXT_MAX].decode("utf-8", "replace")[:TEXT_MAX]


def as_json(body: bytes) -> str | None:
    """Indented as it stands, with all digits and in its order; None for what is no JSON, too large or too
    deep."""
    if not body or len(body) > JSON_MAX or _depth(body) > DEPTH_MAX:
        return None
    try:
        return msgspec.json.format(body, indent=2).decode("utf-8", "replace")[:TEXT_MAX]
    except (msgspec.DecodeError, RecursionError):
        return None


def _depth(body: bytes) -> int:
    """How deep brackets open, those in texts counted, too."""
    depth = deepest = 0
    for byte in body:
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


def as_hex(body: bytes) -> str:
    """Rows of 16 bytes: their place, the bytes, and the letters among them."""
    rows = []
    for at in range(0, min(len(body), HEX_MAX), _ROW):
        row = body[at : min(at + _ROW, HEX_MAX)]
        letters = "".join(chr(each) if 32 <= each < 127 else "." for each in row)
        rows.append(f"{at:06x}  {row.hex(' '):<{3 * _ROW}} {letters}")
    return "\n".join(rows)


def preview(body: bytes) -> str:
    """The beginning of a body in a line; of one that is no text as hex."""
    try:
        said = codecs.getincrementaldecoder("utf-8")().decode(body[:PREVIEW_MAX])  # may end within a letter
    except UnicodeDecodeError:
        return body[:_ROW].hex(" ")
    return "".join(each if each.isprintable() else " " for each in said)
