"""Help and usage errors of every command and group of the five programs, in this process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
import pytest

from cometmq.admin.commands import mqadmin
from cometmq.cli.app import EPILOG, cometmq
from cometmq.cli.outcome import run_command
from cometmq.cli.servers import mqbroker, mqnamesrv
from cometmq.cli.shutdown import mqshutdown

ROOT = Path(__file__).parents[2]
PROGRAMS: dict[str, click.Command] = {
    "cometmq": cometmq, "mqnamesrv": mqnamesrv, "mqbroker": mqbroker, "mqadmin": mqadmin,
    "mqshutdown": mqshutdown,
}  # fmt: skip
ENVIRONMENT = re.compile(r"\b(?:COMETMQ_[A-Z_]+|NAMESRV_ADDR|ROCKETMQ_HOME)\b")


def below(path: str, command: click.Command) -> dict[str, click.Command]:
    """Return a command and all its subcommands by the words that a user types."""
    found = {path: command}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if command.get_command(context, name) is mqadmin:
                continue  # mqadmin is also reachable as `cometmq admin`
            each = command.get_command(context, name)
            assert each is not None
            found |= below(f"{path} {name}", each)
    return found


COMMANDS = {
    path: command for program, top in PROGRAMS.items() for path, command in below(program, top).items()
}
GROUPS = {path: command for path, command in COMMANDS.items() if isinstance(command, click.Group)}


class Typed:
    """A command line run as a program does; `code`, `out` and `err` are its results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.code, self.out, self.err = -1, "", ""

    def __call__(self, line: str) -> Typed:
        words = line.split()
        self._monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            run_command(PROGRAMS[words[0]], words[0])
        self.out, self.err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        self.code = ended.value.code
        return self


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(monkeypatch, capsys)


@pytest.mark.parametrize("path", GROUPS)
def test_a_group_without_arguments_prints_its_help(path: str, typed: Typed) -> None:
    bare = typed(path).out
    assert (typed.code, typed.err) == (0, "")
    assert bare.startswith("Usage: ")
    assert bare == typed(f"{path} --help").out


@pytest.mark.parametrize("path", COMMANDS)
def test_help_begins_with_how_the_command_is_called(path: str, typed: Typed) -> None:
    assert typed(f"{path} --help").code == 0
    assert typed.out.startswith("Usage: ")


@pytest.mark.parametrize("path", COMMANDS)
def test_a_wrong_option_is_named_with_the_nearest_one(path: str, typed: Typed) -> None:
    assert typed(f"{path} --helpp").code != 0
    assert "No such option '--helpp'." in typed.err
    assert "--help'" in typed.err.partition("helpp'.")[2]


@pytest.mark.parametrize("path", [path for path in COMMANDS if " " in path])
def test_a_mistyped_command_is_named_with_the_one_that_was_meant(path: str, typed: Typed) -> None:
    group, _, name = path.rpartition(" ")
    assert typed(f"{group} {name}x").code != 0
    assert re.search(rf"Did you mean '?{name}\b", typed.err)
    assert "Traceback" not in typed.err


@pytest.mark.parametrize("path", COMMANDS)
def test_the_line_of_a_command_is_a_whole_sentence(path: str) -> None:
    line = COMMANDS[path].get_short_help_str(500)
    assert re.fullmatch(r"(?!(?:What|Whether|Where|How|Who|A|The|Messages)\b)[A-Z].*[.]", line)


@pytest.mark.parametrize("path", GROUPS)
def test_the_list_of_a_group_has_every_command_with_a_line_that_is_not_cut(path: str, typed: Typed) -> None:
    listed = re.findall(r"^ {2,3}([\w-]+) {2,}\S", typed(path).out, re.MULTILINE)
    names = [each.removeprefix(f"{path} ") for each in COMMANDS if each.rpartition(" ")[0] == path]
    assert sorted(set(names) - {"help"}) == sorted(set(listed) & set(names))
    assert "..." not in typed.out.partition("\n")[2]


def test_the_lists_have_headings_and_columns_as_wide_as_the_longest_name(typed: Typed) -> None:
    headings = re.findall(r"^(\w[\w ]*):$", typed("cometmq").out, re.MULTILINE)
    assert headings == ["Options", "First steps", "Operate", "Jobs", "Servers"]

    out = typed("mqadmin").out
    headings = re.findall(r"^(\w[\w ]*):$", out, re.MULTILINE)
    assert headings[1:] == ["Topics", "Groups", "Messages", "Brokers and name servers", "Access"]
    rows = re.findall(r"^   \w+ +(?=\w)", out, re.MULTILINE)
    assert {len(row) for row in rows} == {3 + max(map(len, mqadmin.commands)) + 2}
    last = " ".join(out.splitlines()[-3:])
    assert all(word in last for word in ("-n", "NAMESRV_ADDR", "--json"))


def test_the_help_names_every_environment_variable() -> None:
    sources = (ROOT / "src" / "cometmq").rglob("*.py")
    used = {name for path in sources for name in ENVIRONMENT.findall(path.read_text("utf-8"))}
    assert set(ENVIRONMENT.findall(EPILOG)) == used


@pytest.mark.parametrize("options", ["--delay 1s --at 1", "-d 1 --delay 1s", "-d 1 --at 1"])
def test_send_has_examples_and_refuses_two_delivery_times(options: str, typed: Typed) -> None:
    shown = typed("cometmq send --help").out
    assert 'cometmq send orders "hello"' in shown
    assert "| cometmq send orders" in shown

    assert typed(f"cometmq send orders hello {options}").code == 2
    problem = "Error: Give one of --delay-level, --delay and --at.\n"
    assert typed.err.endswith(problem)
    assert all(flag in shown for flag in ("--delay-level, --delay and --at exclude each other",))
