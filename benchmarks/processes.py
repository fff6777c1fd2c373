"""What a server process costs: CPU time and memory, with its children, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
KIB = 1024


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # gone since the listing
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of the process and its descendants so far (resolution 10 ms)."""
    total = 0
    for each in family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_SECOND


def memory_bytes(pid: int) -> dict[str, int]:
    """Anonymous memory (what the process itself made) and resident memory (mapped files included)."""
    totals = {"anonymous": 0, "resident": 0}
    for each in family(pid):
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
            for key, name in (("Anonymous:", "anonymous"), ("Rss:", "resident")):
                if line.startswith(key):
                    totals[name] += int(line.split()[1]) * KIB
    return totals


def back_memory(directory: Path, size: int) -> None:
    """Have `size` bytes of free memory backed by real memory: what is free in a virtual machine often is not
    (its host takes it back), and whoever touches such a page first pays for that, up to 14 µs a page.
    """
    path = directory / "page-cache"
    zeros = bytes(1 << 16)
    with path.open("wb", buffering=0) as file:
        for _ in range(size >> 16):
            file.write(zeros)
    path.unlink()
