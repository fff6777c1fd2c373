"""The pytest plugin: `pytest_plugins = ["cometmq.testing.plugin"]` in conftest.py.

def test_orders_are_sent(cometmq_broker):
    with SyncProducer("shop", namesrv=cometmq_broker.namesrv) as producer:
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from cometmq.testing.cluster_proxy import ClusterProxy
from cometmq.testing.in_memory import TestBroker
from cometmq.testing.local import LocalBroker, local_broker

StartBroker = Callable[..., LocalBroker]


@pytest.fixture
def cometmq_broker(tmp_path: Path) -> Iterator[LocalBroker]:
    """A fresh name server and broker of this test's own; topics are created by their first message."""
    with local_broker(tmp_path / "cometmq") as broker:
        yield broker


@pytest.fixture
def cometmq_test_broker() -> Iterator[TestBroker]:
    """The same without sockets, for clients of this process; `messages(topic)` says what is stored."""
    with TestBroker() as broker:
        yield broker


@pytest.fixture
def cometmq_faults(cometmq_broker: LocalBroker) -> Iterator[ClusterProxy]:
    """Fault proxies before `cometmq_broker`; clients are given their `namesrv`."""
    with ClusterProxy(cometmq_broker.namesrv).run_in_thread() as proxy:
        yield proxy


@pytest.fixture
def start_cometmq_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """A function that starts a broker with settings under RocketMQ's keys: for several, or special ones."""
    with ExitStack() as stack:
        count = 0

        def start(settings: Mapping[str, str] | None = None, data_dir: Path | None = None) -> LocalBroker:
            nonlocal count
            count += 1
            return stack.enter_context(local_broker(data_dir or tmp_path / f"cometmq-{count}", settings))

        yield start
