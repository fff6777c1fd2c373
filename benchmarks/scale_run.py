"""Common to the scale benchmarks: brokers on prepared stores, the load in a child, the page cache."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.interop import wire
from tests.interop.comet import CometBroker, CometNamesrv

from benchmarks.brokers import SETTINGS
from benchmarks.processes import cpu_seconds
from benchmarks.scale_load import Load

PAGE = 4096
QUIET_S = 0.5


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def write_topics(store: Path, topics: Sequence[str], queues: int) -> None:
    """The topic table that the broker finds at its first start."""
    table = {
        topic: {"topicName": topic, "readQueueNums": queues, "writeQueueNums": queues, "perm": 6}
        for topic in topics
    }
    (store / "config").mkdir(parents=True, exist_ok=True)
    version = {"timestamp": 1, "counter": 1}
    text = json.dumps({"dataVersion": version, "topicConfigTable": table})
    (store / "config" / "topics.json").write_text(text)


@contextmanager
def name_server(directory: Path) -> Iterator[str]:
    """Address of a name server of ours."""
    server = CometNamesrv(directory)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.kill()


def broker(directory: Path, namesrv: str, name: str, *, wait: bool = True) -> CometBroker:
    """Our broker on `directory/store`, with Apache's file sizes."""
    return CometBroker(directory, namesrv, name=name, settings=SETTINGS, wait=wait)


def start_timed(directory: Path, namesrv: str, name: str) -> tuple[CometBroker, float, float]:
    """A broker, the seconds from its start until it listens, and its CPU seconds up to then."""
    began = time.perf_counter()
    started = broker(directory, namesrv, name, wait=False)
    while not wire.listens(started.port):
        if not started.process.running or time.perf_counter() - began > 120:
            break  # wait_ready says what is wrong
        time.sleep(0.002)
    seconds, cpu = time.perf_counter() - began, cpu_seconds(started.pid)
    started.wait_ready()
    return started, seconds, cpu


def begin_load(load: Load, *, quiet: bool = False) -> subprocess.Popen[str]:
    """The load in a process of its own; `quiet`: what it says at the loss of its broker is not wanted."""
    command = [sys.executable, "-m", "benchmarks.scale_load", json.dumps(dataclasses.asdict(load))]
    errors = subprocess.DEVNULL if quiet else None
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)


def end_load(child: subprocess.Popen[str]) -> dict[str, Any]:
    text, _ = child.communicate(timeout=900)
    if child.returncode:
        raise RuntimeError("the load generator failed, see above")
    result: dict[str, Any] = json.loads(text)
    return result


def run_load(load: Load, pid: int) -> dict[str, Any]:
    """One load to its end. `cpu_us`: the broker's CPU a message until it has nothing left to do."""
    before = cpu_seconds(pid)
    result = end_load(begin_load(load))
    result["cpu_us"] = (wait_quiet(pid) - before) * 1e6 / max(1, result["messages"])
    return result


def wait_quiet(pid: int, most_s: float = 15) -> float:
    """Until the process has used (nearly) no CPU for a while; its CPU seconds then."""
    used = cpu_seconds(pid)
    for _ in range(int(most_s / QUIET_S)):
        time.sleep(QUIET_S)
        now = cpu_seconds(pid)
        if now - used <= 0.02:
            return now
        used = now
    return used


def drop_cached(root: Path) -> None:
    """Take the store's log and queues out of the page cache, file by file (which needs no privilege)."""
    for path in [*(root / "commitlog").iterdir(), *(root / "consumequeue").rglob("*")]:
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def cached_share(paths: Sequence[Path], probes: int = 200) -> float:
    """Share of randomly probed pages of the files that can be read without waiting for the device."""
    chance, hits = random.Random(1), 0
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        for fd in fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a probe must not bring its neighbours along
        for _ in range(probes):
            fd = chance.choice(fds)
            at = chance.randrange(max(1, os.fstat(fd).st_size // PAGE)) * PAGE
            try:
                hits += os.preadv(fd, [bytearray(64)], at, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                pass
    finally:
        for fd in fds:
            os.close(fd)
    return hits / probes


def device_reads(pid: int) -> int:
    """Bytes that the process has read from devices."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0
