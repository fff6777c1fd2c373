"""The services that a broker in a raft group runs only while it is the leader.

The leader is the master (`brokerId` 0): it accepts sends, delivers delayed messages, and checks transactions.
A follower is a slave: it serves reads of committed messages. After an election, the new leader registers with
the name servers immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from cometmq import logs
from cometmq.broker.base.config import MASTER_ID, BrokerConfig
from cometmq.broker.lite.service import LiteService
from cometmq.broker.pop.service import PopService
from cometmq.broker.register import Registrar
from cometmq.broker.send.dedup import Deduplication
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.timers.schedule import ScheduleService
from cometmq.broker.timers.timers import TimerService
from cometmq.broker.transactions.service import TransactionService
from cometmq.store import Clock, MessageStore

log = logs.logger(__name__)

GRACE_S = 600.0
"""The time in seconds for which a follower keeps an expired segment that its leader has not deleted yet.

The leader first stores copies of the segment's undelivered messages at the end of the log, and these copies
must reach the follower before the follower deletes the segment.
"""


@dataclass(eq=False)
class LeaderServices:
    """The services that run while a broker leads its raft group. `follower_id` is a follower's `brokerId`."""

    config: BrokerConfig
    clock: Clock
    store: MessageStore
    tables: DurableTables
    registrar: Registrar
    schedule: ScheduleService
    timers: TimerService
    transactions: TransactionService
    pops: PopService
    lite: LiteService
    dedup: Deduplication
    follower_id: int

    def __post_init__(self) -> None:
        self.leader_log: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the begin and the end of the leader's log, as last reported by the leader."""
        self._resting: asyncio.Task[None] | None = None
        self._leads = False
        # The log position before which this follower last tried to delete segments, and the time of its first
        # attempt with this position
        self._asked: tuple[int, float] = (-1, 0.0)
        self._become(self.follower_id)
        self.store.retention.before_delete = self._may_go

    def _become(self, broker_id: int) -> None:
        self.config.broker_id = broker_id
        self.store.slave = broker_id != MASTER_ID

    async def prepare(self) -> None:
        """Read the state that a master needs before it can accept requests. Raises OSError or StoreError."""
        if self._resting is not None:
            await self._resting
        self.tables.adopt()
        for service in (self.schedule, self.timers, self.transactions, self.pops):
            service.restart()
        await asyncio.to_thread(self.transactions.load)
        await self.dedup.scanned()

    def lead(self) -> None:
        """Become the master: start the leader services and register with the name servers."""
        self._leads = True
        self._become(MASTER_ID)
        self.transactions.fill()
        for service in (self.schedule, self.timers, self.transactions, self.pops):
            service.start()
        self.lite.lead()
        # Increase the data version of the topics. As a follower, this broker may already have registered with
        # the current version. Name servers ignore a follower's topics. If the version stayed the same, they
        # would also ignore the topics that this broker now registers as the leader.
        self.tables.topics.touch()

    def follow(self) -> None:
        """Become a follower: stop the leader services and register with the name servers."""
        self._become(self.follower_id)
        if self._leads:
            self._leads = False
            self.schedule.let_go()
            self._resting = asyncio.get_running_loop().create_task(self._rest())
        self.registrar.register()

    async def _may_go(self, behind: int) -> bool:
        """Return whether the log before `behind` is committed, and copies of its waiting messages follow."""
        raft_log, now = self.store.raft_log, self.clock.boottime()
        if raft_log is None or raft_log.committed < raft_log.first:
            return False
        committed = raft_log.location_of(raft_log.committed).end
        if committed < behind:
            return False
        if self._leads:
            return await self.timers.move_on(behind)
        begin, end = self.leader_log()
        # A follower may delete the log before `behind` if the leader has done so, and if the leader's copies
        # of the undelivered messages in this part are committed here.
        if behind <= begin and end <= committed:
            return True
        if self._asked[0] != behind:
            self._asked = (behind, now)
        return now - self._asked[1] >= GRACE_S

    async def _rest(self) -> None:
        for stop in (
            self.schedule.stop, self.timers.stop, self.transactions.stop, self.pops.stop, self.lite.follow,
        ):  # fmt: skip
            try:
                await stop()
            except Exception:  # Go on: all services must be stopped before this member leads again
                log.exception("a leader service did not stop cleanly")

    async def stop(self) -> None:
        """Wait until leader services that are being stopped have ended."""
        if self._resting is not None:
            await self._resting
