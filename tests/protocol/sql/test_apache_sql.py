"""Expressions mean what RocketMQ's own library says, as tests/golden/record_sql.py recorded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from cometmq.errors import SqlError
from cometmq.protocol.sql import compile_sql

RECORDED = json.loads(gzip.decompress((Path(__file__).parents[2] / "data" / "sql92.json.gz").read_bytes()))
# An exception in Java's evaluation is a message that does not match, as null is.
VALUES = {"T": True, "F": False, "N": None, "X": None}


def values(text: str, string_words: bool) -> list[bool | None] | str:
    try:
        found = compile_sql(text, string_words=string_words)
    except SqlError:
        return "E"
    return [found.value(each.get) for each in RECORDED["sets"]]


@pytest.mark.parametrize("number", range(2), ids=RECORDED["versions"])
def test_every_recorded_expression_has_the_values_that_the_library_gave_it(number: int) -> None:
    wrong = []
    for text, *answers in RECORDED["rows"]:
        wanted = "E" if answers[number] == "E" else [VALUES[letter] for letter in answers[number]]
        got = values(text, string_words=RECORDED["versions"][number] >= "5")
        if got != wanted:
            wrong.append((text, answers[number], got))

    assert len(RECORDED["rows"]) > 2000
    assert wrong == []
