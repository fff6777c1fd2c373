"""The pytest plugin, which pytest loads by its entry point.

    def test_orders_are_sent(cometmq_broker):
        with SyncProducer("shop", namesrv=cometmq_broker.namesrv) as producer:
            ...

The pytest setting `cometmq_broker_scope` is the scope of the broker fixtures: function (the default), class,
module, package or session. Each worker of pytest-xdist has its own brokers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cometmq.testing import ClusterProxy, LocalBroker, TestBroker

    StartBroker = Callable[..., LocalBroker]

SCOPES = ("function", "class", "module", "package", "session")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "cometmq_broker_scope", f"scope of CometMQ's brokers: {', '.join(SCOPES)}", default="function"
    )


def _scope(fixture_name: str, config: pytest.Config) -> Any:
    del fixture_name
    scope = config.getini("cometmq_broker_scope")
    if scope not in SCOPES:
        raise pytest.UsageError(f"cometmq_broker_scope is {scope!r}, not one of {', '.join(SCOPES)}")
    return scope


@pytest.fixture(scope=_scope)
def cometmq_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A new name server and a new broker, on real sockets.

    The first message to a topic creates the topic.
    """
    from cometmq.testing import local_broker

    with local_broker(tmp_path_factory.mktemp("cometmq")) as broker:
        yield broker


@pytest.fixture(scope=_scope)
def cometmq_test_broker() -> Iterator[TestBroker]:
    """A new name server and a new broker, without sockets, for clients in the test's process.

    `messages(topic)` returns the stored messages.
    """
    from cometmq.testing import TestBroker

    with TestBroker() as broker:
        yield broker


@pytest.fixture(scope=_scope)
def cometmq_faults(cometmq_broker: LocalBroker) -> Iterator[ClusterProxy]:
    """Fault-injecting proxies in front of `cometmq_broker`. Clients connect to the fixture's `namesrv`."""
    from cometmq.testing import ClusterProxy

    with ClusterProxy(cometmq_broker.namesrv).run_in_thread() as proxy:
        yield proxy


@pytest.fixture
def start_cometmq_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """A function that starts a broker, for tests with several brokers or special settings.

    Its optional arguments are those of `local_broker`: `settings` by RocketMQ's keys, and `data_dir`. It
    returns a `LocalBroker`. The brokers stop at the end of the test.
    """
    from cometmq.testing import local_broker

    with ExitStack() as stack:
        count = 0

        def start(settings: Mapping[str, str] | None = None, data_dir: Path | None = None) -> LocalBroker:
            nonlocal count
            count += 1
            return stack.enter_context(local_broker(data_dir or tmp_path / f"cometmq-{count}", settings))

        yield start
