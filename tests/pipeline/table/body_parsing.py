"""Checks that every parser of bodies must pass."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cometmq.pipeline.table.bodies import Bodies, Parser, with_columns


def is_refused(parser: Parser, body: bytes) -> str:
    """Return the reason why a body has no fields."""
    parsed = parser.parse(body)
    assert parsed.value is None
    assert parsed.error
    return parsed.error


def never_fails(parser: Parser) -> None:
    """Check that any bytes result in fields or in a reason."""

    @given(st.binary(max_size=200))
    def ends(body: bytes) -> None:
        parsed = parser.parse(body)
        assert (parsed.value is None) == (parsed.error is not None)

    ends()


def columns(parser: Parser, fields: pa.StructType, *bodies: bytes, keep: bool = True) -> list[dict[str, Any]]:
    """Return the rows of bodies, converted through Arrow."""
    batch = pa.record_batch({"queue_offset": range(len(bodies)), "body": pa.array(bodies, pa.binary())})
    found = with_columns(batch, Bodies("json", (b"", ""), fields, fields, keep), parser)
    found.validate(full=True)
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows
