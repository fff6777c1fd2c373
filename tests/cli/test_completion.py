"""Shell completion, in real shells and with names from a real and from a hostile server."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from tests.cli.test_lazy import COMMANDS
from tests.kit.fakes import FakeNamesrv, serving
from tests.kit.terminal import Terminal
from tests.ports import closed_port

from cometmq.admin import Admin, TopicSettings
from cometmq.cli.completion import MAX_NAMES, SHELLS, ask_for
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.codes import RequestCode
from cometmq.testing import LocalBroker

BIN = Path(sys.executable).parent
TRIES = 20
"""Completions have a timeout of a second, which a busy machine may exceed."""
Completed = Callable[[str], list[str]]


def needs(shell: str) -> None:
    """Skip a test, with a warning in the summary of the run, where a shell is not installed."""
    if shutil.which(shell) is None:
        warnings.warn(f"{shell} is not installed: its completion was NOT tested", stacklevel=2)
        pytest.skip(f"{shell} is not installed (apt-get install {shell})")


@pytest.fixture
def env(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a user's shell, with the installed commands."""
    for name in ("COMETMQ_NAMESRV", "COMETMQ_CONTEXT", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "xterm", "PS1": "> "}


def in_bash(env: dict[str, str], line: str) -> list[str]:
    """Return the completions of bash's function for a line."""
    program = line.split()[0]
    script = f"""eval "$(cometmq completion bash {program})"
        function=$(complete -p {program}); function=${{function##*-F }}
        COMP_LINE={shlex.quote(line)} COMP_POINT=${{#COMP_LINE}}
        ${{function% {program}}} {program}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split("\n")[:-1] if done.stdout != "\n" else []


def in_fish(env: dict[str, str], line: str) -> list[str]:
    """Return the completions of fish for a line."""
    program = line.split()[0]
    script = f"cometmq completion fish {program} | source; complete -C {shlex.quote(line)}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [each.partition("\t")[0] for each in done.stdout.splitlines()]


def shown_by_zsh(env: dict[str, str], typed: str, wanted: str) -> str | None:
    """Type text into zsh. Return the terminal's output up to `wanted`, or None if it does not appear."""
    with Terminal(["zsh", "-f", "-i"], env) as zsh:
        zsh.type('autoload -U compinit; compinit -u -D; eval "$(cometmq completion zsh)"; echo re""ady\r')
        assert zsh.until("ready")
        zsh.type(typed)
        return zsh.until(wanted, within_s=30)


def again(find: Callable[[], object], wanted: Callable[[object], bool]) -> object:
    """Repeat a completion until the result is as expected, at most TRIES times. Return the last result."""
    for _ in range(TRIES):
        found = find()
        if wanted(found):
            break
    return found


@pytest.fixture(scope="module")
def cluster(broker: LocalBroker) -> LocalBroker:
    """A cluster with topics and a group."""

    async def fill() -> None:
        async with Admin(broker.namesrv) as admin:
            for name in ("orders", "orders-eu", "share%25"):
                async for _ in admin.create_topic(TopicSettings(topic=name), cluster="DefaultCluster"):
                    pass

    asyncio.run(fill())
    return broker


thorough = pytest.mark.thorough("each starts processes; others show the same for other names or shells")
CASES = [
    ("cometmq tail -n {n} ord", ["orders", "orders-eu"]),
    ("cometmq tail -n {n} share", ["share%25"]),
    ("cometmq bench send -n {n} orders-", ["orders-eu"]),
    ("mqadmin TOPICSTATUS -n {n} -t orders-", ["orders-eu"]),
    ("mqadmin topicStatus -n {n} -c Def", ["DefaultCluster"]),
    ("mqadmin wipeWritePerm -n {n} -b broker", ["{broker}"]),
    ("mqadmin updateTopic -n {n} -t new-na", []),
]


