"""`cometmq send` with standard input: pipes that stay open, signals, terminals."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import click
import pytest
from tests.cli.conftest import BIN, Run
from tests.kit.waiting import until

from cometmq.cli import send

pytestmark = pytest.mark.usefixtures("namesrv")
END_S = 60


@contextmanager
def sender(topic: str, *words: str, stdin: int = subprocess.PIPE) -> Iterator[subprocess.Popen[bytes]]:
    """Run `cometmq send` in the background. Kill the process at the end if it still runs."""
    with subprocess.Popen(
        [str(BIN / "cometmq"), "send", topic, *words],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()


def line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_line_leaves_while_the_next_is_waited_for() -> None:
    with sender("followed", "--json") as process:
        for number in range(3):
            write(process, b"line %d\n" % number)
            assert json.loads(line(process))["sendStatus"] == "SEND_OK"
        _, err = process.communicate(timeout=END_S)

    assert err.startswith(b"sent 3 messages, 18 bytes in ")
    assert process.returncode == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_what_was_read_sent(run: Run, signum: int, code: int) -> None:
    topic = f"interrupted-{signum}"
    with sender(topic, "--json") as process:
        write(process, b"one\ntwo\nnot yet who")
        results = [line(process), line(process)]
        process.send_signal(signum)
        assert process.wait(END_S) == code
        assert process.stderr is not None
        err = process.stderr.read().decode()

    assert [json.loads(result)["sendStatus"] for result in results] == ["SEND_OK"] * 2
    assert "the last line was incomplete and was not sent\nsent 2 messages, 6 bytes in " in err
    assert err.count("\n") == 2
    taken = run("cometmq", "consume", topic, "-c", "2", "--timeout", "30")
    assert sorted(text.split()[-1] for text in taken.stdout.splitlines()) == ["one", "two"]


def test_at_a_terminal_it_says_how_to_end_and_answers_each_line() -> None:
    ours, theirs = pty.openpty()
    try:
        with sender("typed", stdin=theirs) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == b"type lines; Ctrl-D ends the input\n"
            os.write(ours, b"hello\n")
            assert line(process).startswith(b"SEND_OK ")
            os.write(ours, b"\x04")
            out, err = process.communicate(timeout=END_S)
    finally:
        os.close(ours)
        os.close(theirs)

    assert out.startswith(b"sent 1 message, 5 bytes in ")
    assert (err, process.returncode) == (b"", 0)


def test_a_dash_is_standard_input_among_other_bodies(run: Run) -> None:
    sent = run("cometmq", "send", "dashed", "first", "-", "last", "--json", text="two\nthree\n")
    taken = run("cometmq", "consume", "dashed", "-c", "4", "--timeout", "30")

    assert len(sent.stdout.splitlines()) == 4
    bodies = sorted(text.split()[-1] for text in taken.stdout.splitlines())
    assert bodies == ["first", "last", "three", "two"]


def test_a_closed_standard_input_is_an_error() -> None:
    command = ["bash", "-c", 'exec "$0" send t <&-', str(BIN / "cometmq")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S)

    assert (done.returncode, done.stderr) == (1, "cometmq: standard input is closed\n")


class TestInputLines:
    """The reader alone, with a pipe in place of standard input."""

    @pytest.fixture
    def pipe(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[bytes]]:
        """Yield a file whose content is read as standard input."""
        reading, writing = os.pipe()
        with os.fdopen(reading) as stdin, os.fdopen(writing, "wb", buffering=0) as file:
            monkeypatch.setattr(sys, "stdin", stdin)
            yield file
            file.close()  # ends the reading thread

    async def arrived(self, lines: send.InputLines) -> None:
        await until(lambda: lines.chunks)

    async def test_what_was_read_before_the_stop_is_given_out(self, pipe: IO[bytes]) -> None:
        stop = asyncio.Event()
        lines = send.InputLines()
        pipe.write(b"a\n")
        given = []
        async for some in lines.read(stop):
            given.append(some)
            if len(given) == 1:
                pipe.write(b"b\nc\n")
                await self.arrived(lines)
                stop.set()

        assert given == [[b"a"], [b"b", b"c"]]

    async def test_a_line_in_pieces_is_one_and_the_last_needs_no_end(self, pipe: IO[bytes]) -> None:
        lines = send.InputLines()
        for part in (b"2\n\r\n3\r\nfo", b"ur\n", b"five"):
            pipe.write(part)
        pipe.close()

        given = [text async for some in lines.read(asyncio.Event()) for text in some]

        assert given == [b"2", b"3", b"four", b"five"]

    async def test_a_line_without_end_is_refused_behind_those_before(
        self, pipe: IO[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(send, "MAX_LINE_BYTES", 10)
        lines = send.InputLines()
        pipe.write(b"one\ntwo\n" + b"x" * 12)
        read = lines.read(asyncio.Event())

        assert await anext(read) == [b"one", b"two"]
        with pytest.raises(click.ClickException, match="more than 10 bytes"):
            await anext(read)

    async def test_no_batch_is_longer_than_its_limit(self, pipe: IO[bytes]) -> None:
        lines = send.InputLines()
        pipe.write(b"x\n" * 3000)
        sizes = []
        async for some in lines.read(asyncio.Event()):
            sizes.append(len(some))
            if sum(sizes) == 3000:
                break

        assert max(sizes) <= send.MAX_BATCH_LINES
