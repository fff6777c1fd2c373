"""Fixtures: a broker with an endpoint for 5.x clients, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.broker.conftest import start_cluster  # noqa: F401 (a fixture)
from tests.grpc.service.caller import SETTINGS, Caller
from tests.grpc.serving import client as channel
from tests.kit.brokers import Cluster, StartCluster


@pytest.fixture
async def cluster(start_cluster: StartCluster) -> Cluster:  # noqa: F811 (a fixture)
    found: Cluster = await start_cluster(**SETTINGS)
    return found


@pytest.fixture
async def connect() -> AsyncIterator[Any]:
    """Connect clients: `await connect(cluster, "client-2")`. Each has a connection of its own."""
    async with AsyncExitStack() as stack:

        async def connected(cluster: Cluster, client_id: str = "client-1", **more: Any) -> Caller:
            assert cluster.broker.endpoint is not None
            return Caller(
                await stack.enter_async_context(channel(cluster.broker.endpoint.port)), client_id, **more
            )

        yield connected


@pytest.fixture
async def caller(cluster: Cluster, connect: Any) -> Caller:
    found: Caller = await connect(cluster)
    return found
