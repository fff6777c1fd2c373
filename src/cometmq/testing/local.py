"""A broker inside the test's own process: no start-up of an interpreter, ready in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cometmq.standalone import Standalone


@dataclass(frozen=True, slots=True)
class LocalBroker:
    """A running name server and broker: real ones, on real sockets and files."""

    namesrv: str
    """host:port for producers and consumers."""
    broker_addr: str
    broker_name: str
    data_dir: Path


@contextmanager
def local_broker(data_dir: Path | str, settings: Mapping[str, str] | None = None) -> Iterator[LocalBroker]:
    """Run a name server and a broker on free ports of 127.0.0.1, in a thread with a loop of its own.

    settings: broker settings under RocketMQ's keys, `{"autoCreateTopicEnable": "false"}`. Stopping drains and
    closes the store; a second start on the same directory goes on with what is in it.
    """
    cluster = Standalone(str(data_dir), namesrv_port=0, broker_port=0, settings=settings)
    with cluster.run_in_thread():
        (name, addr), *_ = cluster.broker_addrs.items()
        yield LocalBroker(cluster.namesrv_addr, addr, name, Path(data_dir))
