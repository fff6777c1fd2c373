"""`cometmq raft` with a group in this process."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner
from tests.broker.replication.raft_group import OPTIONS, RaftGroup

from cometmq.broker.replication import raft
from cometmq.cli.app import cometmq
from cometmq.testing.local import local_broker


@pytest.fixture
async def group(tmp_path, monkeypatch):
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)
    async with RaftGroup(tmp_path) as made:
        yield made


async def run(group, *words):
    arguments = ["raft", *words, "-n", group.namesrv]
    return await asyncio.to_thread(lambda: CliRunner().invoke(cometmq, arguments))


async def registered(group):
    """Wait until the name server has all members and the members have a leader."""
    while True:
        found = await run(group, "status", "--json")
        lines = [json.loads(line) for line in found.stdout.splitlines()] if not found.exit_code else []
        if len(lines) == len(group.brokers) and all(line.get("leader") for line in lines):
            return lines
        await asyncio.sleep(0.05)


async def test_a_group_is_shown_and_changed(group):
    leader = await group.leader()
    async with asyncio.timeout(60):
        lines = await registered(group)
    assert {line["leader"] for line in lines} == {leader}
    assert {line["member"] for line in lines} == set(group.brokers)
    text = (await run(group, "status", "-b", "broker-a")).stdout
    assert f"{leader}: leader, term " in text
    assert "members n0, n1, n2" in text

    other = group.followers()[0]
    planned = await run(group, "remove", other, "--dry-run")
    assert planned.stdout.startswith(f"would remove {other} from the raft group at 127.0.0.1:")
    done = await run(group, "transfer", other)
    assert done.stdout == f"transfer {other}: started; `cometmq raft status` shows the progress\n"
    await group.hand_over(other)

    async with asyncio.timeout(60):
        refused = await run(group, "add", "n9")
    assert refused.exit_code
    assert "n9 sent no address" in str(refused.exception)
    nobody = await run(group, "status", "-b", "brokera")
    assert "did you mean broker-a?" in str(nobody.exception)


def test_a_broker_outside_of_a_group_says_so(tmp_path):
    with local_broker(tmp_path) as broker:
        done = CliRunner().invoke(cometmq, ["raft", "status", "-n", broker.namesrv])
    assert done.stdout.split(maxsplit=1) == [broker.broker_addr, "the broker is no member of a raft group\n"]
