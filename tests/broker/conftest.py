"""Fixtures: a running cluster of a name server and a broker, and its clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.kit.brokers import PATIENT, Cluster, Peer, StartCluster

from cometmq.broker.base.delay_levels import DelayLevels
from cometmq.standalone import Standalone


@pytest.fixture
async def start_cluster(tmp_path: Any) -> AsyncIterator[StartCluster]:
    """Start clusters with the given settings: `await start_cluster(flushDiskType="SYNC_FLUSH")`."""
    clusters: list[Cluster] = []

    async def start(**settings: str) -> Cluster:
        standalone = Standalone(tmp_path / f"cluster{len(clusters)}", 0, 0, settings=PATIENT | settings)
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
    """Start a cluster and a client of it: `cluster, peer = await started(...)`."""

    async def start(**settings: str) -> tuple[Cluster, Peer]:
        cluster = await start_cluster(**settings)
        return cluster, cluster.peer()

    return start


@pytest.fixture
async def peer(cluster: Cluster) -> Peer:
    return cluster.peer()


@pytest.fixture
async def fast(start_cluster, monkeypatch):
    """Start a cluster with six short delay levels: 200 ms, and 400 ms for the fourth."""
    levels = DelayLevels((200, 200, 200, 400, 200, 200))
    monkeypatch.setattr(DelayLevels, "of", lambda config: levels)
    return await start_cluster(messageDelayLevel="1s 1s 1s 1s 1s 1s")
