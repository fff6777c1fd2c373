"""Output of `cometmq consume`: harmless for terminals, and acknowledged only once it is written."""

from __future__ import annotations

import json
import select
import shlex
import signal
import subprocess
from pathlib import Path
from typing import IO, Any

import pytest
from tests.cli.conftest import BIN, Run
from tests.faults.hostile import EVIL

pytestmark = pytest.mark.usefixtures("namesrv")
END_S = 60


def consume(topic: str, *words: str, stdout: int | IO[Any] = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [str(BIN / "cometmq"), "consume", topic, "-g", topic, *words]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


def left(run: Run, topic: str, count: int) -> list[dict[str, Any]]:
    """Return the messages that a group has not acknowledged."""
    taken = run("cometmq", "consume", topic, "-g", topic, "-c", str(count), "--timeout", "30", "--json")
    return [json.loads(line) for line in taken.stdout.splitlines()]


class TestOutputThatCannotBeWritten:
    def test_a_full_one_ends_the_command_and_acknowledges_nothing(self, run: Run) -> None:
        run("cometmq", "send", "full-output", *"abc")
        with open("/dev/full", "w") as full, consume("full-output", stdout=full) as process:
            _, err = process.communicate(timeout=END_S)

        assert (process.returncode, err) == (1, "cometmq: cannot print: No space left on device\n")
        messages = left(run, "full-output", 3)
        assert sorted(message["body"] for message in messages) == list("abc")
        assert {message["reconsumeTimes"] for message in messages} == {0}

    @pytest.mark.parametrize("command", ["consume", "tail", "send"])
    def test_a_closed_one_is_an_error_before_anything_is_received(self, run: Run, command: str) -> None:
        run("cometmq", "send", f"closed-{command}", "x")
        shell = ["bash", "-c", 'exec "$0" "$@" >&-', str(BIN / "cometmq")]
        done = subprocess.run(
            [*shell, command, f"closed-{command}"], capture_output=True, text=True, timeout=END_S
        )

        assert (done.returncode, done.stderr) == (1, "cometmq: standard output is closed\n")

    @pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_ends_it_while_its_reader_does_not_read(self, run: Run, signum: int) -> None:
        topic = f"unread-{signum}"
        run("cometmq", "send", topic, text="x" * 300_000)  # more than a pipe's buffer
        with consume(topic) as process:
            assert process.stdout is not None
            select.select([process.stdout], [], [], END_S)  # the output has begun and is now blocked
            process.send_signal(signum)
            assert process.wait(END_S) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""

        (message,) = left(run, topic, 1)
        assert (len(message["body"]), message["reconsumeTimes"]) == (300_000, 0)

    @pytest.mark.parametrize("words", [("mqadmin", "topicList"), ("cometmq", "send", "t", "x")])
    def test_every_command_says_in_one_line_that_its_output_is_full(self, words: tuple[str, ...]) -> None:
        command = [str(BIN / words[0]), *words[1:]]
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=END_S)

        assert (done.returncode, done.stderr) == (1, f"{words[0]}: No space left on device\n")


class TestEscapes:
    @pytest.fixture
    def sent(self, run: Run, request: pytest.FixtureRequest) -> str:
        """Send a message full of escape sequences to a new topic, and return the topic."""
        topic = str(request.function.__name__)
        run("cometmq", "send", topic, f"{EVIL}\nforged\t", "-t", EVIL, "-k", EVIL, "-p", f"{EVIL}={EVIL}")
        return topic

    def taken(self, run: Run, topic: str, *words: str) -> str:
        return run("cometmq", "consume", topic, "-g", "escapes", "-c", "1", "--timeout", "30", *words).stdout

    def test_they_are_shown_and_not_sent_to_the_terminal(self, run: Run, sent: str) -> None:
        out = self.taken(run, sent)

        assert out.count("\n") == 1
        assert out[:-1].isprintable()
        assert out.endswith("\\x1b[31m\\x1b]0;owned\\x07\\x9b2J[red]x\\u202e\\nforged\\t\n")

    def test_in_json_they_are_escapes_of_json(self, run: Run, sent: str) -> None:
        out = self.taken(run, sent, "--json")

        assert out[:-1].isprintable()
        message = json.loads(out)
        assert (message["body"], message["tags"]) == (f"{EVIL}\nforged\t", EVIL)
        assert message["properties"][EVIL] == EVIL

    def test_raw_is_what_was_sent(self, run: Run, sent: str) -> None:
        assert self.taken(run, sent, "--raw").endswith(f"{EVIL}\nforged\t\n")

    def test_a_raw_body_is_its_bytes(self) -> None:
        program = shlex.quote(str(BIN / "cometmq"))
        command = f"printf '\\377\\001' | {program} send bytes; {program} consume bytes --raw -c 1"
        done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=END_S)

        assert done.stdout.endswith(b"  \xff\x01\n")


