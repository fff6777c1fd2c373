"""Replication without a raft group: a master's HA port, or a slave's connection to its master.

The setting `brokerRole` determines whether a broker is a master or a slave. A change takes effect only at the
next start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from cometmq import logs
from cometmq.broker.base import advertised
from cometmq.broker.base.address import HA_OFFSET, BrokerAddress, ha_port_of, host_port
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.replication.ha_server import HaServer
from cometmq.broker.replication.ha_slave import MasterAddress, Phase
from cometmq.broker.tables.durable import DurableTables
from cometmq.protocol.bodies.admin import HaClientInfo, HaConnectionInfo, HaRuntimeInfo
from cometmq.protocol.codes import RequestCode, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers.admin import ExchangeHaInfoResponseHeader, ResetMasterFlushOffsetHeader
from cometmq.remoting import Connection, RemotingClient, Tick, host_of_peer, parse_addr, port_error
from cometmq.store import Arrivals, Clock, MessageStore

if TYPE_CHECKING:
    from cometmq.broker.replication.ha_client import HaClient
    from cometmq.broker.replication.metadata_sync import MetadataSync

log = logs.logger(__name__)


class ReplicationContext(msgspec.Struct, frozen=True, eq=False):
    """The parts of the broker that replication uses. They exist as long as the broker runs."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    address: BrokerAddress
    client: RemotingClient
    tick: Tick


def status_of_master(
    log_end: int, infos: list[HaConnectionInfo], problem: str | None = None
) -> HaRuntimeInfo:
    """Return the state of replication at a master or raft leader, given that of its connections."""
    return HaRuntimeInfo(
        master=True,
        master_commit_log_max_offset=log_end,
        in_sync_slave_nums=sum(info.in_sync for info in infos),
        ha_connection_info=infos,
        problem=problem,
    )


