"""Apache's clients of 5.x, which speak gRPC, as processes under the same commands."""

from __future__ import annotations

import base64
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.interop import wire
from tests.interop.cargo import rust_program
from tests.interop.comet import CometBroker, CometNamesrv
from tests.interop.driver import Json, RemoteClient, body_of
from tests.interop.jars import java_tool, resolve
from tests.interop.npm import node, npm_package
from tests.interop.processes import HERE, QUICK, compiled
from tests.kit.waiting import PATIENCE_S, wait_until
from tests.ports import free_port

FEATURES: dict[str, frozenset[str]] = {
    "python-5.1.2": frozenset({"change", "priority", "push", "recall", "verification"}),
    "java-5.2.0": frozenset({"change", "priority", "push", "recall"}),
    "java-5.0.8": frozenset({"change", "push"}),
    "node-1.0.8": frozenset({"change", "priority", "push", "recall", "verification"}),
    "rust-5.0.0": frozenset(),
}
"""The clients, with the features that not all of them have (verification: of the server's certificate)."""
TLS_BY_DEFAULT = "java-5.2.0"
"""The client that uses TLS in all tests, as by default. The broker makes a certificate for itself."""
AWAIT_S = 5
INVISIBLE_S = 30
_numbers = itertools.count(1)


def grpc_jars(version: str) -> list[Path]:
    """Return the class path of Apache's Java client of 5.x of one version."""
    return resolve([("rocketmq-client-java", version)])


def selected_cases(items: Iterable[pytest.Item]) -> dict[str, list[Any]]:
    """Return the rows of test_grpc_clients.py among selected tests: the cases of each client."""
    found: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        row = getattr(item, "callspec", None)
        if row is not None and item.path.name == "test_grpc_clients.py":
            found[row.params["client"]].append(row.params["case"])
    return found


def fetch_client(client: str) -> None:
    """Fetch what the process of one of the clients needs from a registry, and compile it."""
    language, _, version = client.partition("-")
    if language == "java":
        grpc_jars(version)
    elif language == "node":
        npm_package("rocketmq-client-nodejs", version)
    elif language == "rust":
        rust_program(HERE / "rust")


