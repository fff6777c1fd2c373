"""`--watch` and colours, in pipes and in a pseudo-terminal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from tests.cli.test_lazy import COMMANDS
from tests.kit.fakes import FakeNamesrv, serving
from tests.kit.terminal import ESCAPES, Terminal

from cometmq.admin import Admin
from cometmq.admin.commands import watching
from cometmq.protocol.bodies import SubscriptionGroupConfig, TopicRouteData
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.testing import LocalBroker
from cometmq.text import in_color

BIN = Path(sys.executable).parent
thorough = pytest.mark.thorough("each starts processes; others show nearly the same")
COMETMQ, MQADMIN = str(BIN / "cometmq"), str(BIN / "mqadmin")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in ("NO_COLOR", "FORCE_COLOR", "COMETMQ_NAMESRV", "COMETMQ_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    return {**os.environ, "TERM": "xterm"}


@pytest.fixture
def server() -> Iterator[FakeNamesrv]:
    """A name server with the topics that a test registers."""
    server = FakeNamesrv()
    server.routes = {"first": TopicRouteData()}
    with serving(server):
        yield server


def piped(words: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Press Ctrl-C. Return the exit code and the standard error of the process."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


class TestInAPipe:
    def test_blocks_follow_each_other_until_ctrl_c(self, server: FakeNamesrv, env: dict[str, str]) -> None:
        process = piped([MQADMIN, "topicList", "-n", server.addr, "--watch", "0.1"], env)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["first\n", "\n", "first\n"]
        server.routes["second"] = TopicRouteData()
        while process.stdout.readline() != "second\n":
            pass
        assert interrupted(process) == (130, "\n")

    @thorough
    def test_json_is_a_line_each_time(self, server: FakeNamesrv, env: dict[str, str]) -> None:
        process = piped([MQADMIN, "topicList", "-n", server.addr, "--watch=0.1", "--json"], env)
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline()) for _ in range(3)] == [["first"]] * 3
        assert interrupted(process) == (130, "\n")

    def test_a_closed_pipe_ends_it_quietly(self, server: FakeNamesrv, env: dict[str, str]) -> None:
        process = piped([COMETMQ, "admin", "topicList", "-n", server.addr, "--watch", "0.1"], env)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (1, "")

    def test_the_first_error_ends_it_and_later_ones_do_not(
        self, server: FakeNamesrv, env: dict[str, str]
    ) -> None:
        process = piped([MQADMIN, "topicRoute", "-n", server.addr, "-t", "none", "--watch", "0.1"], env)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err.count("\n")) == (1, "", 1)

        process = piped([MQADMIN, "topicList", "-n", server.addr, "--watch", "0.1"], env)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        server.refuse(
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, ResponseCode.SYSTEM_ERROR, "out of order"
        )
        assert "out of order" in process.stderr.readline()
        del server.scripts[RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER]
        while process.stdout.readline() != "first\n":
            pass
        assert interrupted(process)[0] == 130


class TestOnATerminal:
    def test_it_is_drawn_in_place_and_stays_at_the_end(
        self, server: FakeNamesrv, env: dict[str, str]
    ) -> None:
        with Terminal([MQADMIN, "topicList", "-n", server.addr, "--watch", "0.1"], env) as terminal:
            assert terminal.until("first")
            server.routes["second"] = TopicRouteData()
            assert terminal.until("second")
            assert "\x1b[?1049h" in terminal.raw  # the alternate screen
            terminal.type("q")
            assert terminal.ends() == 0
            assert terminal.raw.rpartition("\x1b[?1049l")[2].split() == ["first", "second"]

    @pytest.mark.parametrize(
        ("signum", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=thorough)]
    )
    def test_signals_give_the_terminal_back(
        self, server: FakeNamesrv, env: dict[str, str], signum: signal.Signals, code: int
    ) -> None:
        with Terminal([MQADMIN, "topicList", "-n", server.addr, "--watch", "0.1"], env) as terminal:
            assert terminal.until("first")
            terminal.type("\x03") if signum == signal.SIGINT else terminal.process.send_signal(signum)
            assert terminal.ends() == code
            assert "\x1b[?1049l" in terminal.raw
            assert "Traceback" not in terminal.raw

    def test_a_long_list_is_cut_at_the_height_and_names_cannot_control_the_terminal(
        self, server: FakeNamesrv, env: dict[str, str]
    ) -> None:
        names = [f"topic-{number:04}" for number in range(500)]
        server.routes = {name: TopicRouteData() for name in ["\x1b]0;owned\x07\x1b[31m", *names]}
        with Terminal([MQADMIN, "topicList", "-n", server.addr, "--watch", "0.1"], env) as terminal:
            text = terminal.until("topic-0015")
            assert text is not None
            assert r"\x1b]0;owned\x07\x1b[31m" in text
            assert "topic-0100" not in text
            assert "\x1b]0;" not in terminal.raw

    @thorough
    def test_json_is_not_drawn(self, server: FakeNamesrv, env: dict[str, str]) -> None:
        with Terminal([MQADMIN, "topicList", "-n", server.addr, "--watch=0.1", "--json"], env) as terminal:
            assert terminal.until(r'\["first"\]\s+\["first"\]')
            assert not ESCAPES.search(terminal.raw)


LISTINGS = {
    path for path, command in COMMANDS.items() if any(each.name == "watch" for each in command.params)
}
NOT_WATCHED = {
    f"mqadmin {name}"
    for name in (
        *("allocateMQ", "checkMsgSendRT", "clusterRT", "consumeMessage", "resumeCheckHalfMessage"),
        *("sendMessage", "sendMsgStatus", "startMonitoring", "triggerLiteDispatch"),
    )
}


async def test_turns_leave_no_tasks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Callable[[str], None]] = []

    @asynccontextmanager
    async def screen(on_key: Callable[[str], None], _: Callable[[], None]) -> AsyncIterator[Any]:
        keys.append(on_key)
        yield SimpleNamespace(update=lambda *_, **__: None)

    monkeypatch.setattr(watching, "_screen", screen)
    tasks: list[int] = []

    async def work() -> None:
        tasks.append(len(asyncio.all_tasks()))
        if len(tasks) == 5:
            keys[0]("q")

    with pytest.raises(click.exceptions.Exit):
        await watching._in_place(work, 0.0, pytest.fail, {})  # noqa: SLF001
    assert len(set(tasks)) == 1


def test_listings_can_be_watched_and_changes_cannot() -> None:
    flags = {
        path: {opt for each in command.params for opt in each.opts} for path, command in COMMANDS.items()
    }
    changing = {path for path, found in flags.items() if found & {"--dry-run", "--yes"}}
    assert LISTINGS & changing == set()
    words = ("query", "print", "export")
    left = {
        path
        for path, found in flags.items()
        if path.startswith("mqadmin ") and "--json" in found and not path.split()[1].startswith(words)
    }
    assert left - changing - LISTINGS - NOT_WATCHED == set()
    assert {
        "cometmq dlq list",
        "cometmq timers list",
        "cometmq raft status",
        "cometmq cluster status",
    } <= LISTINGS


def test_commands_of_cometmq_are_watched(broker: LocalBroker, env: dict[str, str]) -> None:
    async def fill() -> None:
        async with Admin(broker.namesrv) as admin:
            async for _ in admin.update_group(
                SubscriptionGroupConfig(group_name="readers"), cluster="DefaultCluster"
            ):
                pass

    asyncio.run(fill())
    process = piped([COMETMQ, "dlq", "list", "-n", broker.namesrv, "--watch", "0.1", "--json"], env)
    assert process.stdout is not None
    rows = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert rows[0] == rows[1]
    assert interrupted(process)[0] == 130


# -- colours


@pytest.mark.parametrize(
    ("variables", "terminal", "wanted"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": ""}, False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
    ids=str,
)
def test_when_colours_are_written(
    variables: dict[str, str],
    terminal: bool,
    wanted: bool,
    env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    assert in_color(stream) is wanted


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([MQADMIN], id="mqadmin"),
        pytest.param([COMETMQ, "admin"], id="cometmq", marks=thorough),
    ],
)
class TestColours:
    def test_a_pipe_has_none_unless_they_are_asked_for(
        self, command: list[str], server: FakeNamesrv, env: dict[str, str]
    ) -> None:
        words = ["clusterList", "-n", server.addr]

        def shown(*options: str, **variables: str) -> tuple[str, str]:
            line = [command[0], *options, *command[1:], *words]
            done = subprocess.run(line, env={**env, **variables}, capture_output=True, text=True, check=False)
            line[-1] = "none:1"
            failed = subprocess.run(
                line, env={**env, **variables}, capture_output=True, text=True, check=False
            )
            return done.stdout, failed.stderr

        plain = shown()
        assert not any(map(ESCAPES.search, plain))
        for colored in (shown("--color", "always"), shown(FORCE_COLOR="1")):
            assert "\x1b[1m#" in colored[0]
            assert "\x1b[31m" in colored[1]
            assert tuple(ESCAPES.sub("", text) for text in colored) == plain
        assert shown("--color", "never", FORCE_COLOR="1") == plain

    def test_a_terminal_has_them_unless_they_are_refused(
        self, command: list[str], server: FakeNamesrv, env: dict[str, str]
    ) -> None:
        words = [*command, "clusterList", "-n", server.addr]
        with Terminal(words, env) as terminal:
            assert terminal.ends() == 0
            assert "\x1b[1m#" in terminal.raw
        with Terminal(words, {**env, "NO_COLOR": "1"}) as terminal:
            assert terminal.ends() == 0
            assert "#Cluster" in terminal.raw
            assert not ESCAPES.search(terminal.raw)
