"""Fixtures: the installed commands as processes isolated from the user's own servers and settings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store.planted import root, sound  # noqa: F401 - fixtures

from cometmq.testing import LocalBroker, ServerProcess, local_broker

BIN = Path(sys.executable).parent
READY = "boot success"

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Serve = Callable[..., ServerProcess]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory for the test, with its own list of running servers."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.setenv("COMETMQ_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    return path


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    with local_broker(tmp_path_factory.mktemp("cluster")) as broker:
        yield broker


@pytest.fixture
def namesrv(broker: LocalBroker, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment so that commands find the cluster."""
    monkeypatch.setenv("NAMESRV_ADDR", broker.namesrv)


@pytest.fixture
def run() -> Run:
    """Run an installed command to its end. Spark alone needs up to a minute to start on a busy machine."""

    def start(command: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        words = [str(BIN / command), *arguments]
        return subprocess.run(words, capture_output=True, text=True, input=text, timeout=240)

    return start


@pytest.fixture
def serve() -> Serve:
    """Create a server process of an installed command; entering the context waits until it is ready."""

    def make(command: str, *arguments: str, ready: str = READY) -> ServerProcess:
        return ServerProcess([str(BIN / command), *arguments], ready)

    return make


def write_conf(path: Path, **settings: object) -> str:
    """Write a properties file and return its path as a string."""
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return str(path)
