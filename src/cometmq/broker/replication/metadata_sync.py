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
old messages in those queues that have got no new one yet (RecordDispatch sees to the others). A master of
ours says up to where in the log, which is one log; of another it is found out by what it has.

Nothing is taken before the logs have been compared: a master that came back without its disk knows nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import chain, repeat
from typing import NamedTuple, TypeVar

import msgspec

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
from cometmq.protocol.codes import STORED_LENGTH_MAX, RequestCode, ResponseCode, is_legal_name
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


class Extent(NamedTuple):
    """Log positions where a log begins and ends."""

    begin: int
    end: int


class Said(NamedTuple):
    """Offsets as the master gave them, and where its log ended afterwards; asked: the end of the log here
    before, which is not behind that of the master's then."""

    offsets: ConsumerOffsetTable
    delays: DelayOffsetTable
    log_end: int
    asked: int


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


async def _trust(_master_addr: str) -> None:
    """In a raft group what contradicts the leader's log is cut."""


class MetadataSync:
    """Asks the master every 10 s, the first time after 3 s."""

    def __init__(
        self,
        store: MessageStore,
        tables: DurableTables,
        client: RemotingClient,
        confirm: Callable[[str], Awaitable[None]] = _trust,
        first_s: float = FIRST_S,
        period_s: float = PERIOD_S,
        newer_only: bool = False,
    ) -> None:
        """confirm: comes back if the master's log is this one's, else its tables are not, either; raises
        CometError. newer_only: take no table that is older than the own one."""
        self._newer_only = newer_only
        self._confirm = confirm
        self._store = store
        self._tables = tables
        self._client = client
        self._said: Said | None = None  # waits for the log
        self._before: Offsets | None = None
        self._deleted: dict[str, int] = {}  # topic -> end of the master's log when it was gone
        self._refuted: dict[str, int] = {}  # deletions that were not done, so that each is said once
        self._looked = False  # whether the master has been asked about the queues here
        self.master_addr = ""
        self.master_log = Extent(0, 0)
        """The log of the master, or leader, as it was when its offsets were last asked for."""
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
            self.master_log = Extent(0, 0)

    async def sync(self) -> None:
        """One round. What fails is tried again in the next."""
        if not self.master_addr:
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
        wanted = self._is_wanted(table.data_version, topics.version)
        # What a power failure took from the log here comes again, deleted topics' messages, too.
        looks = wanted or not (self._looked or self._newer_only)
        gone: dict[str, int] = {}
        if looks:
            end = (await self._extent()).end
            table = await self._ask(RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigTable)
            for topic in self._store.queues.topics():
                if topic not in table.topic_config_table and not topics.is_system(topic):
                    gone |= {topic: end} if await self._is_gone(topic) else {}
        gone |= self.unknown_deletions(table)
        if looks or gone:
            await self._sure()
            self._deleted |= gone
            self._looked = True
        if wanted and table.data_version is not None:
            topics.replace(table.data_version, table.topic_config_table)
        self.delete()

    async def _sure(self) -> None:
        """What the master has said holds here. Raises CometError if it does not."""
        asked = self.master_addr
        await self._confirm(asked)
        if asked != self.master_addr:
            raise NotTheMaster(f"{asked} was the master when it was asked")

    def unknown_deletions(self, table: TopicConfigTable) -> dict[str, int]:
        """What another broker of this log has deleted, and this one has not: topic -> log position."""
        known = self._store.deleted.ends
        return {
            topic: end
            for topic, end in (table.deleted_topics or {}).items()
            if end > known.get(topic, 0) and is_legal_name(topic, STORED_LENGTH_MAX)
        }

    def take_deletions(self, table: TopicConfigTable) -> None:
        """For a new leader, whose log is the group's: do what another member knows to be deleted."""
        end = self._store.log.end
        self._deleted |= {topic: min(each, end) for topic, each in self.unknown_deletions(table).items()}
        self.delete()

    @property
    def deletions_wait(self) -> bool:
        """Whether deletions of the master's are to be done here once the log is."""
        return bool(self._deleted)

    @property
    def offsets_wait(self) -> bool:
        """Whether offsets of the master's are to be taken here once the log is as long."""
        return self._said is not None

    async def _is_gone(self, topic: str) -> bool:
        """Whether the queues of a topic that the master does not know are not there either: a table may be
        lost."""
        longest = max(self._store.queues.of_topic(topic), key=lambda queue: queue.max_offset)
        header = GetMaxOffsetRequestHeader(topic=topic, queue_id=longest.queue_id)
        frame = Frame.request(RequestCode.GET_MAX_OFFSET, header)
        answer = success(await self._client.call(self.master_addr, frame, TIMEOUT_S))
        return answer.header(OffsetResponseHeader).offset < longest.max_offset

    def delete(self) -> None:
        """Do the deletions that were learned of and that the log has reached."""
        store, waiting = self._store, self._store.dispatcher
        if waiting.own_wait:
            return
        done = store.checkpointing.covered().position
        reached = done if waiting.waits else max(done, store.replica.end)
        due = {topic: end for topic, end in self._deleted.items() if end <= reached}
        self._deleted = {topic: end for topic, end in self._deleted.items() if end > reached}
        for topic in [topic for topic, end in due.items() if self._goes_on(topic, end)]:
            if self._refuted.get(topic) != due[topic]:
                self._refuted[topic] = due[topic]
                text = "topic %s is said to be deleted up to %d, but goes on behind that: its queues stay"
                log.warning(text, topic, due[topic])
            del due[topic]
        there = due.keys() & store.queues.topics()
        for topic in there:
            store.deletion.delete_before(topic, due[topic], done)
        if due.keys() - there:
            store.deletion.note_before(sorted(due.keys() - there), reached)

    def _goes_on(self, topic: str, end: int) -> bool:
        """Whether a queue has messages on both sides of a deletion. A topic begins anew behind its own, so
        that one was of a leader whose log did not become the group's."""
        queues = self._store.queues.of_topic(topic)
        return any(queue.first_position() < end < queue.max_physical for queue in queues)

    async def _groups(self) -> None:
        table = await self._ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, SubscriptionGroupTable)
        groups = self._tables.groups
        if table.data_version is not None and self._is_wanted(table.data_version, groups.version):
            await self._sure()
            groups.replace(table.data_version, table.subscription_group_table)

    async def _offsets(self) -> None:
        if self._said is None:
            asked = self._store.replica.end
            offsets = await self._ask(RequestCode.GET_ALL_CONSUMER_OFFSET, ConsumerOffsetTable)
            delays = await self._ask(RequestCode.GET_ALL_DELAY_OFFSET, DelayOffsetTable)
            extent = await self._extent()
            await self._sure()
            self._said, self.master_log = Said(offsets, delays, extent.end, asked), extent
        if self._store.replica.end >= self._said.log_end:
            said, self._said = self._said, None
            await self._take(said)

    async def _extent(self) -> Extent:
        """The master's log now."""
        table = (await self._ask(RequestCode.GET_BROKER_RUNTIME_INFO, KVTable)).table
        return Extent(int(table.get("commitLogMinOffset", 0)), int(table.get("commitLogMaxOffset", 0)))

    async def _take(self, said: Said) -> None:
        tables, given = self._tables, said.offsets
        if self._newer_only and order(given.data_version) <= order(tables.offsets.version):
            return
        gone = {topic for topic, end in self._store.deleted.ends.items() if end >= said.asked}
        offsets = {key: each for key, each in given.offset_table.items() if split_key(key)[0] not in gone}
        outcome = self.merge(msgspec.structs.replace(given, offset_table=offsets))
        tables.delays.replace(said.delays.offset_table, said.delays.log_position)
        floors = given.min_offsets or {}  # perhaps of a topic of that name that is gone: the next ones tell
        await self._purge({topic: dict(pairs) for topic, pairs in floors.items() if topic not in gone})
        await self._give_back(outcome)

    async def _purge(self, floors: Offsets) -> None:
        """Hide what the master hides, by a purge or a topic's own retention."""
        store = self._store
        for topic, queues in floors.items():
            known = store.min_offsets.by_topic.get(topic, {})
            higher = {
                queue_id: min(floor, store.max_offset(topic, queue_id))
                for queue_id, floor in queues.items()
                if known.get(queue_id, 0) < floor
            }
            higher = {queue_id: floor for queue_id, floor in higher.items() if floor > known.get(queue_id, 0)}
            if higher:
                try:
                    await store.purge.raise_min_offsets(topic, higher)
                except OSError as failure:
                    log.error("%s, purged at the master, could not be purged: %s", topic, failure)

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
