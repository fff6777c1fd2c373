"""A name server and a broker in the test's own process, ready within milliseconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cometmq.standalone import Standalone


@dataclass(frozen=True, slots=True)
class LocalBroker:
    """A running name server and broker with real sockets and files.

    Attributes:
        namesrv: Address ("host:port") of the name server, for producers and consumers.
        broker_addr: Address ("host:port") of the broker.
        broker_name: Name of the broker.
        data_dir: Directory of the broker's files.
    """

    namesrv: str
    broker_addr: str
    broker_name: str
    data_dir: Path


@contextmanager
def local_broker(data_dir: Path | str, settings: Mapping[str, str] | None = None) -> Iterator[LocalBroker]:
    """Run a name server and a broker on free ports of 127.0.0.1, in a thread with its own event loop.

    The end of the block stops both servers and closes the store. Another start with the same directory
    continues with the stored messages.

    Args:
        data_dir: Directory for the broker's files; created if it does not exist.
        settings: Broker settings by RocketMQ's keys, such as `{"autoCreateTopicEnable": "false"}`.

    Yields:
        The addresses of both servers.
    """
    cluster = Standalone(str(data_dir), namesrv_port=0, broker_port=0, settings=settings)
    with cluster.run_in_thread():
        (name, addr), *_ = cluster.broker_addrs.items()
        yield LocalBroker(cluster.namesrv_addr, addr, name, Path(data_dir))
