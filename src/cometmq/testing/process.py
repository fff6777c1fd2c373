"""CometMQ's servers as real processes: for tests of crashes and signals, and for load that needs a core."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 30.0
NAMESRV = re.compile(r"^\s*name server\s+(\S+)$")
BROKER = re.compile(r"^\s*(broker-[a-z0-9]+)\s+(\S+:\d+)\s")


class ProcessFailed(AssertionError):
    """A server ended or stayed silent where it should have become ready; carries what it wrote."""

    def __init__(self, what: str, output: str) -> None:
        super().__init__(f"{what}\n{output}")
        self.what = what
        self.output = output

    def __reduce__(self) -> tuple[type[ProcessFailed], tuple[str, str]]:
        return type(self), (self.what, self.output)


class ServerProcess:
    """A server's command with its output collected; a context manager that stops it in the end.

    `ready` is a pattern that one line of its output matches once the server listens.
    """

    def __init__(self, command: Sequence[str], ready: str, env: dict[str, str] | None = None) -> None:
        self.command = list(command)
        self.lines: list[str] = []
        self._ready = re.compile(ready)
        self._news = threading.Condition()
        self._open_streams = 2
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """All lines of both streams so far, in the order they came."""
        with self._news:
            return "\n".join(self.lines)

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            except ProcessFailed:
                self.kill()
                raise
        self._close()

    def wait_ready(self, timeout_s: float = START_DEADLINE_S) -> str:
        """Wait for the ready line and return it. Raises ProcessFailed if the process ends or stays silent."""
        return self.wait_line(self._ready, timeout_s)

    def wait_line(self, pattern: str | re.Pattern[str], timeout_s: float) -> str:
        """Wait for a line that matches, from either stream. Raises ProcessFailed."""
        found: list[str] = []

        def seen() -> bool:
            found[:] = [line for line in self.lines if re.search(pattern, line)]
            return bool(found) or not self._open_streams

        with self._news:
            in_time = self._news.wait_for(seen, timeout_s)
        if found:
            return found[0]
        what = "ended" if in_time else f"not ready after {timeout_s:g} s"
        raise ProcessFailed(f"{' '.join(self.command)}: {what}", self.output)

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = STOP_DEADLINE_S) -> int:
        """Send a signal and wait for the end. Returns the exit code; raises ProcessFailed if it goes on."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = STOP_DEADLINE_S) -> int:
        """Wait for the end. Returns the exit code; raises ProcessFailed if the process goes on."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(f"still runs after {timeout_s:g} s", self.output) from None
        self._close()
        return code

    def kill(self) -> None:
        """kill -9, and wait until the process is gone."""
        self.process.kill()
        self.process.wait()
        self._close()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._open_streams -= 1
            self._news.notify_all()

    def _close(self) -> None:
        """Wait for the readers to have all output, then close the pipes. A grandchild may still hold them."""
        for reader in self._readers:
            reader.join(5.0)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None and not any(reader.is_alive() for reader in self._readers):
                stream.close()


class StandaloneProcess(ServerProcess):
    """`cometmq standalone` on free ports. Once entered, `namesrv` and `brokers` say where it listens."""

    def __init__(self, data_dir: Path | str, *, brokers: int = 1, env: dict[str, str] | None = None) -> None:
        ports = ["--namesrv-port", "0", "--broker-port", "0"]
        command = [sys.executable, "-m", "cometmq", "standalone", "--data", str(data_dir), *ports]
        super().__init__([*command, "--brokers", str(brokers)], NAMESRV.pattern, env)
        self.broker_count = brokers
        self.namesrv = ""
        self.brokers: dict[str, str] = {}

    def wait_ready(self, timeout_s: float = START_DEADLINE_S) -> str:
        line = super().wait_ready(timeout_s)
        match = NAMESRV.match(line)
        assert match is not None
        self.namesrv = match.group(1)
        with self._news:
            self._news.wait_for(
                lambda: len(self._brokers()) == self.broker_count or not self._open_streams, timeout_s
            )
            self.brokers = self._brokers()
        if len(self.brokers) != self.broker_count:
            raise ProcessFailed(f"{len(self.brokers)} of {self.broker_count} brokers announced", self.output)
        return line

    def _brokers(self) -> dict[str, str]:
        """Broker name -> address, from the lines so far."""
        return dict(match.groups() for line in self.lines if (match := BROKER.match(line)))  # type: ignore[misc]
