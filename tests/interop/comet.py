"""Our name server and broker as processes on 127.0.0.1, with the same face as Apache's in apache.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.interop import wire
from tests.interop.apache import SMALL_STORE
from tests.interop.processes import HERE, Cluster, Process, broker_port, free_port


class CometServer:
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
        settings_file = directory / f"{name}.conf"
        settings_file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        line = [sys.executable, *(launcher or [str(HERE / "attached.py")]), command, "-c", str(settings_file)]
        # Where a launcher finds these packages, before whatever the caller's own path says.
        path = os.pathsep.join(filter(None, [str(HERE.parent.parent), os.environ.get("PYTHONPATH")]))
        self.process = Process(
            f"CometMQ {name}", line, directory / f"{name}.log", cwd=directory, env={"PYTHONPATH": path}
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> int:
        return self.process.stop()

    def kill(self) -> int:
        return self.process.kill()


class CometNamesrv(CometServer):
    def __init__(self, directory: Path, *, port: int = 0, wait: bool = True) -> None:
        self.port = port or free_port()
        settings = {
            "listenPort": str(self.port),
            "kvConfigPath": str(directory / "namesrv" / "kvConfig.json"),
        }
        super().__init__("namesrv", "mqnamesrv", directory, settings)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        self.process.wait_ready("name server listening", lambda: wire.listens(self.port))


class CometBroker(CometServer):
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
        self.port = port or broker_port()
        self.name = name
        self.store = store or directory / "store"
        self.namesrv_port = int(namesrv.split(";")[0].rsplit(":", 1)[1])
        merged = {
            "brokerClusterName": "DefaultCluster",
            "brokerName": name,
            "brokerId": "0",
            "brokerIP1": "127.0.0.1",
            "listenPort": str(self.port),
            "namesrvAddr": namesrv,
            "storePathRootDir": str(self.store),
            "storePathCommitLog": str(self.store / "commitlog"),
            **SMALL_STORE,
            **(settings or {}),
        }
        super().__init__("broker", "mqbroker", directory, merged, launcher)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        self.process.wait_ready("broker listening", lambda: wire.listens(self.port))
        self.process.wait_ready("broker registered", lambda: wire.knows_broker(self.namesrv_port, self.name))


class CometCluster(Cluster):
    """Our servers."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, CometNamesrv(directory), lambda namesrv: CometBroker(directory, namesrv))
