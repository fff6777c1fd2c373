"""docs/admin.md has every command, with an example that the command takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cometmq.admin.commands import mqadmin

PAGE = (Path(__file__).parents[3] / "docs" / "admin.md").read_text()
ROWS = re.findall(r"^\| (\w+) \| .* \| `mqadmin (.+)` \|$", PAGE, re.MULTILINE)


def test_every_command_is_on_the_page_once() -> None:
    assert sorted(name for name, _ in ROWS) == sorted({*mqadmin.commands} - {"help"})


@pytest.mark.parametrize(("command", "example"), ROWS, ids=[name for name, _ in ROWS])
def test_an_example_can_be_given(command: str, example: str) -> None:
    name, *words = shlex.split(example.replace(r"\|", "|"))

    assert name == command
    with mqadmin.commands[name].make_context(name, words) as context:
        assert context.args == []


def test_dangerous_commands_are_named() -> None:
    sentence = PAGE[PAGE.index("With `--dry-run`") : PAGE.index("purgeTopic only shows")]
    named = {word for word in re.findall(r"\w+", sentence) if word in mqadmin.commands}

    assert named == {
        name
        for name, command in mqadmin.commands.items()
        if any("--dry-run" in each.opts for each in command.params)
    }