class Replication:
    """A broker's part of replication as a master or a slave, and the handlers of requests about replication.

    An object of this class must be created in a running event loop.
    """

    def __init__(self, context: ReplicationContext, visible: Callable[[int, Arrivals], None]) -> None:
        """Create the replication. On a slave, `visible` is called with messages that have become visible."""
        config, clock, store, tick = context.config, context.clock, context.store, context.tick
        self._config, self._clock, self._store, self._address = config, clock, store, context.address
        self.master: HaServer | None = None
        self.slave: HaClient | None = None
        self.sync: MetadataSync | None = None
        self._flush_offset = 0
        self.leader_changed: Callable[[], None] = lambda: None
        """Called when this slave may have another master."""
        if store.slave:
            # These modules are imported here, so that a master, which does not need them, starts faster.
            from cometmq.broker.replication.ha_client import HaClient
            from cometmq.broker.replication.metadata_sync import MetadataSync

            self.slave = HaClient(config, clock, store, context.client, tick, visible)
            self.sync = MetadataSync(store, context.tables, context.client, self.slave.confirm)
        else:
            ha = self.master = HaServer(config, clock, store, tick)
            store.retention.first_needed_position = lambda: ha.core.first_needed_position
        # With SYNC_FLUSH, slaves receive and report only bytes that are on the disk, so replication has work
        # to do after each flush.
        store.flusher.on_flushed.append(lambda _end: tick.schedule())

    def end_tick(self) -> None:
        """On a master, send written records to slaves. On a slave, write records received from the master.

        This method must run after the writer's `end_tick`, and before the `end_tick` of the pulls.
        """
        if self.master is not None:
            self.master.end_tick()
        elif self.slave is not None:
            self.slave.end_tick()

    async def start(self) -> None:
        """On a master, open the HA port. On a slave, connect to the master once its address is known.

        Raises ConfigError for a port or an address that cannot be used.
        """
        config, address = self._config, self._address
        if self.slave is not None and self.sync is not None:
            if config.ha_master_address:
                host, port = parse_addr(config.ha_master_address)
                self.follow(host_port(host, port - HA_OFFSET), config.ha_master_address)
            self.slave.start()
            self.sync.start()
        elif self.master is not None:
            port = ha_port_of(config)
            try:
                address.ha_port = await self.master.start(address.interface, port)
            except OSError as error:
                raise port_error("haListenPort", port, error) from error
            if warning := advertised.unguarded(address, address.ha_port, "slaves"):
                log.warning("%s", warning)

    def follow(self, addr: str, ha_addr: str) -> None:
        """Follow the master whose addresses a name server has returned."""
        if self.slave is not None and self.sync is not None:
            self.slave.follow(MasterAddress(addr, self._config.ha_master_address or ha_addr))
            self.sync.follow(addr)
            self.leader_changed()

    @property
    def lacks_master(self) -> bool:
        """Whether this broker is a slave that does not know its master."""
        return self.slave is not None and self.slave.core.master is None

    @property
    def leader_addr(self) -> str | None:
        """The broker address of the master: "" if it is not known, None if this broker is the master."""
        if self.slave is None:
            return None
        master = self.slave.core.master
        return "" if master is None else master.addr

    def has_member(self, host: str) -> bool:
        """Return whether a slave is connected from this host."""
        links = () if self.master is None else self.master.links.values()
        return any(link.transport is not None and host_of_peer(link.transport) == host for link in links)

    async def retire(self) -> None:
        """Do nothing: master and slaves need no notice before the broker stops."""

    async def stop(self) -> None:
        if self.master is not None:
            self.master.stop()
        if self.slave is not None and self.sync is not None:
            self.sync.stop()
            await self.slave.stop()

    # -- requests of tools

    def facts(self) -> dict[str, str]:
        if self.slave is not None:
            core = self.slave.core
            return {
                "brokerRole": "SLAVE",
                "haMasterAddr": core.master.ha_addr if core.master is not None else "",
                "haState": core.phase.value,
                "haProblem": core.problem or "none",
                "haLagBytes": str(self.slave.lag),
            }
        infos = self._connections()
        return {
            "brokerRole": self._store.config.broker_role,
            "haSlaves": str(len(infos)),
            "haProblem": "none",
            "haLagBytes": str(max((info.diff for info in infos), default=0)),
        }

    @handles(RequestCode.GET_BROKER_HA_STATUS)
    def get_broker_ha_status(self, _connection: Connection, frame: Frame) -> Frame:
        """Return the state of replication, which the tool `haStatus` shows."""
        return frame.response(body=self.status().encode())

    def status(self) -> HaRuntimeInfo:
        """Return the state of replication: on a master, that of each slave; on a slave, its own."""
        end = self._store.log.end
        if self.slave is None:
            return status_of_master(end, self._connections())
        slave, now = self.slave, self._clock.monotonic()
        core = slave.core
        return HaRuntimeInfo(
            master=False,
            master_commit_log_max_offset=max(core.master_end, 0),
            ha_client_runtime_info=HaClientInfo(
                master_addr=core.master.ha_addr if core.master is not None else None,
                transferred_byte_in_second=slave.received_bytes.bytes_a_second(now),
                max_offset=end,
                last_read_timestamp=slave.read_ms,
                last_write_timestamp=slave.written_ms,
                master_flush_offset=self._flush_offset,
                activated=core.phase is Phase.FOLLOWING,
            ),
        )

    def _connections(self) -> list[HaConnectionInfo]:
        if self.master is None:
            return []
        end, now = self._store.log.end, self._clock.monotonic()
        core, infos = self.master.core, []
        for number, link in self.master.links.items():
            slave = core.slaves[number]
            infos.append(
                HaConnectionInfo(
                    addr=link.peer,
                    slave_ack_offset=slave.acked,
                    diff=end - max(slave.acked, 0),
                    in_sync=core.is_near(slave, end),
                    transferred_byte_in_second=link.sent.bytes_a_second(now),
                    transfer_from_where=slave.sent,
                )
            )
        return infos

    @handles(RequestCode.EXCHANGE_BROKER_HA_INFO)
    def exchange_broker_ha_info(self, _connection: Connection, frame: Frame) -> Frame:
        """Return this master's addresses to a 5.x slave."""
        if self.master is None:
            return frame.response()
        header = ExchangeHaInfoResponseHeader(
            master_address=self._address.text,
            master_ha_address=self._address.ha_text,
            master_flush_offset=self._store.flusher.flushed,
        )
        return frame.response(header=header)

    @handles(RequestCode.RESET_MASTER_FLUSH_OFFSET)
    def reset_master_flush_offset(self, _connection: Connection, frame: Frame) -> Frame:
        """Store the master's flushed position that a request contains, so that `haStatus` can show it.

        The position has no other use, because this slave never has more than its master has sent.
        """
        offset = frame.header(ResetMasterFlushOffsetHeader).master_flush_offset
        if self.slave is not None:
            self._flush_offset = offset
        return frame.response()
