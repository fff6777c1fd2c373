"""Shared servers and clients: JVMs take seconds to start, so one of each kind serves the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.interop.apache import ApacheCluster
from tests.interop.driver import Driver


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


@pytest.fixture
def own_java_client(tmp_path: Path) -> Iterator[Callable[[str], Driver]]:
    """``own_java_client("4.9.8")``: a JVM of one test alone, for tests that kill it."""
    started: list[Driver] = []

    def client(version: str) -> Driver:
        started.append(Driver(version, tmp_path / f"java-{len(started)}"))
        return started[-1]

    yield client
    for each in started:
        if each.process.running:
            each.kill()
