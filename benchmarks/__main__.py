"""Measure the claims of docs/performance.md, one part at a time, and print a table in Markdown."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from benchmarks.turns import Options

PARTS = {
    "apache": "our broker beside Apache's, with Apache's Java client as the load of both",
    "budget": "what a message costs either broker under a lean load",
    "where": "where our broker's microseconds go under one row of `apache`",
    "queues": "10,000 queues of 1,000 topics beside 8 queues of one topic",
    "timers": "sends beside 1,000,000 messages that wait for their time, and what these cost in memory",
    "starts": "starts on small and large stores, after a clean stop and after kill -9 (needs 25 GiB)",
    "lite": "a broker with 1,000,000 lite topics beside an empty one: start and memory",
    "boots": "CPU of short starts of the servers and of `cometmq send`, and memory of idle servers",
    "streams": "memory of a broker that 2,000 idle consumers of 5.x take",
    "backlog": "live sends beside a cold drain of 10 million messages",
    "metrics": "a broker of ours that Prometheus looks at beside one without metrics",
    "traces": "our producer with message traces beside the same without",
    "clients": "our client beside PyPI's `rocketmq` (C++) and Apache's Java client, on our broker",
    "proxy": "our gRPC port beside Apache's proxy, with Apache's 5.x Java client as the load of both",
    "replication": "brokers with slaves and raft groups, ours beside Apache's, and what a slave costs",
    "pipeline": "the archive job and other Spark jobs",
    "kafka": "our Spark source, sink and archive job beside Spark's Kafka source and sink",
    "offline": "store directories read without a broker, beside Parquet",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "part",
        nargs="?",
        default="apache",
        choices=PARTS,
        help="; ".join(f"{k}: {v}" for k, v in PARTS.items()),
    )
    parser.add_argument(
        "--turns", type=int, default=5, help="counted turns (default 5; the first is dropped)"
    )
    parser.add_argument("--seconds", type=int, default=4, help="length of a turn (default 4)")
    parser.add_argument("--rows", nargs="*", default=[], help="only these rows (apache, replication, where)")
    parser.add_argument(
        "--short", action="store_true", help="one turn of a second: shows that all of it works"
    )
    parser.add_argument("--data", help="directory for the stores; `starts` and `backlog` use theirs again")
    given = parser.parse_args()
    turns, seconds = (1, 1) if given.short else (given.turns, given.seconds)
    with tempfile.TemporaryDirectory(prefix="cometmq-bench-") as scratch:
        options = Options(Path(given.data or scratch), turns, seconds, given.rows, given.short)
        sys.stdout.write(import_module(f"benchmarks.{given.part}").run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
