"""A whole cluster on this machine: a name server and one or more brokers, on 127.0.0.1.

A single broker shares one process and one event loop with the name server. Several brokers are child
processes, because one Python event loop uses only one core. The ports of two successive brokers differ by 10.
Each broker has its store in DIR/<broker>, and the queues are spread over the brokers. The segments are small.
A broker.conf beside each store contains their sizes, because Apache's broker needs the exact sizes to open
the store.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.server import Broker
from cometmq.broker_process import make_broker
from cometmq.errors import CometError
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer
from cometmq.periodic import Running
from cometmq.private import make_private_directory
from cometmq.protocol.codes import DEFAULT_BROKER_PORT, DEFAULT_NAMESRV_PORT
from cometmq.remoting import loop_in_thread
from cometmq.settings import properties_of, settings_of, with_values
from cometmq.store import SMALL_FILES, WIRE_NAMES, Disk, StoreConfig, read_file, replace_file

log = logs.logger(__name__)

HOST = "127.0.0.1"
CLUSTER = "DefaultCluster"
PORT_STEP = 10
CHILD_READY_S = 30.0
CHILD_STOP_S = 15.0
CONF = "broker.conf"
# Settings that describe the files of a store, so they must be the same in each run.
SIZES = frozenset(WIRE_NAMES[field] for field in SMALL_FILES)


class StandaloneError(CometError):
    """A part of the cluster failed to start."""


class Standalone(Running):
    """A name server and brokers. Use `async with`, `start` and `stop`, or `run_in_thread` in blocking code.

    Args:
        data_dir: The directory that contains the files of the name server and of all brokers.
        settings: Further broker settings by RocketMQ's keys. For this run, they override the broker.conf of
            an existing store. Only the file sizes among them are also written to broker.conf.
        disk: The disk to which the broker.conf of each broker is written.
        host: Address that all servers listen on.
        grpc_port: Port of the first broker for 5.x clients; those of the next brokers are 10, 20, … higher.
            -1: none.

    A port of 0 means any free port.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        namesrv_port: int = DEFAULT_NAMESRV_PORT,
        broker_port: int = DEFAULT_BROKER_PORT,
        brokers: int = 1,
        settings: Mapping[str, str] | None = None,
        disk: Disk | None = None,
        host: str = HOST,
        grpc_port: int = -1,
    ) -> None:
        self.data_dir = os.fspath(data_dir)
        self.namesrv_addr = ""
        self.broker_addrs: dict[str, str] = {}
        self._host = host
        self._namesrv_port = namesrv_port
        self._broker_port = broker_port
        self._grpc_port = grpc_port
        self._count = brokers
        self._settings = dict(settings or {})
        self._disk = disk if disk is not None else Disk()
        self._namesrv: NameServer | None = None
        self.broker: Broker | None = None
        self.children: list[BrokerChild] = []

    async def start(self) -> None:
        """Start the name server, then all brokers. After a failure, all started servers are stopped.

        Raises OSError, StoreError, ConfigError or StandaloneError.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        directory = os.path.join(self.data_dir, "namesrv")
        make_private_directory(directory)
        self._namesrv = NameServer(
            NamesrvConfig(
                listen_port=self._namesrv_port,
                bind_address=self._host,
                kv_config_path=os.path.join(directory, "kvConfig.json"),
                config_store_path=os.path.join(directory, "namesrv.properties"),
            )
        )
        self.namesrv_addr = f"{self._host}:{await self._namesrv.start()}"
        confs = [self.prepare(number) for number in range(self._count)]
        if len(confs) == 1:
            name, path, properties = confs[0]
            self.broker = make_broker(BrokerConfig.from_properties(properties))
            with settings_of(path, self._settings):
                await self.broker.start()
            self.broker_addrs[name] = self.broker.addr
            return
        self.children = [BrokerChild(name, path, self._settings) for name, path, _ in confs]
        await asyncio.gather(*(child.start() for child in self.children))
        self.broker_addrs = {child.name: child.addr for child in self.children}

    def prepare(self, number: int) -> tuple[str, str, dict[str, str]]:
        """Write the broker.conf of the n-th broker. Return its name, the file's path and all settings.

        Raises StandaloneError, ConfigError or OSError.
        """
        name = broker_name(number)
        root = os.path.join(self.data_dir, name)
        make_private_directory(root)
        path = os.path.join(os.path.abspath(root), CONF)
        data, before = b"", dict[str, str]()
        try:
            data = read_file(self._disk, path)
            properties = properties_of(data, path)
            before = dict(properties)
        except FileNotFoundError:
            properties = small_files()
        if not properties:
            if self._disk.listdir(os.path.join(root, "commitlog")):
                raise StandaloneError(
                    f"{path} is empty, but its directory contains a store, whose file sizes are needed. "
                    "Write mappedFileSizeCommitLog, mappedFileSizeConsumeQueue, maxHashSlotNum and "
                    "maxIndexNum to the file, or remove it if the sizes are the defaults of `standalone`"
                )
            properties = small_files()
        properties |= {
            "brokerName": name,
            "brokerClusterName": CLUSTER,
            "brokerId": "0",
            "brokerIP1": self._host,
            "listenPort": str(self._broker_port + number * PORT_STEP if self._broker_port else 0),
            "bindAddress": self._host,
            "namesrvAddr": self.namesrv_addr,
            "storePathRootDir": root,
            "brokerConfigPath": path,
        }
        if self._grpc_port >= 0 or "grpcPort" in properties:
            step = number * PORT_STEP if self._grpc_port > 0 else 0
            properties["grpcPort"] = str(self._grpc_port + step)
        properties |= {key: text for key, text in self._settings.items() if key in SIZES}
        complete = {**properties, **self._settings}
        with settings_of(path, self._settings, data):
            # Raises ConfigError for an invalid setting, so that no invalid setting is written to the file.
            BrokerConfig.from_properties(complete)
        changed = {key: text for key, text in properties.items() if before.get(key) != text}
        if changed:
            replace_file(self._disk, path, with_values(data, changed))
        return name, path, complete

    async def stop(self) -> None:
        """Stop the brokers first, so that they can unregister, then the name server."""
        children, self.children = self.children, []
        await asyncio.gather(*(child.stop() for child in children))
        broker, self.broker = self.broker, None
        if broker is not None:
            await broker.stop()
        namesrv, self._namesrv = self._namesrv, None
        if namesrv is not None:
            await namesrv.stop()

    @contextmanager
    def run_in_thread(self, timeout_s: float = 30.0) -> Iterator[Standalone]:
        """Run the cluster in a thread with its own event loop while the `with` block runs."""
        with loop_in_thread("cometmq-standalone", timeout_s) as run:
            run(self.start())
            try:
                yield self
            finally:
                run(self.stop())


@dataclass(slots=True, eq=False)
class BrokerChild:
    """A broker in a child process. The child process ends at the latest when this process ends."""

    name: str
    _conf: str
    _settings: Mapping[str, str]
    addr: str = ""
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process and wait until the broker is ready."""
        command = [sys.executable, "-m", "cometmq.broker_process", "-c", self._conf, "--with-parent"]
        for key, text in self._settings.items():
            command += ["-s", f"{key}={text}"]
        self.process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), CHILD_READY_S)
        except TimeoutError:
            raise StandaloneError(f"{self.name} was not ready within {CHILD_READY_S:g} s") from None
        if not line:
            code = await self.process.wait()
            problem = f"{self.name} ended with exit code {code} before it served; see its log above"
            raise StandaloneError(problem)
        self.addr = json.loads(line)["addr"]

    async def stop(self) -> None:
        """Terminate the process, and kill it after a timeout."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), CHILD_STOP_S)
        except TimeoutError:
            log.error("%s did not stop within %g s and was killed", self.name, CHILD_STOP_S)
            process.kill()
            await process.wait()


def broker_name(number: int) -> str:
    """Return the name of the n-th broker: broker-a, broker-b … broker-z, broker-aa and so on."""
    letters = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return f"broker-{letters}"


def small_files() -> dict[str, str]:
    """Return the small segment sizes for standalone clusters as settings."""
    sized = StoreConfig().replace(**SMALL_FILES).to_properties()
    plain = StoreConfig().to_properties()
    return {key: value for key, value in sized.items() if value != plain[key]}
