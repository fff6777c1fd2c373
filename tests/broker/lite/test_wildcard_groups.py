"""Wildcard groups, which receive from all lite topics of their parent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.broker.lite.conftest import GROUP, LiteClient, lite_of, set_group, set_up
from tests.kit.brokers import Cluster, Peer, refused, running
from tests.kit.waiting import until

from cometmq.broker.lite import pops


async def test_a_wildcard_group_receives_from_all_lite_topics(
    client: LiteClient, cluster: Cluster, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pops, "MAX_READY", 4)
    await set_group(peer, sub_wildcard="true")
    other = LiteClient(cluster.peer(), "c2")
    names = [f"s{number}" for number in range(10)]
    for name in names:
        await client.send(name, name)
    refused(await client.change("PARTIAL_ADD", "s1"), 604, "receives from all lite topics of Sessions")
    for each in (client, other):
        assert (await each.change("COMPLETE_ADD")).code == 0
    assert lite_of(cluster).subscriptions.count == 2
    found: list[str] = []
    while len(found) < len(names):
        found += await client.take(1) if len(found) < 5 else await other.take(1)
    assert sorted(found) == names
    waiting = asyncio.create_task(client.take(1))
    await until(lambda: len(lite_of(cluster).pops.polls))
    await client.send("later", "later")
    assert await waiting == ["later"]
    for name in names:  # More than `ready` has room for
        await client.send(name, f"{name} again")
    assert sorted(await other.take(10)) == [f"{name} again" for name in names]
    assert (await client.pop()).code == 210
    assert (await client.change("COMPLETE_REMOVE")).code == 0
    assert (await other.change("COMPLETE_REMOVE")).code == 0
    await client.send("s1", "unheard")
    assert (await client.pop()).code == 210


async def test_a_wildcard_subscription_survives_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, peer):
        await set_up(peer, sub_wildcard="true")
        client = LiteClient(peer)
        assert (await client.change("COMPLETE_ADD")).code == 0
        await client.send("s1", "1")
    async with running(tmp_path) as (broker, peer):
        client = LiteClient(peer)
        assert await client.take(1) == ["1"]
        await client.send("s2", "2")
        broker.parts.lite.queues.flush()
        assert broker.parts.lite.queues.lags(GROUP, 9)[0] == 1
