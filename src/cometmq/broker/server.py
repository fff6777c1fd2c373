"""A broker: store, tables and processors put together, listening, registered, and stopped in order.

The order of a start: store (recovered), tables from their files, processors, ports, delayed messages, name
servers. A stop goes the other way: unregister, answer what is held, drain, write the tables, close the store.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence

from cometmq import logs
from cometmq.broker.admin.consumers import ConsumerAdmin
from cometmq.broker.admin.groups import GroupAdmin
from cometmq.broker.admin.purge import PurgeAdmin
from cometmq.broker.admin.runtime import RuntimeAdmin
from cometmq.broker.admin.stats import StatsAdmin
from cometmq.broker.admin.topics import TopicAdmin
from cometmq.broker.base import attributes
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.delay_levels import DelayLevels
from cometmq.broker.base.names import CHECK_BY_THEMSELVES, names_checked
from cometmq.broker.base.replies import SendReplies
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.writer import Writer
from cometmq.broker.context import BrokerContext
from cometmq.broker.groups.client_requests import ClientProcessor
from cometmq.broker.groups.clients import ConsumerTable, ProducerTable
from cometmq.broker.groups.locks import QueueLocks
from cometmq.broker.groups.offset_requests import OffsetProcessor
from cometmq.broker.persist import Tables
from cometmq.broker.pull.pull import PullProcessor
from cometmq.broker.pull.query import QueryProcessor
from cometmq.broker.register import Registrar
from cometmq.broker.send.send import SendProcessor
from cometmq.broker.send.send_back import SendBackProcessor
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.broker.tables.topics import TopicTable
from cometmq.broker.timers.schedule import ScheduleService
from cometmq.errors import ClientStateError, CometError, ConfigError, StoreError
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.ids import pack_host
from cometmq.protocol.java_properties import format_properties
from cometmq.remoting import Connection, Handler, RemotingClient, RemotingServer, Tick, listen, resolve
from cometmq.store import Arrivals, Clock, Disk, MessageStore, OsDisk, StoreConfig, SystemClock, replace_file

log = logs.logger(__name__)

CLIENT_SCAN_S = 10.0
# The fast port of old clients serves everything but these.
NOT_ON_VIP = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
VIP_OFFSET = -2
HA_OFFSET = 1
STATS_PERIOD_S = 1.0
# What a directory says that cannot be one, and will not be at the next start either.
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_DIRECTORY = (errno.EEXIST, errno.ENOTDIR, errno.ENOENT, *NOT_ALLOWED)


class Broker:
    """A broker: `await start()`, `await stop()`; `port` is where it listens. Raises OSError, StoreError,
    ConfigError.
    """

    def __init__(self, config: BrokerConfig, *, disk: Disk | None = None, clock: Clock | None = None) -> None:
        self.config = config
        self.port = 0
        self._disk = disk if disk is not None else OsDisk()
        self._clock = clock if clock is not None else SystemClock()
        self._parts: BrokerParts | None = None

    @property
    def addr(self) -> str:
        """ "ip:port" as the name servers know it."""
        return host_port(self.config.broker_ip1, self.port)

    @property
    def parts(self) -> BrokerParts:
        """The tables and processors, while it runs."""
        if self._parts is None:
            raise ClientStateError("the broker is not running")
        return self._parts

    async def start(self) -> int:
        """Recover the store, listen, register with the name servers. Returns the port."""
        config = self.config
        config.check()
        loop = asyncio.get_running_loop()
        ip = await resolve("brokerIP1", config.broker_ip1)
        for key, host in (("brokerIP2", config.broker_ip2), ("bindAddress", config.bind_address)):
            if host:
                await resolve(key, host)  # what cannot work must not get as far as the store
        try:
            store = await asyncio.to_thread(MessageStore.open, self.config.store, self._disk, self._clock)
        except OSError as error:
            raise not_opened(config.store, error) from error
        try:
            parts = self._parts = BrokerParts(config, store, self._disk, self._clock, ip)
            await asyncio.to_thread(parts.tables.load)
            if config.listen_port:
                parts.use_address(config.listen_port)
            self.port = await listen(parts.server, parts.bind_address, config.listen_port)
            parts.use_address(self.port)
        except BaseException:
            self._parts = None
            await store.stop()
            raise
        store.start(loop)
        await parts.start()
        log.info("broker %s listens on %s", self.config.broker_name, self.addr)
        return self.port

    async def stop(self, drain_s: float = 3.0) -> None:
        """Unregister, answer what is held, drain, write the tables, close the store."""
        parts, self._parts = self._parts, None
        if parts is not None:
            await parts.stop(drain_s)
            log.info("broker %s stopped", self.config.broker_name)


class BrokerParts:
    """What a running broker consists of. ip: of brokerIP1, which may be a name."""

    def __init__(self, config: BrokerConfig, store: MessageStore, disk: Disk, clock: Clock, ip: str) -> None:
        self._config = config
        self._ip = ip
        # The interface to listen on: all of them unless one is set.
        self.bind_address = config.bind_address or ("::" if ":" in ip else "0.0.0.0")
        self._settings_lock = asyncio.Lock()
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._limits_due = False  # _use_topic_limits is scheduled
        self.store = store
        tick = Tick(self._loop)
        replies = SendReplies(config.region_id, config.trace_on)
        stats = Stats(clock.time_ms(), int(clock.monotonic() * 1000))
        self.writer = Writer(store, replies, stats, tick)
        store.dispatcher.on_visible = self.writer.visible
        self.client = RemotingClient(tick=tick)
        self.context = context = BrokerContext(
            config=config,
            clock=clock,
            store=store,
            tick=tick,
            topics=TopicTable(config, clock.time_ms),
            groups=SubscriptionGroups(config, clock.time_ms),
            offsets=ConsumerOffsets(),
            producers=ProducerTable(),
            consumers=ConsumerTable(),
            locks=QueueLocks(),
            delays=DelayLevels.of(config.store),
            stats=stats,
            replies=replies,
            writer=self.writer,
            registered=self._registered,
        )
        self.registrar = Registrar(config, context.topics, self.client)
        self.pulls = PullProcessor(context)
        self.schedule = ScheduleService(context)
        self.sends = SendProcessor(context)
        self.clients = ClientProcessor(context)
        self.runtime = RuntimeAdmin(context, self.schedule, self._settings_changed)
        self.tables = Tables(context, self.schedule, disk, os.path.join(config.store.root, "config"))
        self.server = self._server(tick, without=())
        self.vip_server: RemotingServer | None = None
        for queue in self.schedule.queues():
            self.pulls.long_poll.watch(*queue)
        store.dispatcher.watched = self.pulls.long_poll.queues
        self.writer.on_arrivals = self._arrived
        tick.at_end(self.writer.end_tick)
        tick.at_end(self.pulls.end_tick)
        context.topics.changed = self._topics_changed
        context.topics.saved = self.tables.topics.saved
        context.groups.changed = self.tables.groups.save
        context.groups.saved = self.tables.groups.saved
        context.offsets.save = self.tables.offsets.save_now

    def _server(self, tick: Tick, without: Sequence[int]) -> RemotingServer:
        context = self.context
        handlers: dict[int, Handler] = {}
        stats = StatsAdmin(context)
        for part in (
            self.sends,
            self.pulls,
            self.clients,
            SendBackProcessor(context),
            OffsetProcessor(context),
            QueryProcessor(context),
            self.schedule,
            TopicAdmin(context, self.pulls),
            PurgeAdmin(context),
            stats,
            GroupAdmin(context, stats),
            ConsumerAdmin(context),
            self.runtime,
        ):
            handlers |= part.handlers()
        kept = {
            code: handler if code in CHECK_BY_THEMSELVES else names_checked(handler)
            for code, handler in handlers.items()
            if code not in without
        }
        return RemotingServer(kept, shortcuts=self.sends.shortcuts(), on_close=self._closed, tick=tick)

    def use_address(self, port: int) -> None:
        """The port is known: from now on records and answers carry it. They have room for numbers only;
        clients and name servers are told the name."""
        config = self._config
        store_host = pack_host(host_port(self._ip, port))
        self.store.appender.store_host = store_host
        self.context.replies.use_host(store_host)
        self.context.addr = host_port(config.broker_ip1, port)
        self.registrar.use_addresses(
            host_port(config.broker_ip1, port),
            host_port(config.broker_ip2 or config.broker_ip1, port + HA_OFFSET),
        )

    # -- start and stop

    async def start(self) -> None:
        """Open the fast port, begin the periodic work, register."""
        await self._open_vip()
        self._use_topic_limits()
        self.tables.start()
        self.pulls.start()
        if not self.store.slave:
            self.schedule.start()
        self._every("clients", CLIENT_SCAN_S, self.clients.expire)
        self._every("stats", STATS_PERIOD_S, self._sample)
        await self.registrar.start()

    async def _open_vip(self) -> None:
        port = self._config.listen_port + VIP_OFFSET
        # Beside a port that the system picked, others may own its neighbours.
        if not self._config.vip_channel_enable or port <= 0:
            return
        self.vip_server = self._server(self.context.tick, NOT_ON_VIP)
        try:
            await self.vip_server.start(self.bind_address, port)
        except OSError as error:
            log.warning("port %d, which old clients use, is not available: %s", port, error)
            self.vip_server = None

    def _every(self, name: str, period_s: float, job: Callable[[], None]) -> None:
        def run() -> None:
            self._timers[name] = self._loop.call_later(period_s, run)
            job()

        self._timers[name] = self._loop.call_later(period_s, run)

    async def stop(self, drain_s: float) -> None:
        """The reverse of the start."""
        servers = [server for server in (self.vip_server, self.server) if server is not None]
        for server in servers:
            server.stop_listening()
        await self.registrar.stop()
        for timer in self._timers.values():
            timer.cancel()
        await self.schedule.stop()
        await self.pulls.stop()
        await self.writer.drain(drain_s)
        for server in servers:
            await server.stop(drain_s)
        await self.client.close()
        await self.tables.stop()
        await self.store.stop()

    # -- events

    def _arrived(self, arrivals: Arrivals) -> None:
        self.pulls.arrived(arrivals)
        self.schedule.arrived(arrivals)

    def _closed(self, connection: Connection) -> None:
        self.pulls.long_poll.drop(connection)
        self.clients.closed(connection)

    def _topics_changed(self, _topic: str | None) -> None:
        self.sends.forget_routes()
        self.tables.topics.save()
        self.registrar.register()
        if not self._limits_due:  # all topics are looked at, once for all changes of a tick
            self._limits_due = True
            self._loop.call_soon(self._use_topic_limits)

    def _sample(self) -> None:
        context = self.context
        context.stats.sample(context.clock.time_ms(), context.mono_ms())

    def _use_topic_limits(self) -> None:
        self._limits_due = False
        self.store.topic_retention.set_limits(attributes.limits(self.context.topics.table))

    async def _registered(self) -> None:
        await self.registrar.registered()

    async def _settings_changed(self, keys: list[str]) -> None:
        self.sends.forget_routes()
        self.context.replies.configure(self._config.region_id, self._config.trace_on)
        self.store.configure(self._config.store)
        self.writer.configure()
        if "brokerPermission" in keys:
            self.context.topics.touch()
        path = self._config.broker_config_path
        if path and keys:
            # One writer at a time, and each writes what holds when its turn comes: an older state never wins.
            async with self._settings_lock:
                text = format_properties(self._config.properties())
                await asyncio.to_thread(write_settings, self._disk, path, text)


def write_settings(disk: Disk, path: str, text: str) -> None:
    """Replace a settings file, or say why not: the settings are in force already."""
    try:
        replace_file(disk, os.path.abspath(path), text.encode())
    except OSError as error:
        log.error("settings not written to %s: %s", path, error)


def not_opened(config: StoreConfig, error: OSError) -> CometError:
    """What keeps a store from being opened: the setting of a directory that cannot be one, or the store."""
    path = error.filename or config.root
    reason = error.strerror or str(error)
    if error.errno in NO_DIRECTORY:
        # A file in a directory that is there, and that may not be written, is the store's trouble.
        within = "" if error.errno in NOT_ALLOWED else os.path.dirname(path)
        for key, directories in config.directories.items():
            for directory in directories:
                if directory in (path, within) or directory.startswith(path + os.sep):
                    return ConfigError(key, directory, f"a directory to make or write to ({path}: {reason})")
    return StoreError(f"the store cannot be opened: {reason}", path)


def host_port(host: str, port: int) -> str:
    """ "host:port", IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
