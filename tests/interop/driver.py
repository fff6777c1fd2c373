"""Python's side of the Java driver (java/driver): Apache's Java client as a remote-controlled process."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.interop.jars import client_jars, java_tool, server_jars
from tests.interop.processes import OPENED, PATIENCE_S, QUICK, Process, ProcessError, driver_classes

Json = dict[str, Any]


class JavaError(Exception):
    """An exception of the driven client: class name, message, RocketMQ's response code (-1 if none)."""

    def __init__(self, error: str, message: str, code: int) -> None:
        super().__init__(error, message, code)
        self.error = error
        self.message = message
        self.code = code


def message(
    topic: str,
    body: bytes,
    *,
    tags: str | None = None,
    keys: str | None = None,
    delay: int = 0,
    flag: int = 0,
    properties: dict[str, str] | None = None,
    wait: bool | None = None,
    **setters: int,
) -> Json:
    """Build a message for :meth:`Driver.send`.

    `setters` are methods of 5.x's messages: ``setDelayTimeMs=1000``.
    """
    out: Json = {
        "topic": topic,
        "body": base64.b64encode(body).decode(),
        "delay": delay,
        "flag": flag,
        "properties": properties or {},
        **setters,
    }
    for name, value in (("tags", tags), ("keys", keys), ("wait", wait)):
        if value is not None:
            out[name] = value
    return out


def body_of(received: Json) -> bytes:
    return base64.b64decode(received["body"])


class Deliveries:
    """Deliveries reported by push consumers, by consumer, in order of arrival."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._delivered: dict[str, list[Json]] = defaultdict(list)

    def report(self, consumer: str, messages: list[Json], **call: Any) -> None:
        """Record a listener call: ``failed``, and ``began`` and ``ended`` in monotonic ns."""
        with self._changed:
            self._delivered[consumer] += [{**each, **call} for each in messages]
            self._changed.notify_all()

    def delivered(self, consumer: str) -> list[Json]:
        """Return every delivery to a push consumer so far, including redeliveries and failed ones."""
        with self._changed:
            return list(self._delivered[consumer])

    def wait_delivered(
        self, consumer: str, enough: int | Callable[[list[Json]], object], timeout_s: float = PATIENCE_S
    ) -> list[Json]:
        """Wait for a number of deliveries or for a condition over them.

        Raises AssertionError after the timeout.
        """
        check = enough if callable(enough) else lambda got: len(got) >= enough
        with self._changed:
            if not self._changed.wait_for(lambda: check(self._delivered[consumer]), timeout_s):
                got = self._delivered[consumer]
                count = len(got)
                raise AssertionError(f"{consumer}: {count} deliveries in {timeout_s:g} s, wanted {enough}")
            return list(self._delivered[consumer])


class RemoteClient(Deliveries):
    """A process with a client that takes commands as lines of JSON. Every call blocks until its response."""

    def __init__(
        self, name: str, command: list[str], directory: Path, env: dict[str, str] | None = None
    ) -> None:
        super().__init__()
        directory.mkdir(parents=True, exist_ok=True)
        self.process = Process(
            name, command, directory / "driver.log", cwd=directory, env=env, stdout=subprocess.PIPE
        )
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, name=f"answers of {name}", daemon=True)
        self._reader.start()
        self.call("ping")

    def call(self, op: str, *, answer_within_s: float = 120.0, **arguments: Any) -> Any:
        """Run a command.

        Raises JavaError for an exception of the client and ProcessError if its process has ended.
        """
        return self.start(op, **arguments).result(answer_within_s)

    def start(self, op: str, **arguments: Any) -> Future[Any]:
        """Send a command without waiting for its response."""
        number = next(self._ids)
        future: Future[Any] = Future()
        line = json.dumps({"id": number, "op": op, **arguments}) + "\n"
        stdin = self.process.popen.stdin
        assert stdin is not None
        with self._changed:
            self._waiting[number] = future
            try:
                stdin.write(line.encode())
                stdin.flush()
            except (BrokenPipeError, ValueError):
                raise ProcessError(f"{self.process.name} is gone:\n{self.process.log_tail()}") from None
        return future

    def _read(self) -> None:
        stdout = self.process.popen.stdout
        assert stdout is not None
        for raw in stdout:
            line = json.loads(raw)
            if "event" in line:
                call = {name: line[name] for name in ("failed", "began", "ended") if name in line}
                self.report(line["consumer"], line["messages"], **call)
                continue
            with self._changed:
                future = self._waiting.pop(line["id"])
            if line["ok"]:
                future.set_result(line["result"])
            else:
                future.set_exception(JavaError(line["error"], line["message"], line["code"]))
        stdout.close()
        with self._changed:
            left, self._waiting = self._waiting, {}
            self._changed.notify_all()
        for future in left.values():
            future.set_exception(ProcessError(f"{self.process.name} ended in the middle of a command"))

    @property
    def running(self) -> bool:
        return self.process.running

    def stop(self) -> None:
        """Close standard input, which ends the process, and wait for it."""
        stdin = self.process.popen.stdin
        if stdin is not None and self.process.running:
            stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.popen.wait(10)
        self.process.stop(10)
        self._reader.join(10)

    def kill(self) -> None:
        """Kill the process: its clients do not unregister from any broker."""
        self.process.kill()
        self._reader.join(10)


class Driver(RemoteClient):
    """A JVM with Apache's client of one version."""

    def __init__(self, version: str, directory: Path, *, jvm: list[str] | None = None) -> None:
        self.version = version
        # 4.9 has its signatures in a separate jar, and 5.x in the client's jar.
        own = [
            jar for jar in server_jars("4.9.7") if jar.name.startswith(("rocketmq-acl-", "commons-codec-"))
        ]
        jars = [*client_jars(version), *(own if version.startswith("4.") else [])]
        class_path = os.pathsep.join(map(str, [driver_classes(jars), *jars]))
        flags = jvm if jvm is not None else ["-Xmx512m", *QUICK]
        command = [
            java_tool("java"),
            *OPENED,
            "-XX:-UsePerfData",
            "-Dfile.encoding=UTF-8",
            "-Drocketmq.client.rebalance.waitInterval=1000",
            *flags,  # the last flag of a kind is effective
            "-Djava.net.preferIPv4Stack=true",
            f"-Duser.home={directory}",
            f"-Drocketmq.client.logRoot={directory / 'logs'}",
            f"-Drocketmq.client.localOffsetStoreDir={directory / 'offsets'}",
            "-cp",
            class_path,
            "Driver",
        ]
        super().__init__(f"Java client {version}", command, directory)

    def send(self, producer: str, messages: list[Json], mode: str = "sync", **arguments: Any) -> list[Json]:
        result: list[Json] = self.call("send", name=producer, mode=mode, messages=messages, **arguments)
        return result
