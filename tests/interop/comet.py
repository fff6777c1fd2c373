"""Our name server and broker as processes on 127.0.0.1, with the same interface as Apache's in apache.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.interop.processes import HERE, Broker, Cluster, NameServer, Process, Server, write_settings


class CometServer(Server):
    """One of our commands, run with a settings file in RocketMQ's format."""

    def __init__(
        self,
        name: str,
        command: str,
        directory: Path,
        settings: dict[str, str],
        launcher: list[str] | None = None,
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        settings_file = write_settings(directory / f"{name}.conf", settings)
        line = [sys.executable, *(launcher or [str(HERE / "attached.py")]), command, "-c", settings_file]
        # The launcher imports the tests' packages from here, before those on the caller's own path.
        path = os.pathsep.join(filter(None, [str(HERE.parent.parent), os.environ.get("PYTHONPATH")]))
        self.process = Process(
            f"CometMQ {name}", line, directory / f"{name}.log", cwd=directory, env={"PYTHONPATH": path}
        )


class CometNamesrv(CometServer, NameServer):
    def __init__(
        self, directory: Path, *, port: int = 0, wait: bool = True, settings: dict[str, str] | None = None
    ) -> None:
        super().__init__("namesrv", "mqnamesrv", directory, self.place(directory, port) | (settings or {}))
        if wait:
            self.wait_ready()


class CometBroker(CometServer, Broker):
    """A broker with its store in ``store`` (default ``directory/store``); ``settings`` override all else."""

    def __init__(
        self,
        directory: Path,
        namesrv: str,
        *,
        name: str = "broker-a",
        port: int = 0,
        store: Path | None = None,
        settings: dict[str, str] | None = None,
        launcher: list[str] | None = None,
        wait: bool = True,
    ) -> None:
        merged = self.place(directory, namesrv, name, port, store) | (settings or {})
        super().__init__("broker", "mqbroker", directory, merged, launcher)
        if wait:
            self.wait_ready()


class CometCluster(Cluster):
    """Our servers, optionally with more settings."""

    def __init__(
        self,
        directory: Path,
        namesrv_settings: dict[str, str] | None = None,
        broker_settings: dict[str, str] | None = None,
    ) -> None:
        super().__init__(
            directory,
            CometNamesrv(directory, settings=namesrv_settings),
            lambda namesrv: CometBroker(directory, namesrv, settings=broker_settings),
        )
