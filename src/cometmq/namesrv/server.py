"""The name server as a process part: sockets, clock and files around the tables."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator

from cometmq import logs
from cometmq.errors import ConfigError
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.kv import KvTables, read_file, write_file
from cometmq.namesrv.requests import RequestProcessor
from cometmq.namesrv.tables import Expired, RouteTables
from cometmq.protocol.java_properties import format_properties
from cometmq.remoting import Connection, Limits, RemotingServer, listen

log = logs.logger(__name__)


def monotonic_ms() -> int:
    """Milliseconds of a clock that nobody sets: who is alive must not depend on the time of day."""
    return time.monotonic_ns() // 1_000_000


class NameServer:
    """A name server: `await start()`, `await stop()`; `port` is where it listens."""

    def __init__(
        self, config: NamesrvConfig | None = None, *, now_ms: Callable[[], int] = monotonic_ms
    ) -> None:
        self.config = config if config is not None else NamesrvConfig()
        self.port = 0
        self._now_ms = now_ms
        self._tables = RouteTables(
            delete_topics_missing_in_registration=self.config.delete_topic_with_broker_registration
        )
        self._kv = KvTables()
        self._kv_written = 0
        self._file_lock = asyncio.Lock()
        self._server: RemotingServer | None = None
        self._scan_timer: asyncio.TimerHandle | None = None

    async def start(self) -> int:
        """Load the key-value configuration and listen. Returns the port. Raises OSError, BodyError,
        ConfigError."""
        self.config.check()
        path = self.config.kv_config_path
        try:
            content = await asyncio.to_thread(read_file, path)
        except OSError as error:
            expected = f"a file that can be read ({error.strerror or error})"
            raise ConfigError("kvConfigPath", path, expected) from error
        if await asyncio.to_thread(os.path.isdir, self.config.config_store_path):
            raise ConfigError("configStorePath", self.config.config_store_path, "a file, not a directory")
        if content is not None:
            self._kv = KvTables.from_json(content)
        processor = RequestProcessor(self._tables, self._kv, self, self._now_ms)
        self._server = RemotingServer(
            processor.handlers(),
            on_close=self._connection_closed,
            limits=Limits(idle_s=self.config.server_channel_max_idle_time_seconds),
        )
        self.port = await listen(self._server, self.config.bind_address, self.config.listen_port)
        self._schedule_scan()
        log.info("name server listens on %s:%d", self.config.bind_address, self.port)
        return self.port

    async def stop(self, drain_s: float = 3.0) -> None:
        """Finish what is being answered, close all connections, write what is not written yet."""
        if self._scan_timer is not None:
            self._scan_timer.cancel()
            self._scan_timer = None
        if self._server is not None:
            await self._server.stop(drain_s)
            self._server = None
        try:
            await self.save_kv()
        except OSError as error:  # whoever put the value was told already
            log.error("cannot write the key-value configuration: %s", error)

    # -- what requests need from the shell

    def set_config(self, config: NamesrvConfig) -> None:
        """Go on with another configuration; ports and paths stay as they are until the next start."""
        self.config = config
        self._tables.delete_missing = config.delete_topic_with_broker_registration

    async def save_config(self) -> None:
        """Write the configuration to configStorePath. Raises OSError."""
        async with self._file_lock:
            content = format_properties(self.config.to_properties()).encode()
            await asyncio.to_thread(write_file, self.config.config_store_path, content)

    async def save_kv(self) -> None:
        """Write the key-value configuration if it changed since it was written. Raises OSError."""
        # One writer at a time, and each writes what holds when its turn comes: an older state never wins.
        async with self._file_lock:
            generation = self._kv.generation
            if generation != self._kv_written:
                await asyncio.to_thread(write_file, self.config.kv_config_path, self._kv.to_json())
                self._kv_written = generation

    # -- time and connections

    def _schedule_scan(self) -> None:
        period_s = self.config.scan_not_active_broker_interval / 1000
        self._scan_timer = asyncio.get_running_loop().call_later(period_s, self._scan)

    def _scan(self) -> None:
        self._schedule_scan()
        self._remove_silent(self._tables.scan(self._now_ms()))

    def _remove_silent(self, expired: Iterator[Expired]) -> None:
        for gone in expired:
            log.warning("broker %s was silent for too long and is removed", gone.broker_addr)
            if isinstance(gone.connection, Connection):
                gone.connection.close()
            asyncio.get_running_loop().call_soon(self._remove_silent, expired)
            return

    def _connection_closed(self, connection: Connection) -> None:
        self._remove_lost(self._tables.connection_lost(connection))

    def _remove_lost(self, lost: Iterator[str]) -> None:
        for addr in lost:
            log.warning("broker %s lost its connection and is removed", addr)
            asyncio.get_running_loop().call_soon(self._remove_lost, lost)
            return
