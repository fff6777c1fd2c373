"""The text of the tables of `config/`, in the style of Apache's broker (docs/reference/storage.md, Tables):
one TAB per level, LF, no newline at the end; keys of maps from numbers to numbers stand without quotes on one
line.
"""

from __future__ import annotations

import json
from typing import Any


def render(value: Any, level: int = 0) -> str:
    """A value (dict, list, str, int, float, bool, None) in the text style of Apache's broker."""
    if isinstance(value, dict):
        if not value:
            return "{}"
        if all(isinstance(key, int) for key in value):
            inner = ",".join(f"{key}:{render(item, level + 1)}" for key, item in value.items())
            return "{" + inner + "\n" + "\t" * level + "}"
        indent = "\n" + "\t" * (level + 1)
        inner = ("," + indent).join(f"{_quoted(str(k))}:{render(v, level + 1)}" for k, v in value.items())
        return "{" + indent + inner + "\n" + "\t" * level + "}"
    if isinstance(value, (list, tuple)):
        if not value:
            return "[]"
        indent = "\n" + "\t" * (level + 1)
        return (
            "["
            + indent
            + ("," + indent).join(render(v, level + 1) for v in value)
            + "\n"
            + "\t" * level
            + "]"
        )
    if isinstance(value, str):
        return _quoted(value)
    return json.dumps(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
