"""CPU, memory and reads of a server process with its children (from /proc), and the page cache."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
KIB = 1024
PAGE = 4096
QUIET_S = 0.5
WRITTEN_A_SECOND = 160 << 20  # upper limit of any load, in bytes


def family(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has ended since the listing
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def cpu_seconds(pid: int) -> float:
    """Return user and system time of the process and its descendants so far (resolution 10 ms)."""
    total = 0
    for each in family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_SECOND


def memory_bytes(pid: int) -> dict[str, int]:
    """Return anonymous memory (allocated by the process) and resident memory (including mapped files)."""
    totals = {"anonymous": 0, "resident": 0}
    for each in family(pid):
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
            for key, name in (("Anonymous:", "anonymous"), ("Rss:", "resident")):
                if line.startswith(key):
                    totals[name] += int(line.split()[1]) * KIB
    return totals


def back_memory(directory: Path, seconds: float) -> None:
    """Touch as much free memory as a turn may use, so that the host has assigned it.

    In a virtual machine free memory often belongs to the host, and the first access to such a page costs up
    to 14 µs.
    """
    path = directory / "page-cache"
    zeros = bytes(1 << 16)
    with path.open("wb", buffering=0) as file:
        for _ in range(int(seconds * WRITTEN_A_SECOND) >> 16):
            file.write(zeros)
    path.unlink()


def wait_quiet(pid: int, most_s: float = 15) -> float:
    """Wait until the process has used almost no CPU for a while; return its CPU seconds."""
    used = cpu_seconds(pid)
    for _ in range(int(most_s / QUIET_S)):
        time.sleep(QUIET_S)
        now = cpu_seconds(pid)
        if now - used <= 0.02:
            return now
        used = now
    return used


def drop_cached(root: Path) -> None:
    """Remove the store's log and queues from the page cache, file by file (which needs no privilege)."""
    for path in [*(root / "commitlog").iterdir(), *(root / "consumequeue").rglob("*")]:
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def cached_share(paths: Sequence[Path], probes: int = 200) -> float:
    """Return the share of randomly probed pages that can be read without waiting for the device."""
    chance, hits = random.Random(1), 0
    fds = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        for fd in fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a probe must not read neighbouring pages
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
    """Return the number of bytes that the process has read from devices."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0
