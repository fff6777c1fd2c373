"""A master and its slaves in this process, connected over sockets, without a name server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.kit.brokers import Peer, running
from tests.kit.waiting import until

from cometmq.broker.replication import ha_slave
from cometmq.broker.server import Broker


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(ha_slave, "RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(ha_slave, "COMPARE_INTERVAL_S", 0.2)


class Group:
    """A master and slaves in separate directories; each can be stopped and restarted."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.brokers: dict[str, Broker] = {}
        self.peers: dict[str, Peer] = {}
        self._stacks: dict[str, contextlib.AsyncExitStack] = {}
        self._settings: dict[str, dict[str, str]] = {}

    async def start(self, name: str, settings: dict[str, str]) -> Broker:
        """Start a broker in the directory of its name."""
        self._settings[name] = settings
        stack = self._stacks[name] = contextlib.AsyncExitStack()
        broker, peer = await stack.enter_async_context(running(self.root / name, **settings))
        self.brokers[name], self.peers[name] = broker, peer
        return broker

    async def master(self, **settings: str) -> Broker:
        """Start the master, by default as a SYNC_MASTER."""
        return await self.start("master", {"brokerRole": "SYNC_MASTER", **settings})

    async def slave(self, name: str = "slave", **settings: str) -> Broker:
        """Start a slave that follows the master."""
        role = {"brokerRole": "SLAVE", "brokerId": str(1 + len(self.brokers))}
        broker = await self.start(name, {**role, **settings})
        self.introduce(name)
        return broker

    def introduce(self, name: str) -> None:
        """Give the broker the master's address, as a name server does."""
        master = self.brokers["master"]
        host_port = f"127.0.0.1:{master.parts.registrar.address.ha_port}"
        self.brokers[name].parts.replication.follow(master.addr, host_port)

    async def stop(self, name: str) -> None:
        await self._stacks.pop(name).aclose()

    async def again(self, name: str, **settings: str) -> Broker:
        """Restart a stopped broker."""
        broker = await self.start(name, {**self._settings[name], **settings})
        for slave in self._stacks:
            if slave != "master" and "master" in self._stacks:
                self.introduce(slave)
        return broker

    async def equal(self, name: str = "slave") -> None:
        """Wait until the slave has the master's log and the master has been notified."""
        end = self.end("master")
        await until(lambda: self.end(name) == end)

    async def known(self, count: int = 1) -> None:
        """Wait until `count` slaves have reported the master's whole log."""
        slaves = self.brokers["master"].parts.replication.master.core.slaves
        end = self.end("master")
        await until(lambda: sum(slave.acked == end for slave in slaves.values()) >= count)

    def end(self, name: str) -> int:
        return self.brokers[name].parts.store.log.end

    def log_bytes(self, name: str) -> bytes:
        """Return the whole log, segment by segment."""
        log = self.brokers[name].parts.store.log
        return b"".join(
            bytes(log.read(base, min(log.end - base, log.segment_size)) or b"") for base in log.segments
        )

    async def close(self) -> None:
        for stack in reversed(list(self._stacks.values())):
            await stack.aclose()


@pytest.fixture
async def group(tmp_path, short_pauses) -> AsyncIterator[Group]:
    group = Group(tmp_path)
    yield group
    await group.close()


async def codes(sending: list[Any]) -> list[int]:
    """Return the codes of the responses."""
    return [answer.code for answer in await asyncio.gather(*sending)]
