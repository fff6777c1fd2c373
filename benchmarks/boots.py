"""CPU of short starts: name server and broker until they are ready, `cometmq send` until it ends.

Each with the bytecode of this package cached and without it, as in an image that was made without
bytecode, and beside a Python that only imports asyncio. Also the memory of the idle servers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import cometmq
from benchmarks.processes import memory_bytes
from benchmarks.turns import Figures, Options, in_turns, median, table

PACKAGE = os.path.dirname(cometmq.__file__)
KINDS = CACHED, NOT_CACHED = "bytecode cached", "not cached"
NAMESRV, BROKER, SEND, ASYNCIO = "name server", "broker", "cometmq send", "import asyncio"
IDLE_S = 3
MIB = 1 << 20


class Boots:
    """The commands, and the directories of their data and of the bytecode. Turn 0 writes the bytecode."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.namesrv = ""

    def start(self, command: list[str], kind: str = CACHED, turn: int = 0) -> subprocess.Popen[str]:
        bytecode = self.directory / kind
        more = {"PYTHONPYCACHEPREFIX": str(bytecode), "COMETMQ_RUN_DIR": str(self.directory / "run")}
        if kind == NOT_CACHED and turn:
            shutil.rmtree(f"{bytecode}{PACKAGE}", ignore_errors=True)
            more["PYTHONDONTWRITEBYTECODE"] = "1"
        environment = {key: text for key, text in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        return subprocess.Popen(
            [sys.executable, *command],
            env=environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def command(self, name: str) -> list[str]:
        if name == ASYNCIO:
            return ["-c", ASYNCIO]
        if name == SEND:
            return ["-m", "cometmq", "send", "-n", self.namesrv, "TopicTest", "hello"]
        if name == NAMESRV:
            return ["-m", "cometmq", "mqnamesrv", "--port", "0"]
        return ["-m", "cometmq", "mqbroker", "-c", self.broker("measured")]

    def broker(self, name: str) -> str:
        """Write the settings of a broker with an empty store, and return their path."""
        root = self.directory / name
        shutil.rmtree(root, ignore_errors=True)
        settings = {"listenPort": 0, "brokerIP1": "127.0.0.1", "storePathRootDir": root}
        if name == "running":
            settings["namesrvAddr"] = self.namesrv
        path = self.directory / f"{name}.conf"
        path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        return str(path)

    def cpu_ms(self, name: str, kind: str, turn: int) -> float:
        """Return user and system time of a start in ms."""
        process = self.start(self.command(name), kind, turn)
        line = _line(process)
        assert process.stdout is not None
        if name in (NAMESRV, BROKER):
            assert "success" in line
            process.kill()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == (-9 if name in (NAMESRV, BROKER) else 0)
        process.stdout.close()
        return (used.ru_utime + used.ru_stime) * 1000

    def idle_memory(self, name: str) -> dict[str, int]:
        process = self.start(self.command(name))
        try:
            _line(process)
            time.sleep(IDLE_S)
            return memory_bytes(process.pid)
        finally:
            process.kill()
            process.communicate()


def run(options: Options) -> str:
    """Return two tables: CPU of the starts, and memory of the idle servers."""
    boots = Boots(options.data)
    running = []
    try:
        running.append(boots.start(boots.command(NAMESRV)))
        boots.namesrv = f"127.0.0.1:{_line(running[0]).split()[-1]}"
        running.append(boots.start(["-m", "cometmq", "mqbroker", "-c", boots.broker("running")]))
        _line(running[1])

        def measure(name: str, turn: int) -> Figures:
            return {kind: boots.cpu_ms(name, kind, turn) for kind in KINDS}

        found = in_turns("CPU ms", (ASYNCIO, NAMESRV, BROKER, SEND), options.turns, measure)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    base = median(found[ASYNCIO], CACHED)
    cpu = {name: [median(turns, kind) for kind in KINDS] for name, turns in found.items()}
    rows = [[name, *(f"{ms:.0f} ms ({ms / base:.1f})" for ms in each)] for name, each in cpu.items()]
    idle = [
        [name, *(f"{each[kind] / MIB:.0f} MiB" for kind in ("anonymous", "resident"))]
        for name in (NAMESRV, BROKER)
        for each in [boots.idle_memory(name)]
    ]
    starts = table(["CPU (times that of asyncio)", *KINDS], rows)
    return f"{starts}\n{table(['idle', 'anonymous', 'resident'], idle)}"


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
