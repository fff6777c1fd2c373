"""CometMQ's servers as separate processes, for tests of crashes and signals and for load on several cores."""

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

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
NAMESRV = re.compile(r"^\s*name server\s+(\S+)$")
BROKER = re.compile(r"^\s*(broker-[a-z0-9]+)\s+(\S+:\d+)\s")


class ProcessFailed(AssertionError):
    """A server process ended, was not ready in time, or did not stop in time.

    Attributes:
        what: Description of the failure.
        output: Everything that the process wrote to standard output and standard error.
    """

    def __init__(self, what: str, output: str) -> None:
        super().__init__(f"{what}\n{output}")
        self.what = what
        self.output = output

    def __reduce__(self) -> tuple[type[ProcessFailed], tuple[str, str]]:
        return type(self), (self.what, self.output)


class ServerProcess:
    """A server process whose output is collected.

    `with` waits until the server is ready, and stops it at the end.

    The process starts when the object is created.

    Args:
        command: Program and arguments.
        ready: Regular expression that a line of output matches once the server accepts connections.
        env: Environment variables in addition to those of this process.

    Attributes:
        command: Program and arguments.
        lines: Lines written to standard output and standard error so far, in the order of their arrival.
        process: The `subprocess.Popen` object.
    """

    def __init__(self, command: Sequence[str], ready: str, env: dict[str, str] | None = None) -> None:
        self.command = list(command)
        self.lines: list[str] = []
        self._ready = re.compile(ready)
        self._output_changed = threading.Condition()
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
        """Process id of the server."""
        return self.process.pid

    @property
    def output(self) -> str:
        """All lines of standard output and standard error so far, in the order of their arrival."""
        with self._output_changed:
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

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Wait for the line of output that reports readiness.

        Args:
            timeout_s: Maximum time to wait, in seconds. Default: 60.

        Returns:
            The line.

        Raises:
            ProcessFailed: The process ended, or wrote no such line in time.
        """
        return self.wait_line(self._ready, timeout_s)

    def wait_line(self, pattern: str | re.Pattern[str], timeout_s: float) -> str:
        """Wait for a line that matches a pattern, from standard output or standard error.

        Args:
            pattern: Regular expression that is searched in each line, including earlier ones.
            timeout_s: Maximum time to wait, in seconds.

        Returns:
            The first line that matches.

        Raises:
            ProcessFailed: The process ended, or wrote no such line in time.
        """
        matches: list[str] = []

        def matched() -> bool:
            matches[:] = [line for line in self.lines if re.search(pattern, line)]
            return bool(matches) or not self._open_streams

        with self._output_changed:
            in_time = self._output_changed.wait_for(matched, timeout_s)
        if matches:
            return matches[0]
        what = "ended" if in_time else f"not ready after {timeout_s:g} s"
        raise ProcessFailed(f"{' '.join(self.command)}: {what}", self.output)

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send a signal to the process and wait for its end.

        Args:
            signum: Number of the signal. Default: SIGTERM.
            timeout_s: Maximum time to wait, in seconds. Default: 30.

        Returns:
            The exit code.

        Raises:
            ProcessFailed: The process did not end in time.
        """
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the end of the process.

        Args:
            timeout_s: Maximum time to wait, in seconds. Default: 30.

        Returns:
            The exit code.

        Raises:
            ProcessFailed: The process did not end in time.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(f"the process is still running after {timeout_s:g} s", self.output) from None
        self._close()
        return code

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self.process.kill()
        self.process.wait()
        self._close()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._output_changed:
                self.lines.append(line.rstrip("\n"))
                self._output_changed.notify_all()
        with self._output_changed:
            self._open_streams -= 1
            self._output_changed.notify_all()

    def _close(self) -> None:
        """Wait for all output, then close the pipes, unless a grandchild still holds them open."""
        for reader in self._readers:
            reader.join(5.0)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None and not any(reader.is_alive() for reader in self._readers):
                stream.close()


class StandaloneProcess(ServerProcess):
    """A name server and brokers as one process (`cometmq standalone`) on free ports.

    Args:
        data_dir: Directory for the brokers' files.
        brokers: Number of brokers. Default: 1.
        env: Environment variables in addition to those of this process.

    Attributes:
        namesrv: Address ("host:port") of the name server, once the process is ready.
        brokers: Addresses of the brokers by broker name, once the process is ready.
    """

    def __init__(self, data_dir: Path | str, *, brokers: int = 1, env: dict[str, str] | None = None) -> None:
        ports = ["--namesrv-port", "0", "--broker-port", "0"]
        command = [sys.executable, "-m", "cometmq", "standalone", "--data", str(data_dir), *ports]
        super().__init__([*command, "--brokers", str(brokers)], NAMESRV.pattern, env)
        self.broker_count = brokers
        self.namesrv = ""
        self.brokers: dict[str, str] = {}

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        line = super().wait_ready(timeout_s)
        match = NAMESRV.match(line)
        assert match is not None
        self.namesrv = match.group(1)
        with self._output_changed:
            self._output_changed.wait_for(
                lambda: len(self._brokers()) == self.broker_count or not self._open_streams, timeout_s
            )
            self.brokers = self._brokers()
        if len(self.brokers) != self.broker_count:
            raise ProcessFailed(f"{len(self.brokers)} of {self.broker_count} brokers are ready", self.output)
        return line

    def _brokers(self) -> dict[str, str]:
        """Return the addresses of the brokers by broker name, as the process has printed them so far."""
        return dict(match.groups() for line in self.lines if (match := BROKER.match(line)))  # type: ignore[misc]
