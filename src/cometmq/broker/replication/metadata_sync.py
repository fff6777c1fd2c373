"""A slave's copy of its master's tables: topics, groups, consumer offsets, delay offsets
(docs/reference/storage.md, Slave metadata sync).

Offsets never run ahead of the log that they refer to: those that the master has given wait until the slave's
log is as long as the master's was afterwards. Else a slave that takes the master's place could have the
offset behind a message that was delivered or sent back, without the copy of that message.

While the master is away consumers store their offsets here. What the master does not know of them is sent to
it when it is back; the larger offset holds. Everything else is as the master says, smaller offsets too: those
may have been reset. In a raft group only newer tables are taken: who has just been elected may not know yet
what its own followers have (see raft_tables.py).

The queues of a topic that the master has deleted go here, too. Without that a topic made anew would show its
old messages in those queues that have got no new one yet (RecordDispatch sees to the others).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import chain, repeat
from typing import NamedTuple, TypeVar

from cometmq import logs
from cometmq.broker.replication.ha_client import success
from cometmq.broker.tables.consumer_offsets import split_key
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.tables.versions import order
from cometmq.errors import CometError
from cometmq.periodic import Periodic
from cometmq.protocol.bodies import (
    Body,
    ConsumerOffsetTable,
    DataVersion,
    DelayOffsetTable,
    KVTable,
    SubscriptionGroupTable,
    TopicConfigTable,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    GetMaxOffsetRequestHeader,
    OffsetResponseHeader,
    UpdateConsumerOffsetRequestHeader,
)
from cometmq.remoting import RemotingClient
from cometmq.store import MessageStore

log = logs.logger(__name__)

Table = TypeVar("Table", bound=Body)

FIRST_S, PERIOD_S = 3.0, 10.0
TIMEOUT_S = 3.0
MOST_RETURNED = 10_000
"""Offsets that are sent to a master in one round; the others follow in the next."""

Offsets = Mapping[str, Mapping[int, int]]
"""topic@group -> queue id -> offset."""


class NotTheMaster(CometError):
    """The answer is that of a former master."""


class Said(NamedTuple):
    """Offsets as the master gave them, and where its log ended afterwards."""

    offsets: ConsumerOffsetTable
    delays: DelayOffsetTable
    log_end: int


class Merged(NamedTuple):
    """What a slave's offsets become, and those that its master is to be told of: topic@group, queue id,
    offset."""

    offsets: dict[str, dict[int, int]]
    returned: list[tuple[str, int, int]]


def merged(own: Offsets, before: Offsets | None, master: Offsets) -> Merged:
    """Own offsets and the master's, by what the master said `before`: what differs from that was stored here
    since. before: None if it has said nothing yet; then its word holds alone."""
    result = {key: dict(queues) for key, queues in master.items()}
    returned = []
    for key, queues in own.items() if before is not None else ():
        known, now = (before or {}).get(key, {}), master.get(key, {})
        for queue_id, offset in queues.items() if queues != known else ():
            if offset != known.get(queue_id) and offset > now.get(queue_id, -1):
                result.setdefault(key, {})[queue_id] = offset
                returned.append((key, queue_id, offset))
    return Merged(result, returned)


class MetadataSync:
    """Asks the master every 10 s, the first time after 3 s."""

    def __init__(
        self,
        store: MessageStore,
        tables: DurableTables,
        client: RemotingClient,
        contradicted: Callable[[], bool] = lambda: False,
        first_s: float = FIRST_S,
        period_s: float = PERIOD_S,
        newer_only: bool = False,
    ) -> None:
        """contradicted: whether the master's log is not this one's; then its tables are not, either.
        newer_only: take no table that is older than the own one."""
        self._newer_only = newer_only
        self._contradicted = contradicted
        self._store = store
        self._tables = tables
        self._client = client
        self._said: Said | None = None  # waits for the log
        self._before: Offsets | None = None
        self._deleted: dict[str, int] = {}  # topic -> end of the master's log when it was gone
        self.master_addr = ""
        self.failure = ""
        waits = chain([first_s], repeat(period_s))
        self._timer = Periodic(
            asyncio.get_running_loop(), lambda: next(waits), self.sync, name="copy of the master's tables"
        )

    def start(self) -> None:
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()

    def follow(self, master_addr: str) -> None:
        """This is the master now."""
        if master_addr != self.master_addr:
            self.master_addr = master_addr
            self._said = None
            self._deleted.clear()

    async def sync(self) -> None:
        """One round. What fails is tried again in the next."""
        if not self.master_addr or self._contradicted():
            return
        try:
            await self.settings()
            await self._offsets()
        except CometError as error:
            if str(error) != self.failure:
                log.warning("tables of the master %s are not copied: %s", self.master_addr, error)
            self.failure = str(error)
        else:
            self.failure = ""

    async def settings(self) -> None:
        """Copy topics and groups. Raises CometError."""
        await self._topics()
        await self._groups()

    def _is_wanted(self, version: DataVersion | None, own: DataVersion | None) -> bool:
        if self._newer_only:
            return order(version) > order(own)
        return version is not None and version != own

    async def _ask(self, code: int, kind: type[Table]) -> Table:
        """A table of the master's, read by a thread: it may be long. Without a header 5.5 gives its tables as
        a whole, not in pages."""
        asked = self.master_addr
        answer = success(await self._client.call(asked, Frame.request(code), TIMEOUT_S))
        table = await asyncio.to_thread(kind.decode, bytes(answer.body))
        if asked != self.master_addr:  # in a raft group this member itself may lead by now
            raise NotTheMaster(f"{asked} was the master when it was asked")
        return table

    async def _topics(self) -> None:
        table = await self._ask(RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigTable)
        topics = self._tables.topics
        if self._is_wanted(table.data_version, topics.version):
            end = await self._end()
            table = await self._ask(RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigTable)
            for topic in self._store.queues.topics():
                if topic not in table.topic_config_table and not topics.is_system(topic):
                    await self._look_for(topic, end)
            if table.data_version is not None:
                topics.replace(table.data_version, table.topic_config_table)
        self._delete()

    async def _look_for(self, topic: str, end: int) -> None:
        """Note a topic as deleted that the master did not know when its log went as far as `end` at least, if
        its queues are not there either: a table may be lost."""
        longest = max(self._store.queues.of_topic(topic), key=lambda queue: queue.max_offset)
        header = GetMaxOffsetRequestHeader(topic=topic, queue_id=longest.queue_id)
        frame = Frame.request(RequestCode.GET_MAX_OFFSET, header)
        answer = success(await self._client.call(self.master_addr, frame, TIMEOUT_S))
        if answer.header(OffsetResponseHeader).offset < longest.max_offset:
            self._deleted[topic] = end

    def _delete(self) -> None:
        store, waiting = self._store, self._store.dispatcher
        done = store.checkpointing.covered().position
        for topic, end in list(self._deleted.items()):
            reached = done >= end or (store.replica.end >= end and not waiting.waits)
            if reached and not waiting.own_wait:
                del self._deleted[topic]
                store.deletion.delete_before(topic, end, done)

    async def _groups(self) -> None:
        table = await self._ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, SubscriptionGroupTable)
        groups = self._tables.groups
        if table.data_version is not None and self._is_wanted(table.data_version, groups.version):
            groups.replace(table.data_version, table.subscription_group_table)

    async def _offsets(self) -> None:
        if self._said is None:
            offsets = await self._ask(RequestCode.GET_ALL_CONSUMER_OFFSET, ConsumerOffsetTable)
            delays = await self._ask(RequestCode.GET_ALL_DELAY_OFFSET, DelayOffsetTable)
            self._said = Said(offsets, delays, await self._end())
        if self._store.replica.end >= self._said.log_end:
            said, self._said = self._said, None
            await self._take(said)

    async def _end(self) -> int:
        """Where the master's log ends now."""
        facts = await self._ask(RequestCode.GET_BROKER_RUNTIME_INFO, KVTable)
        return int(facts.table.get("commitLogMaxOffset", 0))

    async def _take(self, said: Said) -> None:
        tables, given = self._tables, said.offsets
        if self._newer_only and order(given.data_version) <= order(tables.offsets.version):
            return
        outcome = self.merge(given)
        tables.delays.replace(said.delays.offset_table, said.delays.log_position)
        await self._give_back(outcome)

    def merge(self, given: ConsumerOffsetTable) -> Merged:
        """Take consumer offsets, with what was stored here since the last ones came."""
        offsets = self._tables.offsets
        outcome = merged(offsets.to_table()["offsetTable"], self._before, given.offset_table)
        self._before = given.offset_table
        offsets.replace(outcome.offsets, given.data_version)
        return outcome

    async def _give_back(self, outcome: Merged) -> None:
        taken = 0
        for key, queue_id, offset in outcome.returned[:MOST_RETURNED]:
            topic, group = split_key(key)
            header = UpdateConsumerOffsetRequestHeader(
                consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset
            )
            frame = Frame.request(RequestCode.UPDATE_CONSUMER_OFFSET, header)
            answer = await self._client.call(self.master_addr, frame, TIMEOUT_S)
            taken += answer.code == ResponseCode.SUCCESS  # 5.x refuses those of groups that it does not know
        if outcome.returned:
            text = "of %d offsets that were stored here %s has taken %d"
            log.info(text, len(outcome.returned), self.master_addr, taken)
