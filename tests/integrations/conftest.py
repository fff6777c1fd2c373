"""Fixtures of the tests of integrations: a broker, and connections of kombu."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kombu import Connection

import cometmq.integrations.kombu  # noqa: F401 - registers the URL scheme
from cometmq.testing import LocalBroker, local_broker

Connect = Callable[..., Connection]


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A real broker. Each test has its own queues."""
    with local_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def connect(broker: LocalBroker) -> Iterator[Connect]:
    """A function that opens a connection with the given transport options."""
    opened: list[Connection] = []

    def opening(url: str = f"cometmq://{broker.namesrv}", **options: object) -> Connection:
        opened.append(Connection(url, transport_options=options))
        return opened[-1]

    yield opening
    for each in opened:
        each.close()
