"""A running cluster of one name server and one broker, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.kit.brokers import Cluster, Peer, StartCluster

from cometmq.broker.base.delay_levels import DelayLevels
from cometmq.standalone import Standalone


@pytest.fixture
async def start_cluster(tmp_path: Any) -> AsyncIterator[StartCluster]:
    """Start clusters with settings of the test's own: `await start_cluster(flushDiskType="SYNC_FLUSH")`."""
    clusters: list[Cluster] = []

    async def start(**settings: str) -> Cluster:
        standalone = Standalone(tmp_path / f"cluster{len(clusters)}", 0, 0, settings=settings)
        await standalone.start()
        clusters.append(Cluster(standalone))
        return clusters[-1]

    yield start
    for cluster in clusters:
        await cluster.close_peers()
        await cluster.standalone.stop()


@pytest.fixture
async def cluster(start_cluster: StartCluster) -> Cluster:
    return await start_cluster()


@pytest.fixture
def started(start_cluster: StartCluster) -> StartCluster:
    """Like `start_cluster`, with a client: `cluster, peer = await started(...)`."""

    async def start(**settings: str) -> tuple[Cluster, Peer]:
        cluster = await start_cluster(**settings)
        return cluster, cluster.peer()

    return start


@pytest.fixture
async def peer(cluster: Cluster) -> Peer:
    return cluster.peer()


@pytest.fixture
async def fast(start_cluster, monkeypatch):
    """A cluster whose six delay levels are short enough to wait for: 200 ms, the fourth 400 ms."""
    levels = DelayLevels((200, 200, 200, 400, 200, 200))
    monkeypatch.setattr(DelayLevels, "of", lambda config: levels)
    return await start_cluster(messageDelayLevel="1s 1s 1s 1s 1s 1s")