class TestEncodings:
    @pytest.mark.representative("words0-ascii")
    @pytest.mark.thorough("each command in each encoding")
    @pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
    @pytest.mark.parametrize(
        "words",
        [
            ("cometmq", "consume", "encoded", "-g", "{encoding}", "-c", "1", "--timeout", "30"),
            ("cometmq", "consume", "encoded", "-g", "{encoding}-j", "-c", "1", "--timeout", "30", "--json"),
            ("cometmq", "tail", "encoded", "--from", "first", "-c", "1", "--timeout", "30"),
            ("mqadmin", "consumeMessage", "-t", "encoded"),
            ("mqadmin", "queryMsgByKey", "-t", "encoded", "-k", "日本€", "--json"),
        ],
    )
    def test_a_terminal_of_any_encoding_is_no_traceback(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, encoding: str, words: tuple[str, ...]
    ) -> None:
        run("cometmq", "send", "encoded", "日本€", "-k", "日本€")
        monkeypatch.setenv("PYTHONIOENCODING", encoding)
        command = [str(BIN / words[0]), *(word.format(encoding=encoding) for word in words[1:])]
        done = subprocess.run(command, capture_output=True, timeout=END_S)

        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.count(b"\n") >= 1

    @pytest.mark.representative("words0")
    @pytest.mark.thorough("each command")
    @pytest.mark.parametrize(
        "words",
        [
            ("send", "t", "x", "-k", b"\xff"),
            ("send", "t", "x", "-t", b"\xff"),
            ("send", "t", "x", "-p", b"a=\xff"),
            ("send", b"\xff", "x"),
            ("send", "t", "x", "-n", b"\xff:1"),
            ("consume", "t", "-t", b"\xff"),
            ("consume", "t", "-g", b"\xff"),
            ("tail", "t", "-t", b"\xff"),
            ("tail", "t", "--from", b"\xff"),
            ("admin", "topicStatus", "-t", b"\xff"),
            ("store", "verify", b"/nowhere/\xff"),
            ("broker", "-c", b"/nowhere/\xff"),
            (b"\xff",),
        ],
    )
    def test_an_argument_that_is_no_utf8_is_refused_in_words(self, words: tuple[str | bytes, ...]) -> None:
        done = subprocess.run([str(BIN / "cometmq"), *words], capture_output=True, text=True, timeout=END_S)

        assert done.returncode in (1, 2, 255)
        assert "\\udcff" in done.stderr or "\N{REPLACEMENT CHARACTER}" in done.stderr
        assert "Traceback" not in done.stderr
        assert "internal error" not in done.stderr

    @pytest.mark.parametrize("words", [("send", b"\xff", "x"), ("tail", "t", "-n", b"\xff:1")])
    def test_facts_that_are_no_utf8_are_escaped_in_json_errors(self, words: tuple[str | bytes, ...]) -> None:
        command = [str(BIN / "cometmq"), *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=END_S)

        assert "\\udcff" in str(json.loads(done.stderr)["details"])

    def test_a_body_is_sent_as_it_is(self, run: Run) -> None:
        subprocess.run([str(BIN / "cometmq"), "send", "bytes-body", b"\xff\x01"], check=True, timeout=END_S)
        taken = run("cometmq", "consume", "bytes-body", "-c", "1", "--timeout", "30", "--json")

        message = json.loads(taken.stdout)
        assert (message["body"], message["bodyEncoding"]) == ("/wE=", "base64")


def test_an_error_is_json_where_json_was_asked_for(run: Run, tmp_path: Path) -> None:
    for words in (("send", "t", "x", "-n", "127.0.0.1:1"), ("store", "dump", str(tmp_path)), ("tail",)):
        failed = run("cometmq", *words, "--json")

        assert failed.returncode in (1, 2)
        assert failed.stderr.count("\n") == 1
        assert json.loads(failed.stderr).keys() == {"error", "message", "details"}
