"""The parts of a broker that serve pop consumers, and their connections with each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.stats import Stats
from cometmq.broker.base.times import mono_ms
from cometmq.broker.base.writer import Writer
from cometmq.broker.filters.sql_filters import SqlFilters
from cometmq.broker.pop.checks import PopChecks
from cometmq.broker.pop.expiry import LeaseExpiry
from cometmq.broker.pop.leases import Leases, QueueKey
from cometmq.broker.pop.pops import Pops
from cometmq.broker.pull.long_poll import LongPoll
from cometmq.broker.tables.durable import DurableTables
from cometmq.periodic import Periodic
from cometmq.remoting import Tick
from cometmq.store import Clock, MessageStore

SWEEP_S = 10.0


@dataclass(eq=False, kw_only=True)
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

    def __post_init__(self) -> None:
        self.leases = Leases(self.tables.offsets, self.clock.time_ms())
        self.checks = PopChecks(
            config=self.config, store=self.store, tables=self.tables, filters=self.filters
        )
        self.expiry = LeaseExpiry(
            clock=self.clock, store=self.store, tables=self.tables, writer=self.writer, leases=self.leases,
            freed=self._freed,
        )  # fmt: skip
        self.pops = Pops(
            clock=self.clock, store=self.store, tick=self.tick, tables=self.tables, stats=self.stats,
            leases=self.leases, arrivals=self.arrivals, on_leased=self.expiry.arm,
        )  # fmt: skip
        self._sweeps = Periodic(
            asyncio.get_running_loop(), SWEEP_S, self.pops.sweep, name="sweep of the topics with parked pops"
        )

    def _freed(self, key: QueueKey) -> None:
        self.pops.freed(key)

    def ack(self, key: QueueKey, offset: int, pop_ms: int) -> bool:
        """Mark a message as consumed.

        Args:
            key: The group, the topic in which the message was found, and the queue id.
            offset: The message's queue offset.
            pop_ms: The pop time in its receipt handle.

        Returns:
            False if the message is not leased under this handle.
        """
        queue = self.leases.find(key)
        ordered = queue is not None and queue.ordered
        done = self.leases.ack(key, offset, pop_ms)
        if done and ordered and queue is not None and not queue.leases:
            self.pops.freed(key)
        return done

    def renew(
        self, key: QueueKey, offset: int, pop_ms: int, invisible_ms: int, *, counts: bool = True
    ) -> bool:
        """Let a lease expire `invisible_ms` from now. The arguments and the result are those of `ack`.

        With `counts=False`, the delivery does not count as one of the group's retries.
        """
        renewed = self.leases.renew(key, offset, pop_ms, mono_ms(self.clock), invisible_ms, counts)
        if renewed:
            self.expiry.arm()
        return renewed

    def restart(self) -> None:
        """Forget all leases: this broker becomes the leader, and other leaders have moved the offsets."""
        self.leases.clear()
        self.pops.restart()

    def start(self) -> None:
        """Begin to handle expired leases."""
        self._sweeps.start()
        self.expiry.start()

    async def stop(self) -> None:
        """Answer waiting pops and handle no further leases."""
        self._sweeps.cancel()
        await self.pops.stop()
        await self.expiry.stop()
