"""Servers as processes of their own, for tests that do bad things to them."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

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

# Nothing may be created by the names in bad frames: memory would rightly grow with them.
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


class ServerProcess:
    """A running server: its port, and what the operating system says of it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, errors: Path) -> None:
        self.process = process
        self.port = port
        self._errors = errors
        self._status = Path(f"/proc/{process.pid}/status")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def resident(self) -> int:
        """Bytes of memory in use."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def resident_peak(self) -> int:
        """Most bytes of memory ever in use."""
        for line in self._status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmHWM")

    def descriptors(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    def complaints(self) -> list[str]:
        """Tracebacks and warnings of the event loop on standard error, with what follows them."""
        lines = self._errors.read_text(errors="replace").splitlines()
        return [
            "\n".join(lines[max(0, at - 2) : at + 30])
            for at, line in enumerate(lines)
            if "Traceback" in line or "never retrieved" in line or "never awaited" in line
        ]


@contextlib.contextmanager
def server_process(code: str, directory: Path) -> Iterator[ServerProcess]:
    """Run a program that prints its port, until the end of the block."""
    errors = directory / "stderr.txt"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with errors.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, stderr=sink, env=environment
        )
    try:
        yield ServerProcess(process, read_port(process, errors), errors)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_port(process: subprocess.Popen[bytes], errors: Path, within_s: float = 30) -> int:
    """The number on the process's first line of output."""
    assert process.stdout is not None
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise AssertionError(f"no port within {within_s} s: {errors.read_text()}")
    line = process.stdout.readline()
    assert line.strip(), f"the server ended: {errors.read_text()}"
    return int(line)
