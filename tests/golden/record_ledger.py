"""Record tests/data/ledger-4.9.7.tar.gz: files of Apache's broker 4.9.7 as the only member of a raft group.

``python -m tests.golden.record_ledger``. The input has sends, batches and changes of segments, a kill midway,
and a clean stop. Files are cut after their used part; ``lengths.json`` in the archive contains their original
lengths.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.golden.record_store import pack
from tests.interop import store_input, wire
from tests.interop.apache import ApacheBroker, ApacheNamesrv
from tests.ports import free_port

TARGET = Path(__file__).parent.parent / "data" / "ledger-4.9.7.tar.gz"
CUT = ("dledger-n0/data/", "dledger-n0/index/", "consumequeue/", "index/")


def settings(port: int, peers: str = "") -> dict[str, str]:
    """Return the settings of a member n0 with small files."""
    return {
        **store_input.TINY,
        "mappedFileSizeCommitLog": str(32 << 10),
        "maxMessageSize": str(16 << 10),
        "enableDLegerCommitLog": "true",
        "dLegerGroup": "broker-a",
        "dLegerPeers": peers or f"n0-127.0.0.1:{port}",
        "dLegerSelfId": "n0",
    }


def feed(port: int, first: int, count: int) -> None:
    """Send numbered messages to three queues, one of them delayed, and two batches of five."""
    with wire.Connection(port) as connection:
        feeder = store_input.Feeder(connection)
        feeder.update_topic("Alpha", 3)
        for number in range(first, first + count):
            properties = [("KEYS", f"k{number}"), ("TAGS", ("TagA", "TagB")[number % 2])]
            feeder.send("Alpha", number % 3, b"%d:" % number + b"x" * (number * 37 % 1500), properties)
        feeder.send("Alpha", 0, b"late", [("DELAY", "18")])
        for number in range(2):
            parts = [(b"part %d.%d.%d" % (first, number, each), [("KEYS", f"p{each}")]) for each in range(5)]
            feeder.batch("Alpha", 1, parts)


def write_store(directory: Path) -> Path:
    names = ApacheNamesrv("4.9.7", directory)
    address, port = f"127.0.0.1:{names.port}", free_port()
    try:
        broker = ApacheBroker("4.9.7", directory, address, settings=settings(port))
        feed(broker.port, 0, 100)
        broker.kill()
        broker = ApacheBroker("4.9.7", directory, address, settings=settings(port))
        feed(broker.port, 100, 20)
        broker.stop()
    finally:
        names.kill()
    return directory / "store"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        TARGET.write_bytes(pack(write_store(Path(directory)), CUT))
    sys.stderr.write(f"{TARGET}: {TARGET.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
