"""`cometmq context`, and the commands that use a context."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from cometmq import contexts
from cometmq.cli.app import pipeline
from cometmq.cli.conf import context
from cometmq.cli.options import namesrv_option
from cometmq.contexts import Context, Contexts
from cometmq.errors import ConfigError
from cometmq.testing import LocalBroker

Run = Callable[..., Result]


@pytest.fixture
def run(home: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `cometmq context` with a separate file of contexts."""
    for name in ("XDG_CONFIG_HOME", contexts.CONTEXT_ENV, "COMETMQ_NAMESRV"):
        monkeypatch.delenv(name, raising=False)
    for name in Context("n:1", "a", "s", "t").conflicting():
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)

    def start(*arguments: str, text: str | None = None) -> Result:
        return CliRunner().invoke(context, arguments, input=text, catch_exceptions=True)

    return start


@click.command()
@namesrv_option
def used(namesrv: str) -> None:
    """Print the settings that a command would use."""
    names = ("COMETMQ_ACCESS_KEY", "COMETMQ_SECRET_KEY", "COMETMQ_TLS")
    click.echo(" ".join([namesrv, *(os.environ.get(name, "-") for name in names)]))


def what_is_used(*arguments: str) -> str:
    done = CliRunner().invoke(used, arguments, catch_exceptions=True)
    return done.output.strip() if done.exception is None else str(done.exception) + done.output


