"""Java's producers during a leadership handoff of our raft group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.broker.replication.raft_group import OPTIONS, RaftGroup
from tests.interop.driver import Driver, message

from cometmq.broker.replication import raft
from cometmq.protocol.codes import ResponseCode


@pytest.mark.parametrize("version", ["4.9.8", "5.5.0"])
async def test_no_send_of_a_java_producer_fails_in_a_handoff(
    java_clients: Callable[[str], Driver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """The client retries code 14 immediately, three times in all, and requests the route only every 30 s."""
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)
    java, name = java_clients(version), f"handoff-{version}"
    async with RaftGroup(tmp_path) as group:
        leader = await group.leader()
        assert (await group.peers[leader].send(body=b"first")).code == ResponseCode.SUCCESS

        async def send(*bodies: str) -> None:
            asked = [message("Orders", body.encode()) for body in bodies]
            results = await asyncio.to_thread(java.send, name, asked)
            assert {each["status"] for each in results} == {"SEND_OK"}

        await asyncio.to_thread(java.call, "producer_start", name=name, namesrv=group.namesrv, timeout=20_000)
        try:
            await send("before")
            away, to = group.followers()
            sending = asyncio.create_task(send(*(f"during-{number}" for number in range(50))))
            await asyncio.sleep(0.05)
            assert (await group.change(leader, "transfer", to)).code == ResponseCode.SUCCESS
            await sending
            assert await group.leader() == to
            await send("after")
            # A handoff to a member that does not answer is aborted after an election timeout.
            await group.stop(away)
            assert (await group.change(to, "transfer", away)).code == ResponseCode.SUCCESS
            await send("aborted")
        finally:
            await asyncio.to_thread(java.call, "producer_stop", name=name)
