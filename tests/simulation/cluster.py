"""The machines of a run: clients, and real name servers and brokers, each a process on a simulated host."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tests.simulation.disks import SimulatedDisk
from tests.simulation.network import Network
from tests.simulation.scheduler import OWNER, Pool, Process, Scheduler, patched_time, wall_s

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.replication import raft
from cometmq.broker.server import Broker
from cometmq.errors import ClientStateError
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer
from cometmq.protocol.codes import MASTER_ID
from cometmq.raft import RaftOptions
from cometmq.store import SLAVE, Clock, MessageStore

NAMESRV_PORT, BROKER_PORT = 9876, 10911
SMALL = {
    "mappedFileSizeCommitLog": "2048",
    "mappedFileSizeConsumeQueue": "160",
    "maxHashSlotNum": "11",
    "maxIndexNum": "24",
    "defaultTopicQueueNums": "2",
    "maxMessageSize": "1024",
    "vipChannelEnable": "false",
    "brokerFastFailureEnable": "false",
    "waitTimeMillsInSendQueue": "60000",
    "registerNameServerPeriod": "10000",
    "transactionCheckInterval": "3000",
    "transactionTimeOut": "2000",
    "flushConsumerOffsetInterval": "1000",
    "haSendHeartbeatInterval": "1000",
    "haHousekeepingInterval": "4000",
    "syncFlushTimeout": "2000",
    "slaveTimeout": "1000",
}
"""Settings with small files, so that every run starts new files, and with short waits."""
INDEX_SIZE = 16 * 32
"""Bytes per index file of a raft log."""


class HostClock(Clock):
    """The store's Clock on a simulated host."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def time_ms(self) -> int:
        return int(wall_s(self._scheduler) * 1000)

    def monotonic(self) -> float:
        return 1000.0 + self._scheduler.now

    def boottime(self) -> float:
        return 1000.0 + self._scheduler.now


class Machine:
    """A host with at most one process."""

    def __init__(self, cluster: Cluster, name: str, host: str) -> None:
        self.cluster = cluster
        self.name = name
        self.host = host
        self.process: Process | None = None
        self.wall_offset_s = 0.0
        cluster.machines.append(self)

    @property
    def up(self) -> bool:
        return self.process is not None

    def start(self) -> asyncio.Task[None]:
        """Start the process; the task ends when it serves requests or its start has failed."""
        process = self.process = Process(self.cluster.scheduler, self.name, self.host)
        process.wall_offset_s = self.wall_offset_s
        return process.spawn(self._start(process))

    async def _start(self, process: Process) -> None:
        raise NotImplementedError

    def kill(self, *, power: bool = False) -> None:
        """End the process immediately, as kill -9 does.

        With `power` its disk also loses data that was not synced.
        """
        process, self.process = self.process, None
        if process is None:
            return
        self.cluster.seen["power loss" if power else "kill"] += 1
        process.kill()
        self.cluster.network.lose_process(process, silently=power)

    def step_clock(self, seconds: float) -> None:
        """Set the host's wall clock."""
        self.cluster.seen["clock step"] += 1
        self.wall_offset_s += seconds
        if self.process is not None:
            self.process.wall_offset_s = self.wall_offset_s


class NameServerMachine(Machine):
    """A machine that runs a name server, which loses its routes when it restarts."""

    server: NameServer

    async def _start(self, process: Process) -> None:
        files = {"kv_config_path": "/nowhere/kv", "config_store_path": "/nowhere/namesrv"}
        config = NamesrvConfig(listen_port=NAMESRV_PORT, bind_address=self.host, **files)
        self.server = NameServer(config)
        await self.server.start()

    def knows(self, broker: Broker) -> bool:
        """Return whether the name server has this broker registered as a master."""
        config = broker.config
        known = self.server.tables.member_group(config.broker_cluster_name, config.broker_name)
        return known.broker_addrs.get(MASTER_ID) == broker.addr


