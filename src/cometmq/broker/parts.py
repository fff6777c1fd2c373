"""The parts of a running broker: they are created, connected with each other, started and stopped here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from cometmq import logs
from cometmq.broker.access.security import OPEN, Security, acl_handlers
from cometmq.broker.admin.clients import ClientAdmin
from cometmq.broker.admin.consumers import ConsumerAdmin
from cometmq.broker.admin.lite import LiteAdmin
from cometmq.broker.admin.metrics import BrokerMetrics
from cometmq.broker.admin.progress import ProgressAdmin
from cometmq.broker.admin.runtime import RuntimeAdmin
from cometmq.broker.admin.topics import TopicAdmin
from cometmq.broker.base import attributes
from cometmq.broker.base.address import BrokerAddress
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.delay_levels import DelayLevels
from cometmq.broker.base.members import broker_id_of
from cometmq.broker.base.names import CHECK_BY_THEMSELVES, names_checked
from cometmq.broker.base.protection import Protection
from cometmq.broker.base.replies import SendReplies
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.times import awake_ms, mono_ms
from cometmq.broker.base.writer import Writer
from cometmq.broker.filter_servers import FilterServers
from cometmq.broker.filters.sql_filters import SqlFilters
from cometmq.broker.groups.client_requests import ClientProcessor
from cometmq.broker.groups.clients import ConsumerTable, GroupNotices, ProducerTable
from cometmq.broker.groups.locks import QueueLocks
from cometmq.broker.groups.offset_requests import OffsetProcessor
from cometmq.broker.lite.requests import LiteProcessor
from cometmq.broker.lite.service import LiteService, LiteStateCopy
from cometmq.broker.pop.modes import ConsumeModes
from cometmq.broker.pop.requests import PopProcessor
from cometmq.broker.pop.service import PopService
from cometmq.broker.pull.backlog import CHECK_S, SlowReaders
from cometmq.broker.pull.checks import PullChecks
from cometmq.broker.pull.pull import PullProcessor
from cometmq.broker.pull.query import QueryProcessor
from cometmq.broker.rates.rate_limits import RateLimits
from cometmq.broker.rates.throttle import SendThrottle
from cometmq.broker.register import Registrar
from cometmq.broker.replication.replication import Replication, ReplicationContext
from cometmq.broker.send.dedup import Deduplication
from cometmq.broker.send.push_reply import ReplyProcessor
from cometmq.broker.send.retry import RetryRules
from cometmq.broker.send.send import SendProcessor
from cometmq.broker.send.send_back import SendBackProcessor
from cometmq.broker.send.timed import TimedSends
from cometmq.broker.send.trace_topic import TraceTopic
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.timers.requests import TimerProcessor
from cometmq.broker.timers.schedule import ScheduleService
from cometmq.broker.timers.timers import TimerService
from cometmq.broker.transactions.service import TransactionService
from cometmq.errors import CommandError
from cometmq.metrics import Families, MetricsExporter
from cometmq.periodic import Periodic
from cometmq.protocol.addresses import VIP_OFFSET
from cometmq.protocol.codes import RequestCode, handlers_of
from cometmq.remoting import Connection, Handler, RemotingClient, RemotingServer, Tick
from cometmq.settings import SettingsFile
from cometmq.store import SYNC_MASTER, Arrivals, Clock, MessageStore, replace_file

if TYPE_CHECKING:
    from cometmq.broker.replication.raft import RaftReplication
    from cometmq.broker.send.relay import Relay

log = logs.logger(__name__)

CLIENT_SCAN_S = 10.0
# The requests that are not accepted on the extra port of old clients (`listenPort` - 2).
NOT_ON_VIP = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
STATS_PERIOD_S = 1.0
TOPIC_COUNTS_S = 10.0


class BrokerParts:
    """The tables, request processors and servers of a broker. Must be created in a running event loop."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        store: MessageStore,
        address: BrokerAddress,
        security: Security = OPEN,
    ) -> None:
        self.config = config
        self.security = security
        self._guard = guard = security.guard
        self._clock = clock
        self._address = address
        self._settings_file = SettingsFile(lambda path, data: replace_file(store.disk, path, data))
        self._loop = asyncio.get_running_loop()
        self._limits_due = False  # Whether a call of `_use_topic_limits` is scheduled
        self.store = store
        self.tick = tick = Tick(self._loop)
        self.client = RemotingClient(
            tick=tick, outgoing=None if guard is None else guard.sign, ssl_context=security.client_context
        )
        self.stats = Stats(clock.time_ms(), mono_ms(clock))
        self.replies = SendReplies(config.region_id, config.trace_on)
        self.writer = Writer(store, self.replies, self.stats, tick, self._arrived)
        self.protection = Protection(config, store, self.writer, self._override_handlers)
        store.dispatcher.on_visible = self.writer.visible
        self.tables = DurableTables(config, clock, store, self._topics_changed)
        self.consumers = ConsumerTable()
        self.producers = ProducerTable(security.same_account)
        self.locks = QueueLocks()
        self.registrar = Registrar(config, self.tables.topics, address, self.client)
        self.filter_servers = FilterServers(config, clock, address, self.registrar)
        self._make_processors(DelayLevels.of(config.store))
        self.replication: Replication | RaftReplication
        self._relay: Relay | None = None
        if config.store.enable_d_leger_commit_log:
            self.replication = self.writer.replicas = self._in_raft()
        else:
            self.replication = self._with_slaves()
        for queue in (*self.schedule.queues(), *self.timers.queues()):
            self.pulls.long_poll.watch(*queue)
        store.dispatcher.watched = self.pulls.long_poll.queues
        runtime = RuntimeAdmin(
            config, clock, store, self.tables.topics, self.stats, self.schedule, self.timers, self.protection,
            self.replication, self._settings_changed, self.registrar.problem,
        )  # fmt: skip
        self.more_metrics: list[Callable[[Families], None]] = [self.dedup.collect]
        self.metrics = self._metrics(runtime)
        handlers = self._all_handlers(runtime)
        if self._relay is not None:
            # If access control is enabled, END_TRANSACTION requests are not relayed to a new leader: they
            # name no topic, so the new leader could not check the sender's permissions.
            from cometmq.broker.send.relay import SENDS

            codes = (*SENDS, RequestCode.END_TRANSACTION) if guard is None else SENDS
            handlers = self._relay.handlers(handlers, codes)
        self.handlers = handlers if guard is None else guard.guarded(handlers)
        self.server = self._server(without=())
        self.vip_server: RemotingServer | None = None
        self._periodic = [
            Periodic(self._loop, CLIENT_SCAN_S, self.clients.expire, name="scan for silent clients"),
            Periodic(self._loop, STATS_PERIOD_S, self._sample, name="sampling of statistics"),
            Periodic(self._loop, TOPIC_COUNTS_S, self._count_topics, name="counting of topics' messages"),
            Periodic(self._loop, CHECK_S, self.slow_readers.check, name="check for slow readers"),
        ]
        for part in (self.writer, self.replication, self.pulls, self.pops.pops, self.lite.pops):
            tick.at_end(part.end_tick)

    def _replication_context(self) -> ReplicationContext:
        return ReplicationContext(
            self.config, self._clock, self.store, self.tables, self._address, self.client, self.tick
        )

    def _with_slaves(self) -> Replication:
        made = Replication(self._replication_context(), self.writer.visible)
        if made.sync is not None:
            made.sync.lite = LiteStateCopy(self.lite)
        self.registrar.on_master = made.follow
        self.registrar.lacks_master = lambda: made.lacks_master
        if self.config.store.broker_role == SYNC_MASTER:
            self.writer.replicas = made.master
        return made

    def _in_raft(self) -> RaftReplication:
        # These modules are imported only here, so that a broker outside a raft group starts faster.
        from cometmq.broker.leader_services import LeaderServices
        from cometmq.broker.replication.raft import RaftReplication
        from cometmq.broker.send.relay import Relay

        leader_services = LeaderServices(
            self.config, self._clock, self.store, self.tables, self.registrar, self.schedule, self.timers,
            self.transactions, self.pops, self.lite, self.dedup,
            broker_id_of(self.config.store.d_leger_self_id),
        )  # fmt: skip
        made = RaftReplication(self._replication_context(), self.writer.end_tick, leader_services)
        leader_services.leader_log = lambda: made.sync.master_log
        made.sync.lite = LiteStateCopy(self.lite)
        self._relay = Relay(self.client, made)
        made.hand_over = self._relay.begin
        return made

    def _make_processors(self, levels: DelayLevels) -> None:
        config, clock, store, tables = self.config, self._clock, self.store, self.tables
        stats, tick, writer, address = self.stats, self.tick, self.writer, self._address
        self.retry_rules = RetryRules(tables.groups, self.consumers, self.locks)
        filters = SqlFilters(config)
        self.slow_readers = SlowReaders(config, tables.groups)
        account_rates = self.security.account_rates
        self.rates = RateLimits(config, tables.groups.table, account_rates, lambda: awake_ms(clock))
        if self.security.guard is not None:
            self.security.guard.on_policy = self.rates.configure
        self.throttle = SendThrottle(self.rates)
        checks = PullChecks(config, tables, self.consumers, filters)
        self.pulls = PullProcessor(
            config, store, tick, tables, stats, checks, self.slow_readers, self.security.is_admin, clock,
            writer, address, self.rates,
        )  # fmt: skip
        arrivals = self.pulls.long_poll
        self.pops = PopService(
            config, clock, store, tables, stats, tick, writer, filters, arrivals, self.rates
        )
        self.lite = LiteService(
            config, clock, store, tables, stats, tick, self.pops.retries, arrivals, self.rates
        )
        writer.on_refused = self.lite.refused
        self.modes = ConsumeModes(config, tables, self.consumers, self.registrar.route)
        self.timed = TimedSends(config, clock, store, tables)
        self.dedup = Deduplication(config, clock, store, tables.topics, writer, self.timed)
        self.sends = SendProcessor(
            config, clock, store, tables, self.retry_rules, levels, stats, writer, self.timed, self.dedup,
            self.throttle, self.lite.sent_properties,
        )  # fmt: skip
        self.timers = TimerService(clock, store, tables, self.timed, writer)
        self.schedule = ScheduleService(clock, store, tables, levels, writer)
        self.transactions = TransactionService(
            config, clock, store, tables, self.producers, writer, address, self.dedup, self.security
        )
        notices = GroupNotices(config, tables.groups, self.consumers)
        self.clients = ClientProcessor(
            clock, store, tables, self.producers, self.consumers, self.locks, notices, filters
        )
        self.traces = TraceTopic(config, clock, store, tables.topics, writer, address)

    def _metrics(self, runtime: RuntimeAdmin) -> MetricsExporter:
        numbers = BrokerMetrics(
            self.config, self._clock, self.store, self.tables, self.consumers, self.producers, self.stats,
            self.protection, runtime, self._address, self.transactions.ledger, self.pops,
            lambda: len(self.server.connections), self.registrar.state, self.rates, self.more_metrics,
        )  # fmt: skip
        interface = self._address.interface
        return MetricsExporter(self.config, interface, numbers.collect, numbers.why_not_ready)

    def _all_handlers(self, runtime: RuntimeAdmin) -> dict[int, Handler]:
        config, clock, store, tables = self.config, self._clock, self.store, self.tables
        consumers, producers, stats, writer = self.consumers, self.producers, self.stats, self.writer
        check_read = self.security.check_read
        handlers: dict[int, Handler] = {}
        pop_requests = PopProcessor(self.pops)
        for part in (
            self.sends,
            ReplyProcessor(self.sends, producers, self._address),
            SendBackProcessor(
                config, store, tables, self.retry_rules, self.schedule.levels, stats, writer, check_read
            ),
            self.pulls,
            pop_requests,
            LiteProcessor(self.lite, pop_requests),
            LiteAdmin(config, self.lite),
            self.modes,
            self.clients,
            self.schedule,
            TimerProcessor(config, clock, store, tables, self.timed, self.timers, self.schedule, writer),
            self.transactions.ends,
            self.filter_servers,
            OffsetProcessor(store, tables, consumers),
            QueryProcessor(store, check_read, self.security.is_admin),
            TopicAdmin(config, store, tables, self.pulls, self.registrar.registered),
            ProgressAdmin(clock, store, tables, consumers, stats, self._address, self.pops.leases),
            ClientAdmin(clock, producers, consumers, tables.groups),
            self.replication,
            ConsumerAdmin(config, store, tables, consumers),
            runtime,
        ):
            handlers |= handlers_of(part)
        handlers |= acl_handlers(config, self._address, self._guard)
        return {
            code: handler if code in CHECK_BY_THEMSELVES else names_checked(handler)
            for code, handler in handlers.items()
        }

    def _server(self, without: Collection[int]) -> RemotingServer:
        handlers = {code: handler for code, handler in self.handlers.items() if code not in without}
        # A shortcut accepts a send without decoding its header, if the header equals that of an earlier send.
        # With access control, shortcuts are not used, because then each request has its own signature.
        shortcuts = self.sends.shortcuts() if self._guard is None else {}
        if self._relay is not None:
            shortcuts = self._relay.shortcuts(shortcuts)
        return RemotingServer(
            handlers, shortcuts=shortcuts, on_close=self._closed, tick=self.tick, tls=self.security.tls
        )

    def _override_handlers(self, codes: Collection[int], handler: Handler) -> None:
        for server in (self.server, self.vip_server):
            if server is not None:
                server.override_handlers(codes, handler)

    def use_port(self, port: int) -> None:
        """Set the port of the broker's address, which new records and some responses contain."""
        self._address.port = port
        self.store.appender.store_host = self._address.packed
        self.replies.use_host(self._address.packed)

    # -- start and stop

    def load(self) -> None:
        """Fill the tables from their files. Must run in a thread. Raises StoreCorrupt or OSError."""
        self.tables.load()
        if not self.store.slave:
            self.transactions.load()
            self.pops.load()
        elif self.store.raft_log is None:  # In a raft group, a new leader never loads them
            self.pops.clear_files()
        self.dedup.load()

    def resume(self) -> None:
        """Add topics that have messages to the table, and replace half messages that a crash has destroyed.

        This method must run after `load` and before requests are served.
        """
        if self.store.raft_log is None:  # In a raft group, only the leader adds topics found in the log
            self.tables.adopt()
        if not self.store.slave:
            self.transactions.fill()

    async def start(self) -> None:
        """Open the port for old clients, start the periodic work, and register with the name servers."""
        if self.config.log_level:
            logs.use_levels(self.config.log_level)
        await self._open_vip()
        self._use_topic_limits()
        self.tables.start()
        self.stats.boot_log_end = self.store.log.end
        self._count_topics()
        self.pulls.start()
        if not self.store.slave:
            self.store.retention.before_delete = self.timers.move_on
            for service in (self.schedule, self.timers, self.transactions, self.pops):
                service.start()
        self.lite.start()
        for timer in self._periodic:
            timer.start()
        self.security.start()
        self.protection.start()
        await self.replication.start()
        await self.metrics.start()
        await self.registrar.start()
        await self.filter_servers.start()

    async def _open_vip(self) -> None:
        port = self.config.listen_port + VIP_OFFSET
        # If the system has chosen the main port, do not open the port `listenPort` - 2, which may belong to
        # another program.
        if not self.config.vip_channel_enable or port <= 0:
            return
        self.vip_server = self._server(without=NOT_ON_VIP)
        try:
            await self.vip_server.start(self._address.interface, port)
        except OSError as error:
            log.warning("cannot listen on port %d, which old clients use: %s", port, error)
            self.vip_server = None

    async def stop(self, drain_s: float) -> None:
        """Stop the parts of the broker, roughly in the reverse order of the start."""
        await self.replication.retire()
        servers = [server for server in (self.vip_server, self.server) if server is not None]
        for server in servers:
            server.stop_listening()
        self.throttle.stop()
        await self.metrics.stop()
        await self.filter_servers.stop()
        await self.registrar.stop()
        for timer in self._periodic:
            timer.cancel()
        await self.security.stop()
        self.protection.stop()
        if self.store.tiered is not None:
            self.store.tiered.reads.end()  # An object store that does not answer must not delay the stop
        for part in (self.schedule, self.timers, self.transactions, self.pops, self.lite, self.pulls):
            await part.stop()
        await self.writer.drain(drain_s)
        await self.replication.stop()
        if self._relay is not None:
            self._relay.end()
        for server in servers:
            await server.stop(drain_s)
        await self.client.close()
        await self.dedup.stop()
        await self.pops.save()
        await self.tables.stop()
        await self.store.stop()

    # -- events

    def _arrived(self, arrivals: Arrivals) -> None:
        self.pulls.arrived(arrivals)
        self.pops.pops.arrived(arrivals)
        self.lite.arrived(arrivals)
        if not self.store.slave:
            self.schedule.arrived(arrivals)
            self.timers.arrived(arrivals)

    def _closed(self, connection: Connection) -> None:
        self.pulls.long_poll.drop(connection)
        self.pops.pops.polls.drop(connection)
        self.lite.closed(connection)
        self.clients.closed(connection)
        self.filter_servers.closed(connection)
        self.security.closed(connection)

    def _topics_changed(self) -> None:
        self.sends.forget_rules()
        self.registrar.register()
        if not self._limits_due:  # Several changes in one event-loop tick cause only one call
            self._limits_due = True
            self._loop.call_soon(self._use_topic_limits)

    def _use_topic_limits(self) -> None:
        self._limits_due = False
        self.store.topic_retention.set_limits(attributes.limits(self.tables.topics.table))
        self.lite.use_topics()
        self.dedup.use_topics()

    def _sample(self) -> None:
        self.stats.sample(self._clock.time_ms(), mono_ms(self._clock))

    def _count_topics(self) -> None:
        totals: dict[str, int] = {}
        for queue in self.store.queues:
            totals[queue.topic] = totals.get(queue.topic, 0) + queue.max_offset
        self.stats.count_topics(totals, mono_ms(self._clock))

    async def _settings_changed(self, keys: list[str]) -> None:
        """Apply changed settings, and write them to the settings file. Raises CommandError if that fails."""
        self.sends.configure()
        self.rates.configure()
        self.replies.configure(self.config.region_id, self.config.trace_on)
        self.store.configure(self.config.store)
        self.writer.configure()
        if "logLevel" in keys:
            logs.use_levels(self.config.log_level)
        if "brokerPermission" in keys:
            self.tables.topics.touch()
        path = self.config.broker_config_path
        if path and keys:
            try:
                await self._settings_file.save(path, keys, self.config.properties)
            except OSError as error:
                log.error("settings could not be written to %s: %s", path, error)
                reason = f"taken, but cannot be written to brokerConfigPath: {error.strerror or error}"
                raise CommandError.failed(reason) from error
