"""What is measured: each row is one shape of load, the same for both brokers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KIB = 1024


@dataclass(frozen=True)
class Row:
    """One line of the table; ``load`` are arguments of the load generator (java/driver/Load.java).

    drain: messages of a backlog that a push consumer reads instead. sync_flush: brokers with SYNC_FLUSH.
    beside: another load on the same broker at the same time, whose messages count for its CPU but not for
    rate and latency.
    """

    name: str
    title: str
    load: dict[str, Any] = field(default_factory=dict)
    drain: int = 0
    sync_flush: bool = False
    beside: dict[str, Any] = field(default_factory=dict)


ROWS = [
    Row("sync-64-1k", "64 threads, 1 KiB", {"mode": "sync", "threads": 64, "size": KIB}),
    Row("sync-64-128", "64 threads, 128 B", {"mode": "sync", "threads": 64, "size": 128}),
    Row("sync-1-1k", "1 thread, 1 KiB", {"mode": "sync", "threads": 1, "size": KIB}),
    Row(
        "sync-64x64-1k",
        "64 threads on 64 connections, 1 KiB",
        {"mode": "sync", "threads": 64, "clients": 64, "size": KIB},
    ),
    Row(
        "batch-32",
        "batches of 32 x 128 B, 4 threads",
        {"mode": "batch", "threads": 4, "batch": 32, "size": 128},
    ),
    Row(
        "async",
        "async, 2 x 256 in flight, 1 KiB",
        {"mode": "async", "threads": 2, "inflight": 256, "size": KIB},
    ),
    Row("drain", "drain of a backlog, 128 B", drain=500_000),
    Row(
        "flush-64-1k",
        "SYNC_FLUSH, 64 threads, 1 KiB",
        {"mode": "sync", "threads": 64, "size": KIB},
        sync_flush=True,
    ),
    Row(
        "flush-1-1k",
        "SYNC_FLUSH, 1 thread, 1 KiB",
        {"mode": "sync", "threads": 1, "size": KIB},
        sync_flush=True,
    ),
    Row(
        "flush-64-busy",
        "SYNC_FLUSH, 64 threads, 1 KiB, beside 256 async sends of 128 B in flight",
        {"mode": "sync", "threads": 64, "size": KIB},
        sync_flush=True,
        beside={"mode": "async", "threads": 1, "inflight": 256, "size": 128},
    ),
]
