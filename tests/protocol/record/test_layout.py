"""The layout of a record is said once."""

from __future__ import annotations

import ast
import struct
from pathlib import Path

from cometmq.protocol.record import layout

SRC = Path(layout.__file__).parents[2]
MAGICS = {layout.MAGIC_V1, layout.MAGIC_V2, layout.BLANK_MAGIC}
HEAD = "iiiiiqqi"  # from the size to sysFlag


def says_the_layout(value: object) -> bool:
    """Whether a constant of some source is a magic number, in either sign, or a struct of a record's head."""
    if isinstance(value, int):
        return value in MAGICS or value - (1 << 32) in MAGICS
    if isinstance(value, bytes):
        return any(struct.pack(">i", magic)[:3] in value for magic in MAGICS)
    return isinstance(value, str) and HEAD in value


def test_no_other_module_knows_the_layout() -> None:
    found = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and says_the_layout(node.value)
    }

    assert found == {"protocol/record/layout.py"}


def test_the_heads_are_those_of_the_format() -> None:
    assert {hosts: head.format for hosts, head in layout.HEADS.items()} == {
        (born, store): f">iiiiiqqiq{born}sq{store}siqi" for born in (8, 20) for store in (8, 20)
    }
    assert (layout.AT["store_timestamp"], layout.AT["body_length"], layout.MIN_SIZE) == (56, 84, 91)
    assert {layout.head_for(flag) for flag in (0x31, 0x30)} == {layout.HEADS[20, 20]}
    assert layout.head_for(0x10) == layout.HEADS[20, 8]
