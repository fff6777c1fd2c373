"""Three brokers of one name and two name servers, as real processes, with a proxy on each way between them.

Brokers, of our make or Apache's, are a raft group, or a SYNC_MASTER with two slaves, all with SYNC_FLUSH.
They reach each other and the name servers through a proxy for each pair and direction, so any of these ways
can be cut or slowed alone, on every machine. Clients reach brokers directly: one that is cut off is still
asked by them, and must not promise what it cannot keep.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.interop import wire
from tests.interop.apache import ApacheBroker, ApacheNamesrv
from tests.interop.comet import CometBroker, CometNamesrv
from tests.interop.store_input import Feeder, served
from tests.kit.waiting import wait_until
from tests.ports import free_port

from cometmq.remoting import loop_in_thread
from cometmq.testing import FaultProxy

HOST = "127.0.0.1"
NAME = "broker-a"
TOPIC = "Orders"
QUEUES = 4
APACHE = "4.9.7"
APACHE_JVM = ["-Xms256m", "-Xmx512m", "-XX:+UseSerialGC"]
SLOW_DISK = Path(__file__).with_name("slow_disk.py")
BROKERS = ("n0", "n1", "n2")
NAME_SERVERS = ("s0", "s1")


@dataclass(frozen=True)
class Layout:
    """raft: three members that elect; else n0 is a SYNC_MASTER, the others its slaves. apache: whose."""

    raft: bool
    apache: bool = False

    @property
    def title(self) -> str:
        kind = ("DLedger" if self.apache else "raft of three") if self.raft else "SYNC_MASTER, two slaves"
        return f"{'Apache' if self.apache else 'CometMQ'}, {kind}"


class Group:
    """The servers of a layout. Brokers are n0 to n2, name servers s0 and s1."""

    def __init__(self, layout: Layout, directory: Path) -> None:
        self.layout = layout
        self._directory = directory
        self._resources = contextlib.ExitStack()
        self._run = self._resources.enter_context(loop_in_thread("failover-proxies"))
        self.ports = {name: free_port() for name in BROKERS}
        self.brokers: dict[str, ApacheBroker | CometBroker] = {}
        self.name_servers: dict[str, ApacheNamesrv | CometNamesrv] = {}
        self.links: dict[tuple[str, str], FaultProxy] = {}
        self._members = {name: free_port() for name in BROKERS} if layout.raft else {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        for name in NAME_SERVERS:
            place = self._directory / name
            self.name_servers[name] = (
                ApacheNamesrv(APACHE, place, port=free_port(), wait=False) if self.layout.apache
                else CometNamesrv(place, port=free_port(), wait=False)
            )  # fmt: skip
        for server in self.name_servers.values():
            server.wait_ready()
        self.namesrv = ";".join(f"{HOST}:{server.port}" for server in self.name_servers.values())
        for source, target in itertools.product(BROKERS, (*BROKERS, *NAME_SERVERS)):
            if target in self.name_servers:
                self._link(source, target, self.name_servers[target].port)
            elif self.layout.raft and source != target:
                self._link(source, target, self._members[target])
            elif target == "n0" and source != target:
                self._link(source, target, self.ports[target] + 1)
        self.start("n0")
        if self.layout.raft:
            for name in BROKERS[1:]:
                self.start(name)
        self.wait_for_leader()
        # Slaves copy the tables of their master 3 s after their start: the topic is to be there by then.
        wait_until("the topic", self._make_topic, every_s=0.2)
        if not self.layout.raft:
            for name in BROKERS[1:]:
                self.start(name)
        for name in BROKERS:
            listens = partial(wire.listens, self.ports[name])
            self.brokers[name].process.wait_ready("broker listening", listens, 150)
        # Settings of a topic are no part of the log: who leads before it has them gives the topic 8 queues.
        for name in BROKERS:
            wait_until(f"{name} knows the topic", partial(self._knows_topic, name), every_s=0.2)

    def _link(self, source: str, target: str, port: int) -> None:
        proxy = FaultProxy(f"{HOST}:{port}")
        self._run(proxy.start())
        self._resources.callback(lambda: self._run(proxy.stop()))
        self.links[source, target] = proxy

    def wait_for_proxies(self) -> None:
        """Until they have done what they were told."""
        self._run(asyncio.sleep(0))

    def _make_topic(self) -> bool:
        try:
            with wire.Connection(self.ports[self.leader()]) as connection:
                Feeder(connection).update_topic(TOPIC, QUEUES)
        except Exception:  # nobody leads, or no longer
            return False
        return True

    def _knows_topic(self, name: str) -> bool:
        try:
            served(self.ports[name], TOPIC, 0)
        except (AssertionError, OSError):
            return False
        return True

    def start(self, name: str) -> None:
        """Start a broker, also again after its end, on its port and store."""
        namesrv = ";".join(self.links[name, server].addr for server in NAME_SERVERS)
        settings = {"flushDiskType": "SYNC_FLUSH", "slaveTimeout": "3000", "bindAddress": HOST}
        if self.layout.raft:
            # Others go through a proxy; a member listens on its own address.
            peers = [
                f"{each}-{HOST}:{port}" if each == name else f"{each}-{self.links[name, each].addr}"
                for each, port in self._members.items()
            ]
            settings |= {
                "enableDLegerCommitLog": "true", "dLegerGroup": NAME, "dLegerPeers": ";".join(peers),
                "dLegerSelfId": name,
            }  # fmt: skip
        elif name == "n0":
            settings |= {"brokerRole": "SYNC_MASTER"}
        else:
            ha = self.links[name, "n0"].addr
            settings |= {"brokerRole": "SLAVE", "brokerId": name[1:], "haMasterAddress": ha}
        place, port = self._directory / name, self.ports[name]
        if self.layout.apache:
            self.brokers[name] = ApacheBroker(
                APACHE, place, namesrv, name=NAME, port=port, settings=settings, jvm=APACHE_JVM, wait=False
            )
        else:
            self.brokers[name] = CometBroker(
                place, namesrv, name=NAME, port=port, settings=settings, launcher=[str(SLOW_DISK)], wait=False
            )

    def alive(self, name: str) -> bool:
        return self.brokers[name].process.running

    def leader(self) -> str:
        """Who is the master, or the leader, by one of the name servers; nobody: ""."""
        for server in self.name_servers.values():
            with contextlib.suppress(OSError):
                _, body = wire.call(server.port, wire.GET_BROKER_CLUSTER_INFO)
                found = re.search(rb'\b"?0"?:"127\.0\.0\.1:(\d+)"', body)
                for name, port in self.ports.items():
                    if found and int(found[1]) == port:
                        return name
        return ""

    def wait_for_leader(self) -> str:
        return wait_until("a leader", self.leader, 150, 0.1)

    def end(self, name: str) -> int:
        """Where the log of a broker ends; -1 while it does not say."""
        try:
            return int(wire.runtime_info(self.ports[name]).get("commitLogMaxOffset", -1))
        except (OSError, ValueError):
            return -1

    def heal(self) -> None:
        """End all faults; start what does not run."""
        for proxy in self.links.values():
            proxy.heal()
        for name in BROKERS:
            (self._directory / name / "slow").unlink(missing_ok=True)
            if self.alive(name):
                os.kill(self.brokers[name].pid, signal.SIGCONT)
            else:
                self.start(name)

    def place(self, name: str) -> Path:
        return self._directory / name

    def close(self) -> None:
        for server in (*self.brokers.values(), *self.name_servers.values()):
            if server.process.running:
                server.kill()
        self._resources.close()
