"""Every text exists in every language, with the same placeholders, and is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cometmq
from cometmq.console.base import texts

CONSOLE = Path(cometmq.__file__).parent / "console"
# Texts whose keys are composed where they are used.
PUT_TOGETHER = re.compile(r"frame\.(admin|reader)|common\.(day|hour|minute|second)")


def sources() -> Iterator[ast.AST]:
    for path in sorted(CONSOLE.rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text("utf-8")))


def said() -> Iterator[str]:
    """Yield every plain string in the sources."""
    for node in sources():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_each_text_stands_in_every_language() -> None:
    wanted = set(texts.LANGUAGES)
    wrong = {
        key: found for key, found in texts.table().items() if {k for k, v in found.items() if v} != wanted
    }

    assert len(texts.table()) > 50
    assert wrong == {}


def test_languages_fill_in_the_same_values() -> None:
    def values(text: str) -> list[str]:
        return sorted(re.findall(r"\{(\w*)\}", text))

    differ = [key for key, (*found,) in ((k, v.values()) for k, v in texts.table().items())
              if len({tuple(values(each)) for each in found}) != 1]  # fmt: skip

    assert differ == []


def test_each_text_that_is_used_is_there_and_the_other_way_round() -> None:
    parts = {path.stem for path in (CONSOLE / "texts").glob("*.toml")}
    used = {
        word for word in said()
        if re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", word) and word.split(".")[0] in parts
    }  # fmt: skip
    actions = {
        name.value
        for node in sources()
        if isinstance(node, ast.Call)
        for part in [*node.args[:1], *(each.value for each in node.keywords if each.arg == "name")]
        if ast.unparse(node.func) == "Action" or ast.unparse(node.func).startswith("operations.")
        for name in ast.walk(part)
        if isinstance(name, ast.Constant)
    }
    files = {word for word in used if word.endswith((".json", ".jsonl"))}

    assert sorted(used - files - actions - texts.table().keys()) == []
    assert sorted(key for key in texts.table().keys() - used if not PUT_TOGETHER.fullmatch(key)) == []


def test_no_text_of_a_page_stands_in_the_code() -> None:
    """Visible texts come from the table: arguments of `t` and titles of columns are keys."""
    wrong = [
        ast.unparse(node)
        for node in sources()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "t"
        for key in node.args[:1]
        if isinstance(key, ast.Constant) and key.value not in texts.table()
    ]

    assert wrong == []


def test_values_are_put_in_and_unknown_keys_are_refused() -> None:
    assert texts.text("en", "common.ago", span="3 s") == "3 s ago"
    assert texts.text("zh", "common.ago", span="{span}") == "{span}前"
    assert texts.text("fr", "common.yes") == "yes"
    with pytest.raises(texts.UnknownText, match=r"no\.such"):
        texts.text("en", "no.such")


@pytest.mark.parametrize(
    ("accepted", "language"),
    [("zh-CN,zh;q=0.9", "zh"), ("de,en;q=0.5", "en"), ("", "en"), ("fr", "en"), ("ZH-hant", "zh")],
)
def test_the_browsers_language_is_taken(accepted: str, language: str) -> None:
    assert texts.preferred_language(accepted) == language


def test_a_value_is_not_filled_in_itself() -> None:
    said = texts.text("en", "topic.will_purge", name="{n}{before}", n=7, before="now")

    assert "{n}{before}" in said
    assert said.count("7") == 1
