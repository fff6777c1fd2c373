"""A raft group under load whose members stop, crash, lose connections and hand over, by random seeds.

No acknowledged message is lost or duplicated, delayed messages are delivered once, and all logs end up
identical.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter

import pytest
from tests.broker.replication.raft_group import OPTIONS, RaftGroup
from tests.kit.waiting import until
from tests.long_form import LONG, long_form

from cometmq.broker.replication import raft
from cometmq.broker.replication.raft_peers import Peers
from cometmq.errors import CometError
from cometmq.protocol.codes import ResponseCode

SEEDS = range(1, 31) if LONG else (2,)
STEPS = 12 if LONG else 4
SENDERS = 4


class Chaos:
    """One run with one seed."""

    def __init__(self, group: RaftGroup, rng: random.Random, cut: set[tuple[str, str]]) -> None:
        self.group = group
        self.rng = rng
        self.cut = cut
        self.sent = 0
        self.acknowledged: set[bytes] = set()
        self._done = False

    async def send(self) -> None:
        """Send to the current leader; a refused message is not sent again."""
        while not self._done:
            leader = next(filter(self.group.leads, self.group.brokers), None)
            if leader is None or leader not in self.group.peers:
                await asyncio.sleep(0.01)
                continue
            self.sent += 1
            later = self.sent % 8 == 0
            body = (b"<later %d>" if later else b"<message %d>") % self.sent
            try:
                answer = await self.group.peers[leader].send(
                    body=body + b" " * self.rng.randrange(2_000),
                    queue_id=self.sent % 4,
                    properties={"DELAY": "1"} if later else None,
                )
            except CometError:
                await asyncio.sleep(0.01)
                continue
            if answer.code == ResponseCode.SUCCESS:
                self.acknowledged.add(body)
            else:
                await asyncio.sleep(0.01)

    async def step(self) -> None:
        rng, group = self.rng, self.group
        member = rng.choice(sorted(group.brokers))
        what = rng.choice(["stop", "crash", "crash leader", "cut off", "cut leader off", "transfer"])
        leader = next(filter(group.leads, sorted(group.brokers)), member)
        if what in ("stop", "crash", "crash leader"):
            member = leader if "leader" in what else member
            if "crash" in what:
                group.brokers[member].parts.store.crash()
            await group.stop(member)
            await asyncio.sleep(rng.uniform(0, 0.5))
            await group.start(member)
        elif what == "transfer":
            await group.change(leader, "transfer", member)
        else:
            member = leader if "leader" in what else member
            links = {(member, other) for other in group.addresses}
            links |= {(other, member) for other in group.addresses}
            self.cut |= {link for link in links if rng.random() < 0.8}
            await asyncio.sleep(rng.uniform(0.1, 0.8))
            self.cut.clear()
        await asyncio.sleep(rng.uniform(0, 0.6))

    def _delivered(self) -> bool:
        """Return whether there is a leader on which no delayed message waits."""
        leader = next(filter(self.group.leads, self.group.brokers), None)
        return leader is not None and not self.group.brokers[leader].parts.schedule.waiting()

    async def run(self) -> None:
        senders = [asyncio.create_task(self.send()) for _ in range(SENDERS)]
        await self.group.leader()
        for _ in range(STEPS):
            await self.step()
        before = len(self.acknowledged)
        async with asyncio.timeout(60):  # the group has a leader again within this time
            while len(self.acknowledged) < before + 10:
                await asyncio.sleep(0.01)
        self._done = True
        await asyncio.gather(*senders)
        await until(self._delivered, 60)
        await self.group.equal()


@long_form("members stop, crash and are cut off again and again")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_what_a_group_acknowledges_is_in_each_log_once(tmp_path, monkeypatch, seed, flush):
    monkeypatch.setattr(raft, "OPTIONS", OPTIONS)
    cut: set[tuple[str, str]] = set()
    send = Peers.send

    def send_some(peers, messages):
        send(peers, [each for each in messages if (each.sender, each.to) not in cut])

    monkeypatch.setattr(Peers, "send", send_some)
    # A delivery that is not committed in time is repeated and may be duplicated, so the timeout is long here.
    settings = {"mappedFileSizeCommitLog": "65536", "flushDiskType": flush}
    settings |= {"messageDelayLevel": "1s", "slaveTimeout": "60000"}
    async with RaftGroup(tmp_path, **settings) as group:
        chaos = Chaos(group, random.Random(seed), cut)
        await chaos.run()
        logs = {group.log_bytes(member) for member in group.brokers}
        assert len(logs) == 1
        found = Counter(re.findall(rb"<(?:message|later) \d+>", logs.pop()))
        assert chaos.acknowledged <= found.keys()
        # A delayed message is stored a second time when it is delivered.
        assert {body: count for body, count in found.items() if count != 1 + body.startswith(b"<later")} == {}
        for broker in group.brokers.values():
            assert not broker.parts.store.flags.reasons