class BrokerMachine(Machine):
    """A broker and its disk. `settings` apply at its next start."""

    def __init__(self, cluster: Cluster, name: str, host: str, settings: dict[str, str]) -> None:
        super().__init__(cluster, name, host)
        self.settings = settings
        self._root = f"/{cluster.scheduler.seed}/{name}-{host}"  # a separate store for each run
        self._had = 0
        self.disk = SimulatedDisk(cluster.scheduler.chance, cluster.seen)
        self._made: Broker | None = None
        self._stopping: MessageStore | None = None
        self.failure: Exception | None = None
        """The exception of the last start, if it failed."""
        self.starts = 0

    async def _start(self, process: Process) -> None:
        self.starts += 1
        self.failure = None
        properties = {
            **SMALL,
            "brokerName": self.name,
            "brokerClusterName": "c",
            "brokerId": "0",
            "brokerIP1": self.host,
            "brokerIP2": self.host,
            "bindAddress": self.host,
            "listenPort": str(BROKER_PORT),
            "namesrvAddr": ";".join(self.cluster.namesrv),
            "storePathRootDir": self._root,
            **self.settings,
        }
        broker = self._made = Broker(
            BrokerConfig.from_properties(properties), disk=self.disk, clock=HostClock(self.cluster.scheduler)
        )
        try:
            await broker.start()
        except Exception as failure:  # a failed start is a valid outcome
            self.failure, self._made = failure, None
            if process.alive:
                self.process = None
                process.kill()
                self.cluster.network.lose_process(process, silently=False)
            return

    @property
    def broker(self) -> Broker | None:
        """The broker, or None while its store is not open."""
        if self._made is not None:
            with contextlib.suppress(ClientStateError):
                self._made.parts  # noqa: B018 - raises as long as there are none
                return self._made
        return None

    @property
    def slave(self) -> bool:
        return self.settings.get("brokerRole") == SLAVE

    @property
    def store(self) -> MessageStore:
        assert self.broker is not None
        return self.broker.parts.store

    @property
    def safe(self) -> int:
        """Log end that is as safe as the flush mode promises; while the broker is stopped, the last one."""
        if self.broker is None and self._stopping is None:
            return self._had
        store = self._stopping or self.store
        return min(store.flusher.flushed, store.log.end) if store.config.sync_flush else store.log.end

    def move(self) -> None:
        """Give the broker another address from its next start on."""
        self.cluster.seen["move"] += 1
        self.host = self.cluster.new_host()

    def kill(self, *, power: bool = False) -> None:
        """Kill the process (see Machine).

        No effect until its store is open, because opening it is one step.
        """
        if self.broker is None:
            return
        super().kill(power=power)
        self._had = self.safe
        store, self._made = self.store, None
        after = self.disk.after_power_loss() if power else self.disk
        store.crash()
        self.disk = after

    def stop(self, stopped: Callable[[], object]) -> None:
        """Stop the broker cleanly, then call `stopped`. No effect unless its store is open.

        During the stop it can neither be killed nor started.
        """
        if self.broker is None or self.process is None:
            return
        self.cluster.seen["clean stop"] += 1
        store, broker, self._made = self.store, self.broker, None
        self._stopping = store

        def ended(task: asyncio.Task[None]) -> None:
            self._had, self._stopping = self.safe, None
            store.crash()  # without effect, unless the stop has failed
            process, self.process = self.process, None
            assert process is not None
            process.kill()
            self.cluster.network.lose_process(process, silently=False)
            if (failure := task.exception()) is not None and not isinstance(failure, OSError):
                self.cluster.scheduler.failures.append(failure)
            stopped()

        self.process.spawn(broker.stop()).add_done_callback(ended)

    @property
    def stopping(self) -> bool:
        return self._stopping is not None

    def lose_disk(self) -> None:
        """Replace the machine's disk with an empty one."""
        self.kill(power=True)
        if not self.up:
            self.cluster.seen["lost disk"] += 1
            self.disk = SimulatedDisk(self.cluster.scheduler.chance, self.cluster.seen)


class Cluster:
    """All machines and their network. The method `world` makes code run in their simulated environment."""

    def __init__(self, seed: int) -> None:
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler)
        self.scheduler.connections = self.network
        self.seen: Counter[str] = self.network.seen
        self.machines: list[Machine] = []
        self.name_servers: list[NameServerMachine] = []
        self.brokers: list[BrokerMachine] = []
        self._hosts = 0

    def new_host(self) -> str:
        self._hosts += 1
        return f"127.99.0.{self._hosts}"

    @property
    def namesrv(self) -> list[str]:
        """Addresses of the name servers."""
        return [f"{each.host}:{NAMESRV_PORT}" for each in self.name_servers]

    def add_name_server(self) -> NameServerMachine:
        machine = NameServerMachine(self, f"namesrv-{len(self.name_servers)}", self.new_host())
        self.name_servers.append(machine)
        return machine

    def add_broker(self, name: str, **settings: str) -> BrokerMachine:
        machine = BrokerMachine(self, name, self.new_host(), settings)  # a slave has its master's name
        self.brokers.append(machine)
        return machine

    def client(self, name: str) -> Process:
        """Create a process for clients, on a host of its own."""
        return Process(self.scheduler, name, self.new_host())

    def heal(self) -> None:
        """End all faults and start the stopped machines."""
        network = self.network
        network.heal()
        network.loss = 0.0
        network.delay_s = 0.0005
        for broker in self.brokers:
            broker.disk.heal()
        for machine in self.machines:
            if machine.process is None:
                machine.start()
            elif machine.process.paused:
                machine.process.resume()

    @contextlib.contextmanager
    def world(self) -> Iterator[None]:
        """Simulate time, threads and network while the block runs."""

        def pool(_threads: int, name: str) -> Pool:
            owner = OWNER.get()
            disk = next((each.disk for each in self.brokers if owner and each.host == owner.host), None)
            slow = name == "cometmq-flush" and disk is not None
            return Pool(self.scheduler, _delay(disk) if slow and disk else lambda: 0.0003)

        with (
            patched_time(self.scheduler),
            mock.patch("cometmq.store.background.upkeep.ThreadPoolExecutor", pool),
            mock.patch("cometmq.store.raft_log.entry_index.FILE_SIZE", INDEX_SIZE),
            mock.patch("cometmq.broker.base.protection.MEASURE_INTERVAL_S", 0.5),
            mock.patch("cometmq.remoting.connection.monotonic", self.scheduler.time),
            mock.patch("os.getpid", return_value=4711),
            mock.patch("random.SystemRandom", return_value=self.scheduler.chance),
            mock.patch.object(raft, "OPTIONS", RaftOptions(heartbeat_ms=150, election_ms=450)),
            mock.patch("secrets.randbits", self.scheduler.chance.getrandbits),
        ):
            try:
                yield
            finally:
                for broker in self.brokers:
                    broker.kill()


def _delay(disk: Any) -> Callable[[], float]:
    return lambda: disk.sync_s * (0.5 + disk.chance.random())
