"""The name server: its sockets, clock and files. The routes themselves are in `tables`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Hashable, Iterator

from cometmq import logs
from cometmq.errors import ConfigError
from cometmq.metrics import Families, MetricsExporter
from cometmq.namesrv.config import NamesrvConfig, RunningConfig
from cometmq.namesrv.kv import KvFile, KvTables, read_file
from cometmq.namesrv.requests import RequestProcessor
from cometmq.namesrv.tables import RouteTables
from cometmq.periodic import Periodic
from cometmq.protocol.codes import handlers_of
from cometmq.remoting import Connection, Limits, RemotingServer, ServerTls, listen, server_tls

log = logs.logger(__name__)


def monotonic_ms() -> int:
    """Return the monotonic time in ms. It never jumps, so no change of the system time expires brokers."""
    return time.monotonic_ns() // 1_000_000


class NameServer:
    """A name server with `start()` and `stop()`. After the start, `port` is the port that it listens on."""

    def __init__(
        self, config: NamesrvConfig | None = None, *, now_ms: Callable[[], int] = monotonic_ms
    ) -> None:
        self.port = 0
        self.tables = RouteTables()
        self._config = RunningConfig(config if config is not None else NamesrvConfig())
        self._now_ms = now_ms
        self._kv_file: KvFile | None = None
        self._server: RemotingServer | None = None
        self._tls: ServerTls | None = None
        self._scans: Periodic | None = None
        self.metrics: MetricsExporter | None = None

    @property
    def config(self) -> NamesrvConfig:
        return self._config.now

    async def start(self) -> int:
        """Load the key-value configuration, listen, and return the port.

        Raises OSError, BodyError for an invalid key-value file, and ConfigError for an invalid setting.
        """
        config = self.config
        config.check()
        if config.log_level:
            logs.use_levels(config.log_level)
        path = config.kv_config_path
        try:
            content = await asyncio.to_thread(read_file, path)
        except OSError as error:
            expected = f"a file that can be read ({error.strerror or error})"
            raise ConfigError("kvConfigPath", path, expected) from error
        if await asyncio.to_thread(os.path.isdir, config.config_store_path):
            raise ConfigError("configStorePath", config.config_store_path, "a file, not a directory")
        kv_file = KvFile(path, KvTables() if content is None else KvTables.from_json(content))
        tls = await server_tls(config.tls_server_mode, config.tls_config_file)
        server = RemotingServer(
            handlers_of(RequestProcessor(self.tables, kv_file, self._config, self._now_ms)),
            on_close=self._connection_closed,
            limits=Limits(idle_s=config.server_channel_max_idle_time_seconds),
            tls=tls,
        )
        self.port = await listen(server, config.bind_address, config.listen_port)
        self._server, self._kv_file = server, kv_file
        self._tls = tls
        if tls is not None:
            tls.start()
        self._scans = Periodic(
            asyncio.get_running_loop(),
            lambda: self.config.scan_not_active_broker_interval / 1000,
            self.scan,
            name="scan for silent brokers",
        )
        self._scans.start()
        # A name server is ready even before brokers have registered.
        self.metrics = MetricsExporter(config, config.bind_address, self._collect, lambda: "")
        await self.metrics.start()
        log.info("name server listens on %s:%d", config.bind_address, self.port)
        return self.port

    async def stop(self, drain_s: float = 3.0) -> None:
        """Finish requests within `drain_s` seconds, close all connections, and write unsaved changes."""
        if self.metrics is not None:
            await self.metrics.stop()
        if self._scans is not None:
            self._scans.cancel()
        if self._tls is not None:
            await self._tls.stop()
        if self._server is not None:
            await self._server.stop(drain_s)
            self._server = None
        if self._kv_file is not None:
            try:
                await self._kv_file.save()
            except OSError as error:  # the client that made the change has received this error already
                log.error("cannot write the key-value configuration: %s", error)

    async def _collect(self, families: Families) -> None:
        """Add the metrics to `families`."""
        live, now = self.tables.live(), self._now_ms()
        for name, words, value in (
            ("brokers", "Registered brokers.", len(live)),
            ("topics", "Topics with a route.", self.tables.topic_count),
            ("connections", "Open connections.", len(self._server.connections) if self._server else 0),
        ):
            families.gauge(f"cometmq_namesrv_{name}", words, value)
        for addr, seen_ms in sorted(live.items()):
            families.gauge(
                "cometmq_namesrv_broker_silent_seconds", "Time since a broker's last registration.",
                (now - seen_ms) / 1000, broker=addr,
            )  # fmt: skip

    def scan(self) -> None:
        """Remove brokers that have sent nothing for longer than their timeout."""
        self._remove(self.tables.scan(self._now_ms()), "was silent for too long")

    def _connection_closed(self, connection: Connection) -> None:
        lost = ((addr, None) for addr in self.tables.connection_lost(connection))
        self._remove(lost, "lost its connection")

    def _remove(self, gone: Iterator[tuple[str, Hashable]], why: str) -> None:
        """Remove the brokers in `gone`, one per iteration of the event loop, to avoid blocking the loop."""
        removed = next(gone, None)
        if removed is None:
            return
        addr, connection = removed
        log.warning("broker %s %s and is removed", addr, why)
        if isinstance(connection, Connection):
            connection.close()
        asyncio.get_running_loop().call_soon(self._remove, gone, why)
