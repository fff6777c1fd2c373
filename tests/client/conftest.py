"""Fixtures for the client's tests: a fake broker and name server that tests control, and a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from tests.client.fakes import Box
from tests.client.scenarios import PATIENT_BROKER
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq.testing import LocalBroker, local_broker


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with FakeBroker("broker-a") as one:
        yield one


@pytest.fixture
async def namesrv(broker: FakeBroker) -> AsyncIterator[FakeNamesrv]:
    """A name server with the route of topic T: one queue on the broker."""
    async with FakeNamesrv() as server:
        server.serve("T", broker, queues=1)
        yield server


@pytest.fixture
def box(namesrv: FakeNamesrv) -> Box:
    return Box(namesrv)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A real broker in a separate process."""
    soon = {"transactionCheckInterval": "200", "transactionTimeOut": "200"}
    with local_broker(tmp_path_factory.mktemp("broker"), soon | PATIENT_BROKER) as running:
        yield running
