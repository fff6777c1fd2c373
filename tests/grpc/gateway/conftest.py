"""Fixtures: a broker with the HTTP gateway, and an HTTP client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx
import pytest
import uvloop
from tests.grpc.service.conftest import cluster, connect, start_cluster  # noqa: F401 (fixtures)


@pytest.hookimpl
def pytest_asyncio_loop_factories(
    config: pytest.Config,
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Only the tests of connections depend on the event loop."""
    loops = {"uvloop": uvloop.new_event_loop}
    return loops | ({"asyncio": asyncio.new_event_loop} if item.path.stem == "test_connections" else {})


def port_of(cluster: Any) -> int:  # noqa: F811 (no fixture here)
    assert cluster.broker.endpoint is not None
    return int(cluster.broker.endpoint.port)


@pytest.fixture
async def web(cluster: Any) -> AsyncIterator[httpx.AsyncClient]:  # noqa: F811 (a fixture)
    base = f"http://127.0.0.1:{port_of(cluster)}"
    async with httpx.AsyncClient(base_url=base, timeout=60, trust_env=False) as found:
        yield found
