"""The pytest plugin. Add `pytest_plugins = ["cometmq.testing.plugin"]` to the top-level conftest.py.

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
    """A new name server and broker for one test, on real sockets.

    The first message to a topic creates the topic.
    """
    with local_broker(tmp_path / "cometmq") as broker:
        yield broker


@pytest.fixture
def cometmq_test_broker() -> Iterator[TestBroker]:
    """A new name server and broker for one test, without sockets, for clients of the test's process.

    `messages(topic)` returns the stored messages.
    """
    with TestBroker() as broker:
        yield broker


@pytest.fixture
def cometmq_faults(cometmq_broker: LocalBroker) -> Iterator[ClusterProxy]:
    """Fault-injecting proxies before `cometmq_broker`. Clients connect to the fixture's `namesrv`."""
    with ClusterProxy(cometmq_broker.namesrv).run_in_thread() as proxy:
        yield proxy


@pytest.fixture
def start_cometmq_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """A function that starts a broker, for tests with several brokers or special settings.

    Its arguments are those of `local_broker`, both optional: `settings` by RocketMQ's keys, and `data_dir`.
    It returns a `LocalBroker`. The brokers stop at the end of the test.
    """
    with ExitStack() as stack:
        count = 0

        def start(settings: Mapping[str, str] | None = None, data_dir: Path | None = None) -> LocalBroker:
            nonlocal count
            count += 1
            return stack.enter_context(local_broker(data_dir or tmp_path / f"cometmq-{count}", settings))

        yield start