def start_client(client: str, directory: Path, authority: Path) -> RemoteClient:
    """Start the process of one of the clients.

    Args:
        client: A key of ``FEATURES``.
        directory: The working directory of the process.
        authority: The certificates that clients trust which verify servers.
    """
    language, _, version = client.partition("-")
    # The clients write their logs under the home directory.
    env = {"HOME": str(directory), "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(authority)}
    if language == "python":
        return RemoteClient(client, [sys.executable, str(HERE / "grpc_driver.py")], directory, env)
    if language == "node":
        packages = npm_package("rocketmq-client-nodejs", version)
        command = [*node(), str(HERE / "node" / "grpc_driver.js"), str(packages)]
        return RemoteClient(client, command, directory, env)
    if language == "rust":  # Cargo.toml names the version
        return RemoteClient(client, [str(rust_program(HERE / "rust"))], directory, env)
    return start_java(version, directory, ["-Xmx256m", *QUICK])


def start_java(version: str, directory: Path, jvm: list[str]) -> RemoteClient:
    """Start the process of a Java client, with flags of its JVM."""
    jars = grpc_jars(version)
    sources = [
        *sorted((HERE / "java" / "grpc").glob("*.java")),
        *(HERE / "java" / "driver" / name for name in ("Args.java", "Json.java")),
    ]
    class_path = os.pathsep.join(map(str, [compiled("grpc", sources, jars), *jars]))
    command = [java_tool("java"), *jvm, "-XX:-UsePerfData", f"-Duser.home={directory}"]
    return RemoteClient(f"java-{version}", [*command, "-cp", class_path, "GrpcDriver"], directory)


class GrpcServers:
    """Our name server and our broker with a gRPC port, which may be killed and started again."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self._directory = directory
        self._grpc_port, self._broker_port = free_port(), free_port()
        self._settings = {"enablePropertyFilter": "true", "grpcPort": str(self._grpc_port), **settings}
        self._names = CometNamesrv(directory)
        self.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._grpc_port}"

    @property
    def broker_addr(self) -> str:
        return f"127.0.0.1:{self._broker_port}"

    @property
    def namesrv(self) -> str:
        return f"127.0.0.1:{self._names.port}"

    def start(self) -> None:
        self.broker = CometBroker(
            self._directory, self.namesrv, port=self._broker_port, settings=self._settings
        )
        self.broker.process.wait_ready("gRPC port open", lambda: wire.listens(self._grpc_port))

    def stop(self) -> None:
        self.broker.stop()
        self._names.stop()


class Program:
    """The clients of one test in a process of Apache's client, and the test's topic and group."""

    def __init__(self, client: str, remote: RemoteClient, servers: GrpcServers) -> None:
        self._tls = client == TLS_BY_DEFAULT
        self.remote = remote
        self.servers = servers
        number = next(_numbers)
        self.topic, self.group = f"T{number}", f"g{number}"
        self._open: list[str] = []

    def producer(self, **options: Any) -> str:
        return self.start("producer", topics=[self.topic], **options)

    def simple(self, **options: Any) -> str:
        return self.start(
            "simple", **{"group": self.group, "topic": self.topic, "await_s": AWAIT_S, **options}
        )

    def push(self, failing: Iterable[bytes] = (), kind: str = "push", **options: Any) -> str:
        bodies = [base64.b64encode(each).decode() for each in failing]
        return self.start(kind, group=self.group, topic=self.topic, failing=bodies, **options)

    def start(self, kind: str, **options: Any) -> str:
        name = f"{kind}{next(_numbers)}"
        options = {"endpoint": self.servers.endpoint, "tls": self._tls, **options}
        self.remote.call(f"{kind}_start", name=name, **options)
        self._open.append(name)
        return name

    def close(self) -> None:
        """Stop all clients."""
        for name in reversed(self._open):
            self.remote.call("stop", name=name)

    def message(self, body: bytes, **options: Any) -> Json:
        return {"topic": self.topic, "body": base64.b64encode(body).decode(), **options}

    def send(self, producer: str, body: bytes, *, recallable: bool = False, **options: Any) -> Json:
        message = self.message(body, **options)
        receipt: Json = self.remote.call("send", name=producer, message=message, recallable=recallable)
        return receipt

    def receive(self, consumer: str, count: int = 32, invisible_s: int = INVISIBLE_S) -> list[Json]:
        found: list[Json] = self.remote.call("receive", name=consumer, count=count, invisible_s=invisible_s)
        return found

    def receive_until(
        self,
        consumer: str,
        enough: Callable[[list[Json]], bool],
        *,
        ack: bool = True,
        invisible_s: int = INVISIBLE_S,
    ) -> list[Json]:
        """Receive until `enough` of all received messages is true; return them in order of arrival."""
        found: list[Json] = []

        def receive() -> bool:
            part = self.receive(consumer, invisible_s=invisible_s)
            found.extend(part)
            if ack:
                for each in part:
                    self.ack(consumer, each)
            return enough(found)

        wait_until(f"the expected messages at {consumer}, with {found}", receive, PATIENCE_S)
        return found

    def ack(self, consumer: str, message: Json) -> None:
        self.remote.call("ack", name=consumer, number=message["number"])

    def change(self, consumer: str, message: Json, invisible_s: int) -> None:
        self.remote.call("change", name=consumer, number=message["number"], invisible_s=invisible_s)


def has(*bodies: bytes) -> Callable[[list[Json]], bool]:
    """Return a condition: each of the bodies is among the messages."""
    return lambda found: {body_of(each) for each in found} >= set(bodies)
