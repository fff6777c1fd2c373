"""Servers as separate processes, for tests that damage them."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from cometmq.testing.process import START_TIMEOUT_S
from cometmq.testing.process import ServerProcess as Process

NAMESRV = """
import asyncio, sys
from cometmq import remoting
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer

async def main():
    directory = sys.argv[1]
    server = NameServer(NamesrvConfig.from_properties({
        "listenPort": "0", "bindAddress": "127.0.0.1",
        "kvConfigPath": directory + "/kvConfig.json", "configStorePath": directory + "/namesrv.properties",
    }))
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

remoting.run(main())
"""

# Names in malformed frames must not create topics or groups, since memory would then grow legitimately.
BROKER = """
import asyncio, sys
from cometmq import remoting
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.server import Broker
from cometmq.standalone import small_files

async def main():
    directory = sys.argv[1]
    server = Broker(BrokerConfig.from_properties({
        **small_files(), "listenPort": "0", "brokerName": "broker-a", "brokerIP1": "127.0.0.1",
        "storePathRootDir": directory + "/store", "storePathCommitLog": directory + "/store/commitlog",
        "namesrvAddr": "", "autoCreateTopicEnable": "false", "autoCreateSubscriptionGroup": "false",
        "vipChannelEnable": "false",
    }))
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

remoting.run(main())
"""


class ServerProcess(Process):
    """A running server: its port and its resource usage."""

    def __init__(self, code: str, directory: Path) -> None:
        command = [sys.executable, "-c", code, str(directory)]
        super().__init__(command, r"^\d+$", {"PYTHONUNBUFFERED": "1"})
        self.port = 0

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        line = super().wait_ready(timeout_s)
        self.port = int(line)
        return line

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def resident(self) -> int:
        """Bytes of resident memory."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def resident_peak(self) -> int:
        """Peak of resident memory, in bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmHWM")

    def descriptors(self) -> int:
        return psutil.Process(self.pid).num_fds()

    def complaints(self) -> list[str]:
        """Tracebacks and warnings of the event loop, with the lines after them."""
        lines = self.output.splitlines()
        return [
            "\n".join(lines[max(0, at - 2) : at + 30])
            for at, line in enumerate(lines)
            if "Traceback" in line or "never retrieved" in line or "never awaited" in line
        ]
