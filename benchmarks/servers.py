"""A name server and a broker in separate processes: ours or Apache's."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.interop import wire
from tests.interop.apache import ApacheBroker, ApacheNamesrv
from tests.interop.comet import CometBroker, CometNamesrv

from benchmarks.processes import cpu_seconds
from benchmarks.turns import Figures

APACHE = "Apache 4.9.7"
COMET = "CometMQ"
SYSTEMS = (APACHE, COMET)
APACHE_VERSION = "4.9.7"
# The heap is as large as the load can use. Apache's own scripts set 4 to 8 GiB, far more than needed here.
APACHE_JVM = ["-Xms512m", "-Xmx2g", "-XX:+UseG1GC"]
SETTINGS = {
    "mappedFileSizeCommitLog": str(1 << 30),
    "mappedFileSizeConsumeQueue": str(300_000 * 20),
    "maxHashSlotNum": "5000000",
    "maxIndexNum": "20000000",
}
"""Apache's default file sizes for both: the small files of the tests would be replaced constantly."""
FEW = (["Few"], 8)
MANY = ([f"Many-{number:04d}" for number in range(1000)], 10)
"""Topics, and number of queues of each."""


class Running:
    """A running system. `store` may already have topics (`write_topics`)."""

    def __init__(
        self,
        system: str,
        directory: Path,
        *,
        sync_flush: bool = False,
        launcher: list[str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.system = system
        self.directory = directory
        self._settings = {**SETTINGS, "flushDiskType": "SYNC_FLUSH" if sync_flush else "ASYNC_FLUSH"}
        self._settings |= settings or {}
        self._launcher = launcher
        began = time.perf_counter()
        self.name_server: ApacheNamesrv | CometNamesrv = (
            ApacheNamesrv(APACHE_VERSION, directory, wait=False)
            if system == APACHE
            else CometNamesrv(directory, wait=False)
        )
        self.broker = self._broker()
        wait_listening(self.name_server.port)
        wait_listening(self.broker.port)
        self.ready_after = time.perf_counter() - began
        self.name_server.wait_ready()
        self.broker.wait_ready()

    def _broker(self) -> ApacheBroker | CometBroker:
        if self.system == APACHE:
            return ApacheBroker(
                APACHE_VERSION,
                self.directory,
                self.namesrv,
                settings=self._settings,
                jvm=APACHE_JVM,
                wait=False,
            )
        return CometBroker(
            self.directory, self.namesrv, settings=self._settings, launcher=self._launcher, wait=False
        )

    def start_broker(self) -> Figures:
        """Restart the broker; return seconds and CPU seconds until it listens."""
        began = time.perf_counter()
        self.broker = self._broker()
        wait_listening(self.broker.port)
        figures = {"seconds": time.perf_counter() - began, "cpu_s": cpu_seconds(self.pid)}
        self.broker.wait_ready()
        return figures

    @property
    def namesrv(self) -> str:
        return f"127.0.0.1:{self.name_server.port}"

    @property
    def pid(self) -> int:
        return self.broker.pid

    def stop(self) -> None:
        self.broker.stop()
        self.name_server.kill()


def wait_listening(port: int) -> None:
    """Wait until a port is open; after two minutes `wait_ready` raises an error."""
    began = time.perf_counter()
    while not wire.listens(port) and time.perf_counter() - began < 120:
        time.sleep(0.002)


def write_topics(store: Path, topics: Sequence[str], queues: int) -> None:
    """Write the topic table that the broker loads at its first start."""
    table = {
        topic: {"topicName": topic, "readQueueNums": queues, "writeQueueNums": queues, "perm": 6}
        for topic in topics
    }
    (store / "config").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"dataVersion": {"timestamp": 1, "counter": 1}, "topicConfigTable": table})
    (store / "config" / "topics.json").write_text(text)
