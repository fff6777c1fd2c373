"""What a broker of a raft group does as its leader, and does not as a follower.

The leader is the master, brokerId 0: it takes sends, delivers what waits, asks about transactions. A follower
is a slave: it serves reads of what is committed. The name servers hear at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from cometmq import logs
from cometmq.broker.base.config import MASTER_ID, BrokerConfig
from cometmq.broker.register import Registrar
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.timers.schedule import ScheduleService
from cometmq.broker.timers.timers import TimerService
from cometmq.broker.transactions.service import TransactionService
from cometmq.store import Clock, MessageStore

log = logs.logger(__name__)

GRACE_S = 600.0
"""A follower keeps an expired segment that its leader still has for so long: the leader stores what waits in
it again, and that must be here first."""


@dataclass(eq=False, kw_only=True)
class LeaderDuties:
    """What RaftReplication has done when the role changes. follower_id: the brokerId of this broker while
    another one leads."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    registrar: Registrar
    schedule: ScheduleService
    timers: TimerService
    transactions: TransactionService
    follower_id: int

    def __post_init__(self) -> None:
        self.leader_log: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Where the leader's log began and ended, when it was last asked."""
        self._resting: asyncio.Task[None] | None = None
        self._leads = False
        self._asked: tuple[int, float] = (-1, 0.0)  # which end of a segment retention asked about, and when
        self._become(self.follower_id)
        self.store.retention.move_on = self._may_go

    def _become(self, broker_id: int) -> None:
        self.config.broker_id = broker_id
        self.store.slave = broker_id != MASTER_ID

    async def prepare(self) -> None:
        """Read what a master must know before it takes anything. Raises OSError, StoreError."""
        if self._resting is not None:
            await self._resting
        self.tables.adopt()
        self.schedule.restart()
        self.timers.restart()
        self.transactions.restart()
        await asyncio.to_thread(self.transactions.load)

    def lead(self) -> None:
        """Deliver what is due, register as the master."""
        self._leads = True
        self._become(MASTER_ID)
        self.transactions.fill()
        self.schedule.start()
        self.timers.start()
        self.store.retention.move_on = self._may_go
        self.transactions.start()
        # With a new version, and registered so: the name servers may have had this one of a follower, whose
        # topics do not count for them.
        self.tables.topics.touch()

    def follow(self) -> None:
        """Do none of it."""
        self._become(self.follower_id)
        if self._leads:
            self._leads = False
            self.schedule.let_go()
            self._resting = asyncio.get_running_loop().create_task(self._rest())
        self.registrar.register()

    async def _may_go(self, behind: int) -> bool:
        """Whether the log up to a position may be deleted: it is committed, and nothing waits in it."""
        ledger, now = self.store.ledger, self.clock.boottime()
        if ledger is None or ledger.committed < ledger.first:
            return False
        committed = ledger.place_of(ledger.committed).end
        if committed < behind:
            return False
        if self._leads:
            return await self.timers.move_on(behind)
        begin, end = self.leader_log()
        if behind <= begin and end <= committed:  # the leader has deleted it, what it moved on is here
            return True
        if self._asked[0] != behind:
            self._asked = (behind, now)
        return now - self._asked[1] >= GRACE_S

    async def _rest(self) -> None:
        for stop in (self.schedule.stop, self.timers.stop, self.transactions.stop):
            try:
                await stop()
            except Exception:  # it must not keep this member from ever leading again
                log.exception("a duty of the leader did not end well")

    async def stop(self) -> None:
        """The broker stops; its parts do so by themselves."""
        if self._resting is not None:
            await self._resting