class TestContexts:
    def test_they_are_kept(self, run: Run) -> None:
        assert run("add", "dev", "-n", "d:1").exit_code == 0
        access = ("--access-key", "me", "--tls", "true")
        assert run("add", "prod", "-n", "p:1;p:2", *access, "--use", text="secret\n").exit_code == 0
        assert contexts.load() == Contexts(
            "prod", {"dev": Context("d:1"), "prod": Context("p:1;p:2", "me", "secret", "true")}
        )
        assert stat.S_IMODE(contexts.path().stat().st_mode) == 0o600

    def test_the_file_may_be_a_link(self, run: Run, tmp_path: Path) -> None:
        kept = tmp_path / "kept.json"
        kept.write_text("{}")
        contexts.path().parent.mkdir(parents=True)
        contexts.path().symlink_to(kept)
        assert run("add", "dev", "-n", "d:1").exit_code == 0
        assert contexts.path().is_symlink()
        assert "dev" in kept.read_text()

    def test_one_command_changes_them_at_a_time(self, run: Run) -> None:
        with contexts.changing():
            done = run("add", "dev", "-n", "d:1")
        assert "no other command" in str(done.exception)

    def test_the_list_has_no_secrets(self, run: Run) -> None:
        run("add", "prod", "-n", "p:1", "--access-key", "me", "--secret-key", "hidden", "--use")
        run("add", "dev", "-n", "d:1")
        assert run("list").output == "  dev             d:1\n* prod            p:1  as me\n"
        rows = [json.loads(line) for line in run("list", "--json").output.splitlines()]
        assert rows[1] == {"name": "prod", "current": True, "namesrv": "p:1", "accessKey": "me", "tls": ""}

    def test_one_that_is_removed_is_not_current_any_more(self, run: Run) -> None:
        run("add", "dev", "-n", "d:1", "--use")
        assert run("remove", "dev").exit_code == 0
        assert contexts.load() == Contexts()

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("use", "prd"), "prod"),
            (("remove", "nothing"), "nothing"),
            (("add", "x", "-n", "no port"), "no port"),
            (("add", " ", "-n", "d:1"), "NAME is empty"),
            (("add", "x", "-n", "d:1", "--secret-key", "s"), "--access-key"),
        ],
        ids=str,
    )
    def test_refusals(self, run: Run, arguments: tuple[str, ...], problem: str) -> None:
        run("add", "prod", "-n", "p:1")
        done = run(*arguments)
        assert done.exit_code != 0
        assert problem in done.output + str(done.exception)
        assert list(contexts.load().contexts) == ["prod"]

    def test_there_are_none_without_a_home(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/dev/null")
        assert contexts.load() == Contexts()
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry
        assert contexts.load() == Contexts()

    @pytest.mark.parametrize(
        "content", ["", "[]", '{"x": 1}', '{"contexts": {"a": {}}}', "[" * 5000, "\ud800"]
    )
    def test_a_damaged_file(self, run: Run, content: str) -> None:
        contexts.path().parent.mkdir(parents=True)
        contexts.path().write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(ConfigError, match=r"contexts\.json"):
            contexts.load()

    def test_a_file_that_is_too_large(self, run: Run) -> None:
        contexts.path().parent.mkdir(parents=True)
        contexts.path().write_bytes(b" " * (contexts.MAX_BYTES + 1))
        with pytest.raises(ConfigError, match="at most"):
            contexts.load()


class TestCommands:
    @pytest.fixture(autouse=True)
    def two(self, run: Run) -> None:
        run("add", "dev", "-n", "d:1", "--use")
        run("add", "prod", "-n", "p:1", "--access-key", "me", "--secret-key", "s", "--tls", "true")

    def test_the_current_one_is_used(self) -> None:
        assert what_is_used() == "d:1 - - -"

    def test_the_environment_chooses_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(contexts.CONTEXT_ENV, "prod")
        assert what_is_used() == "p:1 me s true"
        assert "COMETMQ_ACCESS_KEY" not in os.environ

    @pytest.mark.parametrize("name", ["COMETMQ_NAMESRV", "NAMESRV_ADDR"])
    def test_name_servers_of_the_environment_come_first(
        self, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setenv(name, "e:1")
        assert what_is_used() == "e:1 - - -"
        monkeypatch.setenv(contexts.CONTEXT_ENV, "prod")
        assert contexts.CONTEXT_ENV in what_is_used()

    def test_an_option_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(contexts.CONTEXT_ENV, "prod")
        assert what_is_used("-n", "o:1", "--access-key", "you") == "o:1 you - -"

    def test_two_accounts_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(contexts.CONTEXT_ENV, "prod")
        assert "name the name servers with -n" in what_is_used("--access-key", "you").replace("\n", " ")

    def test_a_token_of_another_account_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(contexts.CONTEXT_ENV, "prod")
        monkeypatch.setenv("COMETMQ_SECURITY_TOKEN", "of another")
        assert "name the name servers with -n" in what_is_used().replace("\n", " ")

    def test_empty_variables_count_as_not_set(self, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
        run("use", "prod")
        for name in (contexts.CONTEXT_ENV, "COMETMQ_NAMESRV", "COMETMQ_ACCESS_KEY"):
            monkeypatch.setenv(name, "")
        assert what_is_used() == "p:1 me s true"

    @pytest.mark.parametrize(
        "arguments",
        [
            ["audit", "--source", "live:d:1"],
            ["audit", "--source", "DIR", "--traces", "live:d:1"],
            ["replay", "--source", "live:d:1", "--dry-run"],
        ],
        ids=" ".join,
    )
    def test_its_account_is_not_sent_to_another_source(
        self, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
    ) -> None:
        def started(*_: object) -> None:
            raise AssertionError("a session was started")

        monkeypatch.setattr("cometmq.cli.pipeline.job.running", started)
        monkeypatch.setattr("cometmq.cli.pipeline.writing.running", started)
        monkeypatch.setenv(contexts.CONTEXT_ENV, "prod")
        done = CliRunner().invoke(pipeline, arguments)
        assert "name the name servers with -n" in " ".join(done.output.split())
        own = [word.replace("d:1", "p:1") for word in arguments]
        assert "a session was started" in str(CliRunner().invoke(pipeline, own).exception)

    def test_an_unknown_one_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(contexts.CONTEXT_ENV, "prd")
        assert "prod" in what_is_used()


def test_commands_reach_the_cluster_of_a_context(run: Run, broker: LocalBroker) -> None:
    run("add", "here", "-n", broker.namesrv, "--use")
    for words in (["send", "topic-of-a-context", "hello"], ["admin", "topicList"]):
        command = [sys.executable, "-m", "cometmq", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "topic-of-a-context" in done.stdout
