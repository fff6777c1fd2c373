"""The parts of a broker that serve pop consumers, and their connections with each other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.times import mono_ms
from cometmq.broker.base.writer import Writer
from cometmq.broker.filters.sql_filters import SqlFilters
from cometmq.broker.pop import lease_files
from cometmq.broker.pop.checks import PopChecks
from cometmq.broker.pop.leases import Leases
from cometmq.broker.pop.pops import Pops
from cometmq.broker.pop.retries import Retries
from cometmq.broker.pop.revive import ReviveLog
from cometmq.broker.pull.long_poll import LongPoll
from cometmq.broker.rates.rate_limits import RateLimits
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.tables.table_file import TableFile
from cometmq.periodic import Periodic
from cometmq.remoting import Tick
from cometmq.store import Clock, MessageStore

SWEEP_S = 10.0
SAVE_S = 2.0


@dataclass(eq=False)
class PopService:
    """Pops, acks and the expiry of leases, for requests of all protocols."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    stats: Stats
    tick: Tick
    writer: Writer
    filters: SqlFilters
    arrivals: LongPoll
    rates: RateLimits

    def __post_init__(self) -> None:
        self.leases = Leases(self.tables.offsets, self.clock.time_ms())
        self.checks = PopChecks(self.config, self.store, self.tables, self.filters)
        self.retries = Retries(self.store, self.tables, self.writer)
        self.revive = ReviveLog(
            self.config, self.clock, self.store, self.tables, self.writer, self.leases, self.retries
        )
        self._order_file_used = self._lease_file_used = False
        self._order_file = self._file(lease_files.ORDER_INFO, lease_files.ordered_table)
        self.lease_file = self._file(lease_files.LEASES, lease_files.leases_table)
        # The offset of a queue that was set back must not be on the disk together with its former leases.
        self.tables.offsets_file.flush_first = self._before_offsets
        given = self.clock, self.store, self.tick, self.stats, self.leases, self.retries, self.rates
        self.pops = Pops(*given, self.tables, self.arrivals, self.revive)
        loop = asyncio.get_running_loop()
        self._saves = Periodic(loop, SAVE_S, self._save_leases, name="writing the leases of popped messages")
        self._sweeps = Periodic(loop, SWEEP_S, self._sweep, name="sweep of parked pops and early acks")

    def _file(self, name: str, table: Callable[[Leases, int, int], Any]) -> TableFile:
        path = os.path.join(self.config.store.root, "config", name)

        def content() -> Any:
            return table(self.leases, mono_ms(self.clock), self.clock.time_ms())

        return TableFile(self.store.disk, path, content, self.tables.log_flushed)

    def _sweep(self) -> None:
        self.pops.sweep()
        self.revive.expire_early()

    def _save_leases(self) -> None:
        if self.leases.dirty:
            self.leases.dirty = False
            self._lease_file_used = True
            self.lease_file.save()

    async def _before_offsets(self) -> None:
        await self.tables.log_flushed()
        if self._lease_file_used:
            await self.lease_file.save_now()

    def load(self) -> None:
        """Restore leases from their files. Must run in a thread, before requests are served."""
        table = self._order_file.load_or_empty()
        self._order_file_used = bool(table.get("table"))
        now_ms, wall_ms = mono_ms(self.clock), self.clock.time_ms()
        lease_files.restore_ordered(table, self.leases, self.tables.offsets, now_ms, wall_ms)
        table = self.lease_file.load_or_empty()
        if not self.store.recovered.clean:
            lease_files.restore_leases(
                table, self.leases, self.tables.offsets, self.store.max_offset, now_ms, wall_ms
            )

    def clear_files(self) -> None:
        """Empty the files of leases, because this broker is a slave. Must run in a thread. Raises OSError.

        Their content is from a time in which it was the master. Since then another master has moved the
        offsets, and its log may have replaced this one, so it must not be used after a promotion.
        """
        for file in (self._order_file, self.lease_file):
            file.clear()

    def restart(self) -> None:
        """Forget all leases: this broker becomes the leader, and other leaders have moved the offsets."""
        self.pops.restart()
        self.revive.restart()

    def start(self) -> None:
        """Begin to handle expired leases, and to read the revive log."""
        self._sweeps.start()
        self._saves.start()
        self.pops.expiry.start()
        self.revive.start()

    async def stop(self) -> None:
        """Answer waiting pops, handle no further leases, and save the leases if this broker is a master."""
        self._sweeps.cancel()
        self._saves.cancel()
        await self.pops.stop()
        await self.retries.stop()
        await self.revive.stop(write=not self.store.slave)

    async def save(self) -> None:
        """Write the files of leases, because the broker stops and the revive log has its records."""
        if self._order_file_used or lease_files.ordered_table(self.leases, 0, 0)["table"]:
            await self._order_file.finish()
        if self._lease_file_used:
            await self.lease_file.finish()
