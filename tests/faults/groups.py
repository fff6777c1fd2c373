"""Three brokers of one name and two name servers as real processes, with proxies on all paths between them.

Brokers, ours or Apache's, are a raft group, or a SYNC_MASTER with two slaves, all with SYNC_FLUSH. There is a
proxy for each pair of servers and direction, so each path can be cut or slowed separately, on every machine.
Clients connect to brokers directly: an isolated broker still gets their requests and must not acknowledge
messages that it may lose.
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
    """A kind of group: three raft members, or n0 as SYNC_MASTER with two slaves; Apache's brokers or ours."""

    raft: bool
    apache: bool = False

    @property
    def title(self) -> str:
        kind = ("DLedger" if self.apache else "raft of three") if self.raft else "SYNC_MASTER, two slaves"
        return f"{'Apache' if self.apache else 'CometMQ'}, {kind}"


class Group:
    """The servers of a layout: the brokers n0 to n2 and the name servers s0 and s1."""

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
        # Slaves copy their master's tables 3 s after their start, and the topic must exist by then.
        wait_until("the topic", self._make_topic, every_s=0.2)
        if not self.layout.raft:
            for name in BROKERS[1:]:
                self.start(name)
        for name in BROKERS:
            listens = partial(wire.listens, self.ports[name])
            self.brokers[name].process.wait_ready("broker listening", listens, 150)
        # Topic settings are not part of the log: a leader that has not copied them yet creates the topic with
        # 8 queues.
        for name in BROKERS:
            wait_until(f"{name} knows the topic", partial(self._knows_topic, name), every_s=0.2)

    def _link(self, source: str, target: str, port: int) -> None:
        proxy = FaultProxy(f"{HOST}:{port}")
        self._run(proxy.start())
        self._resources.callback(lambda: self._run(proxy.stop()))
        self.links[source, target] = proxy

    def wait_for_proxies(self) -> None:
        """Wait until the proxies have executed their commands."""
        self._run(asyncio.sleep(0))

    def _make_topic(self) -> bool:
        try:
            with wire.Connection(self.ports[self.leader()]) as connection:
                Feeder(connection).update_topic(TOPIC, QUEUES)
        except Exception:  # there is no leader, or no longer
            return False
        return True

    def _knows_topic(self, name: str) -> bool:
        try:
            served(self.ports[name], TOPIC, 0)
        except (AssertionError, OSError):
            return False
        return True

    def start(self, name: str) -> None:
        """Start or restart a broker on its port and store."""
        namesrv = ";".join(self.links[name, server].addr for server in NAME_SERVERS)
        settings = {"flushDiskType": "SYNC_FLUSH", "slaveTimeout": "3000", "bindAddress": HOST}
        if self.layout.raft:
            # Peers are reached through a proxy, and a member listens on its own address.
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
        """Return the name of the master or leader according to a name server, or ""."""
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
        """Return the end of a broker's log; -1 while it does not respond."""
        try:
            return int(wire.runtime_info(self.ports[name]).get("commitLogMaxOffset", -1))
        except (OSError, ValueError):
            return -1

    def heal(self) -> None:
        """End all faults and start the stopped servers."""
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
