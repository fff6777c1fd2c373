"""The servers of the client's tests: a broker and a name server that do what a test tells them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.client.fakes import FakeBroker, FakeNamesrv


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with FakeBroker("broker-a") as one:
        yield one


@pytest.fixture
async def namesrv(broker: FakeBroker) -> AsyncIterator[FakeNamesrv]:
    """Knows topic T with one queue on the broker."""
    async with FakeNamesrv() as server:
        server.serve("T", broker, queues=1)
        yield server
