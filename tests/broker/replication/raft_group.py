"""A name server and the members of a raft group in this process, connected over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Self
from unittest import mock

from tests.kit.brokers import Peer
from tests.kit.waiting import until
from tests.ports import HOST, free_port

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.replication import raft_member
from cometmq.broker.server import Broker
from cometmq.broker_process import make_broker
from cometmq.clock import boottime
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer
from cometmq.protocol.bodies.admin import RaftStatus
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers.admin import ChangeRaftGroupHeader
from cometmq.raft import RaftOptions
from cometmq.standalone import small_files

OPTIONS = RaftOptions(heartbeat_ms=50, election_ms=900)
"""Raft timeouts. A busy machine may suspend this process, and so all members, for some tenths of a second.

With a shorter election timeout the leadership would move without a fault.
"""
ELECTION_S = 2 * OPTIONS.election_ms / 1000
"""The longest time, in seconds, that a member waits for a leader."""


class RaftGroup:
    """The members n0, n1 and n2; each can be stopped, killed and restarted."""

    def __init__(self, root: Path, count: int = 3, **settings: str) -> None:
        self.root = root
        self.addresses = {f"n{number}": f"{HOST}:{free_port()}" for number in range(count)}
        self.settings = settings
        self.brokers: dict[str, Broker] = {}
        self.peers: dict[str, Peer] = {}
        self._ports: dict[str, int] = {}
        self._leader = ""
        self._namesrv = NameServer(
            NamesrvConfig(
                listen_port=0,
                bind_address=HOST,
                kv_config_path=str(root / "kvConfig.json"),
                config_store_path=str(root / "namesrv.properties"),
            )
        )
        self.namesrv = ""

    async def __aenter__(self) -> Self:
        self.namesrv = f"{HOST}:{await self._namesrv.start()}"
        await self.start_all()
        # A new member votes once the group has begun. If the leader stopped before, too few would vote.
        await until(lambda: not any(map(self.is_suspect, self.brokers)))
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            await self.stop_all()
        await self._namesrv.stop()

    async def start_all(self) -> None:
        """Start all members, and let one of them become the leader immediately."""
        await asyncio.gather(*map(self.start, self.addresses))
        await self._elect()

    async def stop_all(self) -> None:
        """Stop all members. The leader does not wait for a successor."""
        with mock.patch.object(raft_member, "HANDOFF_TIMEOUT_S", 0.01):
            await asyncio.gather(*(self.stop(member) for member in list(self.brokers)))

    async def _elect(self) -> None:
        """Let members stand for election until one leads, without waiting for an election timeout."""
        members = [broker.parts.replication.member for broker in self.brokers.values()]
        for _ in range(20):  # the first attempts precede the members' connections
            if any(member.node.leader for member in members):
                return
            candidate = random.choice(members)
            for timeouts in (1, 2):
                candidate.node.tick(int(boottime() * 1000) + timeouts * OPTIONS.election_ms)
            candidate.turn()
            await asyncio.sleep(0.05)

    async def start(self, member: str, **settings: str) -> Broker:
        """Start or restart a member."""
        own = {
            **small_files(),
            "brokerName": "broker-a",
            "brokerIP1": HOST,
            "bindAddress": HOST,
            "listenPort": str(self._ports.setdefault(member, free_port())),
            "vipChannelEnable": "false",
            "namesrvAddr": self.namesrv,
            "storePathRootDir": str(self.root / member),
            "enableDLegerCommitLog": "true",
            "dLegerGroup": "broker-a",
            "dLegerPeers": ";".join(f"{name}-{addr}" for name, addr in self.addresses.items()),
            "dLegerSelfId": member,
        }
        broker = make_broker(BrokerConfig.from_properties({**own, **self.settings, **settings}))
        await broker.start()
        self.brokers[member] = broker
        self.peers[member] = Peer(broker.addr)
        return broker

    async def stop(self, member: str) -> None:
        await self.peers.pop(member).remoting.close()
        await self.brokers.pop(member).stop(0.5)

    def wipe(self, member: str) -> None:
        """Delete the disk of a stopped member."""
        shutil.rmtree(self.root / member)

    def leads(self, member: str) -> bool:
        replication = self.brokers[member].parts.replication
        return replication.facts()["brokerRole"] == "SYNC_MASTER" and replication.serves

    def is_suspect(self, member: str) -> bool:
        """Return whether a member does not vote, because its log may be incomplete."""
        return self.brokers[member].parts.replication.facts()["raftSuspect"] == "true"

    async def leader(self) -> str:
        """Return the name of the member that accepts sends."""
        await until(lambda: any(map(self.leads, self.brokers)))
        self._leader = next(filter(self.leads, self.brokers))
        return self._leader

    def followers(self) -> list[str]:
        """Return all members but the one that `leader` found."""
        return [member for member in self.brokers if member != self._leader]

    async def status(self, member: str) -> RaftStatus:
        answer = await self.peers[member].call(RequestCode.GET_RAFT_STATUS)
        return RaftStatus.decode(answer.body)

    async def change(self, member: str, action: str, whom: str) -> Frame:
        header = ChangeRaftGroupHeader(action=action, member=whom)
        return await self.peers[member].call(RequestCode.CHANGE_RAFT_GROUP, header)

    async def hand_over(self, to: str, done: Callable[[], bool] | None = None) -> None:
        """Hand the leadership to a member, or wait until `done` holds.

        A leader aborts a handoff after an election timeout, and so does a target whose disk was slow. The
        current leader is then asked again.
        """
        done = done or (lambda: self.leads(to))
        async with asyncio.timeout(30):
            while not done():
                leader = next(filter(self.leads, self.brokers), to)
                if leader != to:
                    await self.change(leader, "transfer", to)
                with contextlib.suppress(AssertionError):
                    await until(done, within_s=ELECTION_S)

    async def equal(self) -> None:
        """Wait until all members have the same log, fully committed."""
        ledgers = [broker.parts.store.raft_log for broker in self.brokers.values()]
        await until(lambda: len({(each.last, each.committed) for each in ledgers}) == 1)

    def log_bytes(self, member: str) -> bytes:
        files = sorted((self.root / member / f"dledger-{member}" / "data").iterdir())
        end = self.brokers[member].parts.store.log.end
        return b"".join(path.read_bytes() for path in files)[:end]
