"""Fixtures: shared servers and clients.

JVMs take seconds to start, so one of each kind serves the session.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from tests.interop.apache import ApacheCluster, ApacheNamesrv
from tests.interop.comet import CometCluster
from tests.interop.driver import Driver
from tests.interop.grpc_clients import fetch_client, selected_cases
from tests.interop.jars import (
    CLIENT_VERSIONS,
    NOT_FETCHED,
    SERVER_VERSIONS,
    client_jars,
    server_jars,
)
from tests.interop.mqadmin import AdminShell
from tests.interop.processes import QUICK
from tests.interop.space import Cluster, Space


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch jars and packages before the first test, whose time limit a slow registry must not use up."""
    here = Path(__file__).parent
    if session.config.option.collectonly or not any(here in item.path.parents for item in session.items):
        return
    # The representative tests of `make test` need only the older versions.
    needed = slice(1 if session.config.getoption("tier") == "test" else None)
    with NOT_FETCHED:
        for version in SERVER_VERSIONS[needed]:
            server_jars(version)
        for version in CLIENT_VERSIONS[needed]:
            client_jars(version)
    # These take minutes, and their tests come late.
    clients = selected_cases(session.items)
    threading.Thread(target=_fetch_clients, args=(clients,), name="fetch", daemon=True).start()


def _fetch_clients(clients: Iterable[str]) -> None:
    for client in clients:
        with NOT_FETCHED:
            fetch_client(client)


@pytest.fixture(scope="session")
def apache_clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ApacheCluster]]:
    """``apache_clusters("4.9.7")``: its running servers, started at first use."""
    running: dict[str, ApacheCluster] = {}

    def cluster(version: str) -> ApacheCluster:
        if version not in running:
            running[version] = ApacheCluster(version, tmp_path_factory.mktemp(f"apache-{version}"))
        return running[version]

    yield cluster
    for each in running.values():
        each.kill()


@pytest.fixture(scope="session")
def apache_4(apache_clusters: Callable[[str], ApacheCluster]) -> ApacheCluster:
    """Apache's name server and broker 4.9.7."""
    return apache_clusters("4.9.7")


@pytest.fixture(scope="session")
def apache_5(apache_clusters: Callable[[str], ApacheCluster]) -> ApacheCluster:
    """Apache's name server and broker 5.5.0."""
    return apache_clusters("5.5.0")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a name server of 4.9.7 for the brokers of a test; return its address."""
    server = ApacheNamesrv("4.9.7", tmp_path_factory.mktemp("names"))
    yield f"127.0.0.1:{server.port}"
    server.kill()


@pytest.fixture(scope="session")
def java_clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Driver]]:
    """``java_clients("4.9.8")``: a running JVM with Apache's client of that version, started at first use."""
    running: dict[str, Driver] = {}

    def client(version: str) -> Driver:
        if version not in running:
            running[version] = Driver(version, tmp_path_factory.mktemp(f"java-{version}"))
        return running[version]

    yield client
    for each in running.values():
        each.stop()


@pytest.fixture(scope="session")
def admin_shells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], AdminShell]]:
    """``admin_shells("4.9.7")``: Apache's mqadmin of that version in one JVM, started at first use."""
    running: dict[str, AdminShell] = {}

    def shell(version: str) -> AdminShell:
        if version not in running:
            running[version] = AdminShell(version, tmp_path_factory.mktemp(f"mqadmin-{version}"))
        return running[version]

    yield shell
    for each in running.values():
        each.stop()


@pytest.fixture
def own_java_client(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """``own_java_client("4.9.8", "-Dflag", …)``: a JVM for one test, which may kill it or set flags."""
    started: list[Driver] = []

    def client(version: str, *flags: str) -> Driver:
        directory = tmp_path / f"java-{len(started)}"
        started.append(Driver(version, directory, jvm=["-Xmx256m", *QUICK, *flags]))
        return started[-1]

    yield client
    for each in started:
        if each.process.running:
            each.kill()


def instead_of_ours() -> str | None:
    """The version of Apache's servers that replace ours in this run, if any."""
    return os.environ.get("COMETMQ_INTEROP_SERVER")


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, apache_clusters: Callable[[str], ApacheCluster]
) -> Iterator[Cluster]:
    """The servers under test: by default our name server and broker as processes.

    ``COMETMQ_INTEROP_SERVER=4.9.7`` (or ``5.5.0``) replaces them by Apache's, to check the tests themselves:
    a test should pass with Apache's own servers. With 5.5.0 clients some fail, because 4.9.7 stores the key
    of a batch in each of its messages and omits properties that consumers need for traces.
    """
    version = instead_of_ours()
    if version:
        yield apache_clusters(version)
        return
    ours = CometCluster(tmp_path_factory.mktemp("comet"))
    yield ours
    ours.stop()


@pytest.fixture(params=CLIENT_VERSIONS)
def java(request: pytest.FixtureRequest, java_clients: Callable[[str], Driver]) -> Driver:
    """Apache's Java client in each of its versions."""
    return java_clients(request.param)


@pytest.fixture
def space(java: Driver, cluster: Cluster) -> Iterator[Space]:
    """Names of one test on the shared servers, and clients that stop with the test."""
    room = Space(java, cluster)
    yield room
    room.close()
