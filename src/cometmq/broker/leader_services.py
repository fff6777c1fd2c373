"""The services that a broker of a raft group runs as leader.

The leader is the master, brokerId 0: it accepts sends, delivers waiting messages, and checks transactions. A
follower is a slave: it serves reads of committed messages. A new leader registers with the name servers
immediately.
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
"""The time in seconds for which a follower keeps an expired segment that its leader still has.

The leader stores the waiting messages of the segment again, and these copies must arrive first.
"""


@dataclass(eq=False, kw_only=True)
class LeaderServices:
    """The leader services that RaftReplication starts and stops when the role changes.

    `follower_id` is the brokerId of this broker while another one leads.
    """

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
        """Returns the begin and the end of the leader's log, as the leader last reported them."""
        self._resting: asyncio.Task[None] | None = None
        self._leads = False
        self._asked: tuple[int, float] = (-1, 0.0)  # the end of the segment to delete; request time
        self._become(self.follower_id)
        self.store.retention.before_delete = self._may_go

    def _become(self, broker_id: int) -> None:
        self.config.broker_id = broker_id
        self.store.slave = broker_id != MASTER_ID

    async def prepare(self) -> None:
        """Read the state that a master needs before it accepts requests. Raises OSError, StoreError."""
        if self._resting is not None:
            await self._resting
        self.tables.adopt()
        self.schedule.restart()
        self.timers.restart()
        self.transactions.restart()
        await asyncio.to_thread(self.transactions.load)

    def lead(self) -> None:
        """Start the deliveries and register as the master."""
        self._leads = True
        self._become(MASTER_ID)
        self.transactions.fill()
        self.schedule.start()
        self.timers.start()
        self.transactions.start()
        # The registration needs a new version: a follower may have sent the current version to the name
        # servers, which ignore a follower's topics.
        self.tables.topics.touch()

    def follow(self) -> None:
        """Stop the leader services."""
        self._become(self.follower_id)
        if self._leads:
            self._leads = False
            self.schedule.let_go()
            self._resting = asyncio.get_running_loop().create_task(self._rest())
        self.registrar.register()

    async def _may_go(self, behind: int) -> bool:
        """Return whether the log up to a position may be deleted: committed, without waiting messages."""
        raft_log, now = self.store.raft_log, self.clock.boottime()
        if raft_log is None or raft_log.committed < raft_log.first:
            return False
        committed = raft_log.location_of(raft_log.committed).end
        if committed < behind:
            return False
        if self._leads:
            return await self.timers.move_on(behind)
        begin, end = self.leader_log()
        if behind <= begin and end <= committed:  # the leader has deleted it, and moved messages are here
            return True
        if self._asked[0] != behind:
            self._asked = (behind, now)
        return now - self._asked[1] >= GRACE_S

    async def _rest(self) -> None:
        for stop in (self.schedule.stop, self.timers.stop, self.transactions.stop):
            try:
                await stop()
            except Exception:  # a failure here must not prevent this member from leading
                log.exception("a leader service did not stop cleanly")

    async def stop(self) -> None:
        """Stop this object. The other parts of the broker stop separately."""
        if self._resting is not None:
            await self._resting
