"""Help and usage errors of every command and group of the five programs, in this process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from cometmq.admin.commands import mqadmin
from cometmq.cli import main
from cometmq.cli.app import EPILOG, cometmq
from cometmq.cli.outcome import run_command
from cometmq.cli.running import mqshutdown
from cometmq.cli.servers import mqbroker, mqnamesrv
from cometmq.settings import NAMESRV_ENV

ROOT = Path(__file__).parents[2]
PROGRAMS: dict[str, click.Command] = {
    "cometmq": cometmq, "mqnamesrv": mqnamesrv, "mqbroker": mqbroker, "mqadmin": mqadmin,
    "mqshutdown": mqshutdown,
}  # fmt: skip
OWN_VARIABLE = re.compile(r"\bCOMETMQ_[A-Z_]+\b")
READ_VARIABLE = re.compile(
    r'(?:os\.environ\.(?:get|setdefault)\(|os\.environ\[|getenv\(|envvar=)\s*"([A-Z0-9_]+)"(?!\]\s*=)'
)


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
    assert headings[1:] == [
        "Topics",
        "Groups",
        "Lite topics",
        "Messages",
        "Brokers and name servers",
        "Access",
    ]
    rows = re.findall(r"^   \w+ +(?=\w)", out, re.MULTILINE)
    assert {len(row) for row in rows} == {3 + max(map(len, mqadmin.commands)) + 2}
    last = " ".join(out.splitlines()[-3:])
    assert all(word in last for word in ("-n", "NAMESRV_ADDR", "--json"))


def test_the_help_names_every_environment_variable() -> None:
    texts = [path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")]
    used = {name for each in (OWN_VARIABLE, READ_VARIABLE) for text in texts for name in each.findall(text)}
    used.update(NAMESRV_ENV)
    used -= {"COMP_WORDS", "COMP_WORDBREAKS"}  # set by a shell's completion function, not by users
    assert {"JAVA_HOME", "SPARK_REMOTE", "NAMESRV_ADDR", "COMETMQ_TLS"} <= used
    assert set(re.findall(r"\b[A-Z0-9]+_[A-Z0-9_]+\b", EPILOG)) == used


@pytest.mark.parametrize("path", COMMANDS)
def test_each_option_shows_at_most_one_default_which_is_not_empty(path: str) -> None:
    command = COMMANDS[path]
    context = command.make_context(path, [], resilient_parsing=True)
    records = [record for each in command.params if (record := each.get_help_record(context)) is not None]
    assert [text for _, text in records if 'default: ""' in text or text.count("default:") > 1] == []


MISSING = [
    path
    for path, command in COMMANDS.items()
    for first in [next((each for each in command.params if each.required), None)]
    if first is not None and isinstance(first.type, click.Choice)
]


@pytest.mark.parametrize("path", MISSING)
def test_a_missing_choice_is_reported_in_one_line(path: str, typed: Typed) -> None:
    assert typed(path).code != 0
    assert re.fullmatch(r"Error: Missing .* Choose from: [\w, -]+", typed.err.splitlines()[-1])
    assert typed(f"{path} --json").code != 0
    assert "\\n" not in typed.err


FLOATS = [
    pytest.param(path, each, id=f"{path} {each.opts[-1]}")
    for path, command in COMMANDS.items()
    for each in command.params
    if isinstance(each.type, type(click.FLOAT))
]


@pytest.mark.parametrize("text", ["nan", "inf", "1e300"])
@pytest.mark.parametrize(("path", "option"), FLOATS)
def test_a_number_that_is_not_finite_is_refused(path: str, option: click.Option, text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a number up to 9000000000"):
        option.type.convert(text, option, click.Context(COMMANDS[path]))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_closed_output_is_an_error(program: str, monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert typed(f"{program} --help").code == 1
    assert typed.err == f"{program}: standard output is closed\n"


class Interrupted(ModuleType):
    """A module during whose import Ctrl-C is pressed."""

    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("program", "module"),
    [("mqadmin", "admin.commands"), ("mqshutdown", "cli.running"), ("cometmq", "cli.app")]
    + [(server, "cli.servers") for server in ("mqbroker", "mqnamesrv")],
)
def test_ctrl_c_during_the_imports_prints_nothing(
    program: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, f"cometmq.{module}", Interrupted(module))
    monkeypatch.setattr(sys, "argv", ["cometmq", *([program] if program != "cometmq" else [])])
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        main()
    assert isinstance(ended.value, SystemExit)
    assert (ended.value.code, *capsys.readouterr()) == (130, "", "")


@pytest.mark.parametrize(
    ("name", "value"), [("NAMESRV_ADDR", "garbage"), ("NAMESRV_ADDR", " ;"), ("COMETMQ_ACCESS_KEY", "me")]
)
@pytest.mark.parametrize("line", ["cometmq send t x", "cometmq dlq list g", "mqadmin topicList"])
def test_an_invalid_variable_is_named_in_the_error(
    name: str, value: str, line: str, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.setenv(name, value)
    assert typed(line).code == 1
    shown = ("COMETMQ_SECRET_KEY", "") if name == "COMETMQ_ACCESS_KEY" else (name, value)
    assert typed.err.startswith(f"{line.split()[0]}: {shown[0]} = {shown[1]!r}: expected ")


NAMES = [
    pytest.param(path, each, id=f"{path} {each.opts[-1]}")
    for path, command in COMMANDS.items()
    for each in command.params
    if (path.startswith("mqadmin") and each.metavar == "NAME" and each.opts[0] in ("-a", "-b", "-g", "-t"))
    or (path.startswith("cometmq dlq") and each.name == "group")
]


@pytest.mark.parametrize("text", ["", " "])
@pytest.mark.parametrize(("path", "option"), NAMES)
def test_a_name_cannot_be_empty(path: str, option: click.Parameter, text: str) -> None:
    with pytest.raises(click.BadParameter, match="a name cannot be empty"):
        option.type.convert(text, option, click.Context(COMMANDS[path]))


@pytest.mark.parametrize(
    "options", ["--delay 1s --at 1", "-d 1 --delay 0s", "--delay 0s --at 1", "-d 0 --at 1"]
)
def test_send_has_examples_and_refuses_two_delivery_times(options: str, typed: Typed) -> None:
    shown = typed("cometmq send --help").out
    assert 'cometmq send orders "hello"' in shown
    assert "| cometmq send orders" in shown

    assert typed(f"cometmq send orders hello {options}").code == 2
    problem = "Error: Give one of --delay-level, --delay and --at.\n"
    assert typed.err.endswith(problem)
    assert all(flag in shown for flag in ("--delay-level, --delay and --at exclude each other",))
