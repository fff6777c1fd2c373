"""Java processes of the interoperability tests: compilation, start, monitoring and stop."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from tests.interop import wire
from tests.interop.jars import java_tool, locked
from tests.ports import free_port

HERE = Path(__file__).parent
PATIENCE_S = 90.0
"""Limit, in seconds, for a wait on a busy machine.

A long limit costs nothing, as a wait ends with its event.
"""
OPENED = [
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
]
"""Flags that open the packages of Java 17 that RocketMQ's classes, written for Java 8, access."""
QUICK = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
"""Flags for a short-lived JVM: its start uses 0.8 of the CPU time."""


class ProcessError(Exception):
    """A process that ended or did not respond; the text contains the end of its output."""


def compiled(name: str, sources: Sequence[Path], class_path: Sequence[Path]) -> Path:
    """Return the directory of our compiled Java sources; compile once per content and class path."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(os.pathsep.join(map(str, class_path)).encode())
    with locked("javac") as directory:
        target = directory / f"classes-{name}-{digest.hexdigest()[:16]}"
        if target.exists():
            return target
        making = directory / f"making-{name}"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        command = [java_tool("javac"), "-nowarn", "-Xlint:-options", "-d", str(making)]
        if class_path:
            command += ["-cp", os.pathsep.join(map(str, class_path))]
        done = subprocess.run(
            command + [str(each) for each in sources], capture_output=True, text=True, timeout=300
        )
        if done.returncode != 0:
            raise ProcessError(f"javac refused {name}:\n{done.stdout}{done.stderr}")
        making.rename(target)
        return target


def launcher_classes() -> Path:
    return compiled("launcher", sorted((HERE / "java" / "launcher").glob("*.java")), [])


def driver_classes(jars: Sequence[Path]) -> Path:
    return compiled("driver", sorted((HERE / "java" / "driver").glob("*.java")), jars)


def side_by_side(work: Callable[..., object], cases: Sequence[tuple[Any, ...]]) -> None:
    """Run cases concurrently that mostly wait for other processes; raise all their failures together."""
    with ThreadPoolExecutor(len(cases)) as threads:
        running = [(case, threads.submit(work, *case)) for case in cases]
    failures = []
    for case, future in running:
        failure = future.exception()
        if failure is not None:
            failure.add_note(f"the case {case}")
            failures.append(failure)
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} of {len(cases)} cases failed", failures)


class Process:
    """A child process with its output in a file. The end of its standard input, which stays open, ends it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        stdout: int | None = None,
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._output = open(log, "ab")  # noqa: SIM115 -- lives as long as the process
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout if stdout is not None else self._output,
            stderr=self._output,
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def log_tail(self, size: int = 4000) -> str:
        return self.log.read_bytes()[-size:].decode(errors="replace")

    def wait_ready(self, what: str, check: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        """Poll ``check`` until it is true.

        If the process ends or the time is over, kill it and raise an error.
        """
        deadline = time.monotonic() + timeout_s
        while not check():
            problem = ""
            if not self.running:
                problem = f"ended with {self.popen.returncode}"
            elif time.monotonic() > deadline:
                problem = f"{what} not within {timeout_s:g} s"
            if problem:
                self.kill()
                raise ProcessError(f"{self.name}: {problem}\n{self.log_tail()}")
            time.sleep(0.05)

    def stop(self, timeout_s: float = 30.0) -> int:
        """Stop the process with SIGTERM, and with SIGKILL after the timeout; return the exit code."""
        if self.running:
            self.popen.terminate()
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        return self._closed()

    def kill(self) -> int:
        """Kill the process with SIGKILL: it runs no shutdown hook and flushes no buffer."""
        self.popen.kill()
        self.popen.wait()
        return self._closed()

    def _closed(self) -> int:
        if self.popen.stdin is not None:
            try:
                self.popen.stdin.close()
            except BrokenPipeError:
                pass  # the child has ended with an unsent line in the pipe
        self._output.close()
        return self.popen.returncode


def write_settings(path: Path, settings: dict[str, str]) -> str:
    """Write a settings file in RocketMQ's format; return its path as a string."""
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return str(path)


class Server:
    """A server in its own directory; leaving the context stops it cleanly."""

    process: Process
    port: int

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> int:
        return self.process.stop()

    def kill(self) -> int:
        return self.process.kill()


class NameServer(Server):
    """The common part of Apache's name server and ours."""

    def place(self, directory: Path, port: int) -> dict[str, str]:
        """Choose the port and return the settings that contain it."""
        self.port = port or free_port()
        return {
            "listenPort": str(self.port),
            "kvConfigPath": str(directory / "namesrv" / "kvConfig.json"),
        }

    def wait_ready(self) -> None:
        self.process.wait_ready("name server listening", lambda: wire.listens(self.port))


class Broker(Server):
    """The common part of Apache's broker and ours."""

    def place(
        self, directory: Path, namesrv: str, name: str, port: int, store: Path | None
    ) -> dict[str, str]:
        """Choose port and store; return their settings, with our standalone server's file sizes."""
        self.port = port or free_port()
        self.name = name
        self.store = store or directory / "store"
        self.namesrv_port = int(namesrv.split(";")[0].rsplit(":", 1)[1])
        return {
            "brokerClusterName": "DefaultCluster",
            "brokerName": name,
            "brokerId": "0",
            "brokerIP1": "127.0.0.1",
            "listenPort": str(self.port),
            "namesrvAddr": namesrv,
            "storePathRootDir": str(self.store),
            "storePathCommitLog": str(self.store / "commitlog"),
            "mappedFileSizeCommitLog": str(64 * 1024 * 1024),
            "mappedFileSizeConsumeQueue": str(3000 * 20),
            "maxHashSlotNum": "50000",
            "maxIndexNum": "200000",
            # With the default, tests would wait a minute for a transaction check.
            "transactionCheckInterval": "1000",
            "transactionTimeOut": "1000",
        }

    def wait_ready(self) -> None:
        self.process.wait_ready("broker listening", lambda: wire.listens(self.port))
        self.process.wait_ready("broker registered", lambda: wire.knows_broker(self.namesrv_port, self.name))


class Cluster:
    """A name server and a broker; ``namesrv`` is the address for clients."""

    def __init__(self, directory: Path, name_server: Any, make_broker: Callable[[str], Any]) -> None:
        self.directory = directory
        self.name_server = name_server
        self.namesrv = f"127.0.0.1:{name_server.port}"
        try:
            self.broker = make_broker(self.namesrv)
        except BaseException:
            name_server.kill()
            raise

    @property
    def broker_addr(self) -> str:
        return f"127.0.0.1:{self.broker.port}"

    def stop(self) -> None:
        self.broker.stop()
        self.name_server.stop()

    def kill(self) -> None:
        self.broker.kill()
        self.name_server.kill()