class TestNames:
    @pytest.mark.parametrize(
        ("line", "wanted"),
        [
            pytest.param(*case, marks=[thorough] if number > 1 else [], id=case[0])
            for number, case in enumerate(CASES)
        ],
    )
    def test_they_are_those_of_the_cluster_on_the_line(
        self, cluster: LocalBroker, env: dict[str, str], line: str, wanted: list[str]
    ) -> None:
        filled = [each.format(broker="broker-a") for each in wanted]
        line = line.format(n=cluster.namesrv)
        assert again(lambda: in_bash(env, line), lambda found: found == filled) == filled

    def test_bash_replaces_only_what_follows_its_word_breaks(
        self, cluster: LocalBroker, env: dict[str, str]
    ) -> None:
        host, port = cluster.broker_addr.split(":")
        by_address = f"mqadmin brokerStatus -n {cluster.namesrv} -b {host}:{port[:2]}"
        assert again(lambda: in_bash(env, by_address), lambda found: found == [port]) == [port]
        joined = f"mqadmin topicStatus -n {cluster.namesrv} --topic=orders-"
        wanted = ["orders-eu"]
        assert again(lambda: in_bash(env, joined), lambda found: found == wanted) == wanted

    def test_the_cluster_of_the_environment_or_of_the_context(
        self, cluster: LocalBroker, env: dict[str, str]
    ) -> None:
        wanted = ["orders-eu"]
        named = {**env, "COMETMQ_NAMESRV": cluster.namesrv}
        assert again(lambda: in_bash(named, "cometmq send orders-"), lambda found: found == wanted) == wanted
        words = ["cometmq", "context", "add", "here", "-n", cluster.namesrv, "--use"]
        subprocess.run(words, env=env, check=True)
        assert again(lambda: in_bash(env, "cometmq send orders-"), lambda found: found == wanted) == wanted
        assert in_bash(env, "cometmq context use h") == ["here"]

    def test_fish(self, cluster: LocalBroker, env: dict[str, str]) -> None:
        needs("fish")
        line = f"cometmq tail -n {cluster.namesrv} ord"
        wanted = ["orders", "orders-eu"]
        assert again(lambda: in_fish(env, line), lambda found: found == wanted) == wanted
        assert in_fish(env, "cometmq comp") == ["completion"]
        line = f"mqadmin topicStatus -n {cluster.namesrv} --topic=orders-"
        wanted = ["--topic=orders-eu"]
        assert again(lambda: in_fish(env, line), lambda found: found == wanted) == wanted

    def test_zsh(self, cluster: LocalBroker, env: dict[str, str]) -> None:
        needs("zsh")
        typed = f"cometmq tail -n {cluster.namesrv} orders-\t"
        shown = again(lambda: shown_by_zsh(env, typed, "orders-eu"), bool)
        assert shown

    @thorough
    def test_a_key_in_bash_completes_them(self, cluster: LocalBroker, env: dict[str, str]) -> None:
        def shown() -> str | None:
            with Terminal(["bash", "--norc", "--noprofile", "-i"], env) as bash:
                bash.type('eval "$(cometmq completion bash)"; echo re""ady\r')
                assert bash.until("ready")
                bash.type(f"echo cometmq tail; cometmq tail -n {cluster.namesrv} orders-\t")
                return bash.until("orders-eu", within_s=30)

        assert again(shown, bool)


@pytest.mark.parametrize(
    "namesrv",
    ["closed", *(pytest.param(each, marks=thorough) for each in ("garbage", "no.such.host.invalid:9876"))],
)
def test_a_cluster_that_does_not_answer_offers_nothing_and_prints_nothing(
    namesrv: str, env: dict[str, str]
) -> None:
    with closed_port() as port:
        addr = f"127.0.0.1:{port}" if namesrv == "closed" else namesrv
        assert in_bash(env, f"cometmq tail -n {addr} ord") == []


def test_a_server_that_hangs_is_given_up(env: dict[str, str]) -> None:
    released = threading.Event()
    server = FakeNamesrv()
    server.on(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, lambda frame: hang(frame))

    def hang(_frame: object) -> None:
        released.wait(60)

    with serving(server) as addr:
        assert in_bash(env, f"cometmq tail -n {addr} ord") == []
        released.set()


# -- names that a shell would execute, expand or take for something else

