"""Handling of signals by servers that start, stop or fail slowly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cometmq.testing import ServerProcess

SCRIPT = """
import asyncio, sys
from cometmq.cli.outcome import SERVER_EXITS, run_command
from cometmq import logs
from cometmq.cli.servers import serve
import click

class Server:
    async def start(self):
        print("starting", flush=True)
        {start}
    async def stop(self):
        print("stopping", flush=True)
        {stop}
        print("stopped", flush=True)

@click.command()
def main():
    logs.set_up()
    serve("broker", Server, lambda server: "ready")

run_command(main, "main", SERVER_EXITS)
"""
FOR_EVER = "await asyncio.Event().wait()"


def server(ready: str, start: str = "pass", stop: str = "pass") -> ServerProcess:
    return ServerProcess([sys.executable, "-c", SCRIPT.format(start=start, stop=stop)], ready)


def test_it_starts_says_so_and_stops_in_order() -> None:
    with server("ready") as process:
        assert process.stop() == 0

    assert process.output.splitlines() == ["starting", "ready", "stopping", "stopped"]


def test_a_signal_ends_a_start_that_takes_long() -> None:
    with server("starting", start=FOR_EVER) as process:
        assert process.stop() == 0

    assert process.output.splitlines() == ["starting", "stopping", "stopped"]


def test_a_server_under_nohup_outlives_its_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RocketMQ's documentation starts servers with `nohup sh mqnamesrv &`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    script = Path(__file__).parents[2] / "bin" / "mqnamesrv"
    with ServerProcess(["nohup", "sh", str(script), "--port", "0"], "boot success") as process:
        process.wait_ready()
        process.process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.process.wait(0.5)
        assert process.stop() == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_stop_that_takes_long(signum: signal.Signals) -> None:
    with server("ready", stop=FOR_EVER) as process:
        process.process.send_signal(signum)
        process.wait_line(r"stopping", 30)

        assert process.stop(signum) == 128 + signum

    assert "stopped" not in process.output


@pytest.mark.parametrize(
    ("start", "line"),
    [
        ("raise OSError(98, 'Address already in use')", "main: Address already in use"),
        ("open('/nowhere/at/all')", "main: /nowhere/at/all: No such file or directory"),
        ("raise ZeroDivisionError('why')", "main: internal error: ZeroDivisionError: why"),
    ],
)
def test_a_start_that_fails_is_one_line_and_an_exit_code(start: str, line: str) -> None:
    process = server("starting", start=start)

    assert process.wait() == 255
    lines = process.output.splitlines()
    assert next(text for text in lines if text.startswith("main: ")).startswith(line)
    assert len(lines) == 4  # the lines: starting, stopping, stopped and the error


def test_a_log_level_nobody_knows_is_told_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMETMQ_LOG_LEVEL", "loud")

    with server("ready") as process:
        assert process.stop() == 0

    assert "COMETMQ_LOG_LEVEL: LOUD is not a log level" in process.output


def test_a_script_without_its_command_runs_nothing_of_the_current_directory(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "bin" / "mqadmin"
    stranger = tmp_path / "cometmq"
    stranger.write_text("#!/bin/sh\necho stranger\n")
    stranger.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(script), "topicList"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        timeout=60,
    )
    assert done.returncode == 127
    assert "cometmq: not found" in done.stderr
    assert "stranger" not in done.stdout
