"""The two systems that are compared, each as a name server and a broker in processes of their own."""

from __future__ import annotations

import time
from pathlib import Path

from tests.interop import wire
from tests.interop.apache import ApacheBroker, ApacheNamesrv
from tests.interop.comet import CometBroker, CometNamesrv

APACHE = "Apache 4.9.7"
COMET = "CometMQ"
SYSTEMS = (APACHE, COMET)
APACHE_VERSION = "4.9.7"
# As much heap as the load can use; Apache's own scripts ask for 4 to 8 GiB, which this does not come near.
APACHE_JVM = ["-Xms512m", "-Xmx2g", "-XX:+UseG1GC"]
SETTINGS = {
    "mappedFileSizeCommitLog": str(1 << 30),
    "mappedFileSizeConsumeQueue": str(300_000 * 20),
    "maxHashSlotNum": "5000000",
    "maxIndexNum": "20000000",
}
"""Apache's defaults for both: the small files of the tests would be rolled over all the time."""


class Running:
    """One system, started; :meth:`stop` ends it and says nothing about its speed."""

    def __init__(self, system: str, directory: Path, *, sync_flush: bool = False) -> None:
        self.system = system
        settings = {**SETTINGS, "flushDiskType": "SYNC_FLUSH" if sync_flush else "ASYNC_FLUSH"}
        began = time.perf_counter()
        if system == APACHE:
            self.name_server: ApacheNamesrv | CometNamesrv = ApacheNamesrv(
                APACHE_VERSION, directory, wait=False
            )
            self.broker: ApacheBroker | CometBroker = ApacheBroker(
                APACHE_VERSION, directory, self.namesrv, settings=settings, jvm=APACHE_JVM, wait=False
            )
        else:
            self.name_server = CometNamesrv(directory, wait=False)
            self.broker = CometBroker(directory, self.namesrv, settings=settings, wait=False)
        self.ready_after = self._listening(began)
        self.name_server.wait_ready()
        self.broker.wait_ready()

    def _listening(self, began: float) -> float:
        """Seconds from the start of both processes until both accept connections."""
        for port in (self.name_server.port, self.broker.port):
            while not wire.listens(port):
                if time.perf_counter() - began > 60:
                    break  # wait_ready says what is wrong
                time.sleep(0.002)
        return time.perf_counter() - began

    @property
    def namesrv(self) -> str:
        return f"127.0.0.1:{self.name_server.port}"

    def stop(self) -> None:
        self.broker.kill()
        self.name_server.kill()
