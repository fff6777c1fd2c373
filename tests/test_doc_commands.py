"""Every command in the documentation exists and accepts the options shown with it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from cometmq.admin.commands import mqadmin
from cometmq.cli.app import cometmq
from cometmq.cli.running import mqshutdown
from cometmq.cli.servers import mqbroker, mqnamesrv

ROOT = Path(__file__).parents[1]
COMMANDS: dict[str, click.Command] = {
    "cometmq": cometmq, "mqadmin": mqadmin, "mqbroker": mqbroker, "mqnamesrv": mqnamesrv,
    "mqshutdown": mqshutdown,
}  # fmt: skip
NAMES = "|".join(COMMANDS)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "2>", "<", "2>&1"}


def shown(text: str) -> list[str]:
    """Return a page's commands: whole spans in backticks, and lines of code blocks with continuations."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(rf"`((?:{NAMES}) [^`]+)`", rest)
    for block in blocks:
        found += re.findall(rf"^[ $]*((?:{NAMES}) .*)$", block.replace("\\\n", " "), re.MULTILINE)
    return [" ".join(each.replace(r"\|", "|").split()) for each in found]


def words_of(line: str) -> list[str]:
    """Return the words of a command as a shell parses them, up to the next command on the line."""
    words = shlex.split(line, comments=True)
    ends = [number for number, word in enumerate(words) if word in ENDS]
    return words[: ends[0]] if ends else words


def wrong(line: str) -> str:
    """Return the error of a command, or "".

    Omitted words and placeholders for values are not errors.
    """
    name, *words = words_of(line)
    if name == "cometmq" and words and words[0] in COMMANDS:
        name, *words = words  # the name of the script alone
    words = [word for word in words if word not in ("…", "...")]
    command = COMMANDS[name]
    parent = None
    try:
        while True:
            context = command.make_context(name, list(words), parent=parent)
            if not isinstance(command, click.Group):
                return ""
            rest = [*context._protected_args, *context.args]  # noqa: SLF001
            if not rest or rest[0].isupper():
                return ""
            _, below, words = command.resolve_command(context, rest)
            assert below is not None
            name, command, parent = below.name or "", below, context
    except click.exceptions.Exit:
        return ""  # for --help and --version
    except (click.BadParameter, click.BadOptionUsage, click.exceptions.NoArgsIsHelpError):
        return ""  # values are omitted or placeholders
    except click.ClickException as problem:
        return problem.format_message()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_can_be_given(page: Path) -> None:
    found = {line: wrong(line) for line in shown(page.read_text("utf-8"))}

    assert {line: problem for line, problem in found.items() if problem} == {}


def test_commands_are_found_where_they_are_shown() -> None:
    text = "Say `mqadmin topicList -n x`, `cometmq`:\n\n```sh\n$ cometmq send orders \\\n  hello | cat\n```\n"
    assert shown(text) == ["mqadmin topicList -n x", "cometmq send orders hello | cat"]
    assert words_of("cometmq send orders hello | cat") == ["cometmq", "send", "orders", "hello"]


@pytest.mark.parametrize(
    "line",
    ["mqadmin topikList", "mqadmin topicList --jsn", "cometmq sent x", "cometmq dlq nothing", "mqbroker --x"],
)
def test_what_cannot_be_given_is_noticed(line: str) -> None:
    assert wrong(line)


def test_most_pages_show_commands() -> None:
    counts = {page.name: len(shown(page.read_text("utf-8"))) for page in PAGES}
    assert counts["admin.md"] > 60
    assert counts["troubleshooting.md"] > 20