HOSTILE = [
    "or$(touch{ifs}{mark})",
    "or`touch{ifs}{mark}`",
    "or;touch{ifs}{mark};",
    "or|touch{ifs}{mark}",
    "or&&touch {mark}",
    "or\ntouch {mark}",
    "or\r",
    "or'\"",
    "or*",
    "or?",
    "or{{a,b}}",
    "or~",
    "or!!",
    "or\\x",
    "or\x1b]0;title\x07",
    "or,plain",
    "orœ",
    "or" + "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    "or ders",
]
SAFE = sorted(["or%41", "or-1", "or.eu", "or_2"])


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a name server with hostile topic names, and a file that exists if one was executed."""
    mark = tmp_path / "executed"
    server = FakeNamesrv()
    names = [each.format(mark=mark, ifs="${IFS}") for each in HOSTILE]
    server.routes = {name: TopicRouteData() for name in [*names, "-rf", "--help", *SAFE]}
    with serving(server) as addr:
        yield addr, mark


@pytest.mark.parametrize("shell", ["bash", pytest.param("fish", marks=thorough)])
def test_hostile_names_are_not_offered(
    shell: str,
    hostile: tuple[str, Path],
    env: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs(shell)
    addr, mark = hostile
    complete = in_bash if shell == "bash" else in_fish
    (tmp_path / "orphan").touch()  # would be the expansion of `or*`
    monkeypatch.chdir(tmp_path)
    found = again(lambda: complete(env, f"cometmq tail -n {addr} or"), bool)
    assert isinstance(found, list)
    assert sorted(found) == SAFE  # fish has an order of its own
    assert not mark.exists()


@thorough
def test_zsh_offers_no_hostile_names(hostile: tuple[str, Path], env: dict[str, str]) -> None:
    needs("zsh")
    addr, mark = hostile
    # The first tab lists the names. Then the line is executed with their common prefix.
    typed = f"cometmq tail -n {addr} or\t\t"
    shown = again(lambda: shown_by_zsh(env, typed, "or_2"), bool)
    assert isinstance(shown, str)
    assert "touch" not in shown
    assert not mark.exists()


def test_a_hostile_line_is_not_executed(env: dict[str, str], tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for word in (f"$(touch {mark})", f"`touch {mark}`", f"'$(touch {mark})", f'"`touch {mark}`'):
        assert in_bash(env, f"cometmq tail -n {word} or") == []
    assert not mark.exists()


@thorough
def test_the_number_of_names_is_limited(env: dict[str, str]) -> None:
    server = FakeNamesrv()
    server.routes = {f"topic-{number}": TopicRouteData() for number in range(5000)}
    with serving(server) as addr:
        found = again(lambda: in_bash(env, f"cometmq tail -n {addr} "), bool)
    assert isinstance(found, list)
    assert len(found) == MAX_NAMES


# -- what is completed


def test_every_option_for_a_name_of_the_cluster_is_completed() -> None:
    """A new option is listed here, or named like the others."""
    others = {
        *("access_key", "key", "client_id", "lite_topic", "charset", "namespace", "room", "unitname"),
        *("add_user", "remove_user", "container", "host"),
    }
    left_out = {
        f"{path} {param.name}"
        for path, command in COMMANDS.items()
        for param in command.params
        if param.metavar in ("NAME", "TOPIC", "HOST:PORT")
        and param.name not in others
        and ask_for(command, param) is None
    }
    # The options of jobs on files, and of clients that have no `-n`.
    assert {each for each in left_out if not each.startswith(("cometmq store", "cometmq pipeline"))} == set()


def test_the_commands_of_a_group_are_listed_without_their_modules(env: dict[str, str]) -> None:
    """`cometmq <tab>` does not import Spark, for example."""
    script = (
        "import sys; from cometmq.cli.app import cometmq; import click;"
        "found = cometmq.shell_complete(click.Context(cometmq), '');"
        "print(len(found), [m for m in sys.modules if m.startswith('cometmq.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(" ['cometmq.cli.app']\n")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("program", ["cometmq", "mqadmin"])
def test_the_script_names_its_program(shell: str, program: str) -> None:
    from click.testing import CliRunner

    from cometmq.cli.completion import completion

    text = CliRunner().invoke(completion, [shell, program]).output
    assert f"_{program.upper()}_COMPLETE={shell}_complete" in text
    assert isinstance(completion, click.Command)
