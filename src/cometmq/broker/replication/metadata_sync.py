"""A slave's copy of its master's tables: topics, groups, consume modes, offsets of consumers and of delays.

RocketMQ's requests for these tables are in docs/reference/storage.md, Slave metadata sync.

An offset must never refer to a part of the log that the slave lacks. So the slave applies the master's
offsets only once the slave's log is as long as the master's log was when the master sent the offsets.
Otherwise, messages could be lost: if a consumer returns a message for a later retry, the master stores a new
copy of the message and then an offset beyond the original. A slave that has this offset without the copy, and
then replaces the master, would never deliver the message again.

While the master is unreachable, consumers store their offsets at the slave. Once the master is back, the
slave sends it these offsets; the larger offset wins. All other values are taken from the master, even smaller
offsets, because an offset may have been reset. In a raft group, a table is copied only if it is newer: a
newly elected leader may lack entries that its followers have (see raft_tables.py).

If the master has deleted a topic, the slave deletes the topic's queues, too. Otherwise, if the topic were
created again, each of its queues at the slave would contain the old messages until the queue gets its first
new message. A CometMQ master reports the log position of the deletion, which is the same in both logs.
Apache's master reports no deletions, so a topic counts as deleted if the master has neither the topic nor its
queues.

Nothing is copied before the logs have been compared, because a master that returns with an empty disk has
empty tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import chain, repeat
from typing import NamedTuple, TypeVar

import msgspec

from cometmq import logs
from cometmq.broker.lite.service import LiteStateCopy
from cometmq.broker.replication.ha_client import success
from cometmq.broker.tables.consumer_offsets import split_key
from cometmq.broker.tables.durable import DurableTables
from cometmq.broker.tables.versions import order
from cometmq.errors import BrokerError, CometError
from cometmq.periodic import Periodic
from cometmq.protocol.bodies import (
    Body,
    ConsumerOffsetTable,
    DataVersion,
    DelayOffsetTable,
    KVTable,
    LiteState,
    MessageRequestModeTable,
    SubscriptionGroupTable,
    TopicConfigTable,
)
from cometmq.protocol.codes import MAX_STORED_TOPIC_LENGTH, RequestCode, ResponseCode, is_legal_name
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    Header,
    OffsetResponseHeader,
    QueueRequestHeader,
    UpdateConsumerOffsetRequestHeader,
)
from cometmq.remoting import RemotingClient
from cometmq.store import MessageStore

log = logs.logger(__name__)

Table = TypeVar("Table", bound=Body)

FIRST_S, PERIOD_S = 3.0, 10.0
TIMEOUT_S = 3.0
LOG_INTERVAL_S, LOG_TESTS = 0.05, 40
"""A wait for records of the master tests the end of the log at this interval, in seconds, this many times."""
MAX_RETURNED_OFFSETS = 10_000
"""The maximum number of offsets sent to a master in one cycle. Further offsets wait for the next cycles."""

Offsets = Mapping[str, Mapping[int, int]]
"""Consumer offsets: the key "topic@group" maps to the offsets by queue id."""


class NotTheMaster(CometError):
    """A response is from a broker that is no longer the master."""


class Extent(NamedTuple):
    """The log positions at which a log begins and ends."""

    begin: int
    end: int


class MasterOffsets(NamedTuple):
    """The offsets that the master has sent.

    Attributes:
        log_end: The end of the master's log after the master sent the offsets.
        asked: The end of the slave's log just before the request. The master's log did not end before it.
    """

    offsets: ConsumerOffsetTable
    delays: DelayOffsetTable
    log_end: int
    asked: int


Returned = list[tuple[str, int, int]]
"""Offsets that a slave sends to its master, each as the key "topic@group", queue id and offset."""


def merged(
    own: Offsets, before: Offsets | None, master: Offsets
) -> tuple[dict[str, dict[int, int]], Returned]:
    """Return the slave's `own` offsets merged with the master's, and those to be sent to the master.

    If a slave's offset differs from the one that the master sent the last time (`before`, None if it has not
    sent any), a consumer has stored it at the slave. Such an offset wins if it is larger than the one that
    the master has sent now.
    """
    result = {key: dict(queues) for key, queues in master.items()}
    returned = []
    for key, queues in own.items() if before is not None else ():
        known, now = (before or {}).get(key, {}), master.get(key, {})
        for queue_id, offset in queues.items() if queues != known else ():
            if offset != known.get(queue_id) and offset > now.get(queue_id, -1):
                result.setdefault(key, {})[queue_id] = offset
                returned.append((key, queue_id, offset))
    return result, returned


async def _trust(_master_addr: str) -> None:
    """Accept any master's log. In a raft group, log entries that differ from the leader's are replaced."""


class MetadataSync:
    """Copies the master's tables periodically: first after 3 s, then every 10 s."""

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
        """Create the copier. It copies nothing before `start` is called.

        Args:
            confirm: Compares this broker's log with the log of the master at the given address, and raises
                CometError if they differ. The master's tables are copied only if the logs match.
            newer_only: Whether to copy a table only if it is newer than this broker's table.
        """
        self._newer_only = newer_only
        self._confirm = confirm
        self._store = store
        self._tables = tables
        self._client = client
        # Offsets from the master. They are applied once this broker's log is as long as the master's log was.
        self._master_offsets: MasterOffsets | None = None
        self._before: Offsets | None = None
        # Topics that this broker must delete, because the master has deleted them. The value is the log
        # position before which the topic's messages are deleted.
        self._deleted: dict[str, int] = {}
        # Topics that this broker has kept, although another member has deleted them. A warning was logged.
        # The value is the log position of the deletion.
        self._refuted: dict[str, int] = {}
        self.lite: LiteStateCopy | None = None
        """The copy of the consumer offsets in lite topics."""
        self._checked_queues = False  # Whether this broker's queues were compared with the master's topics
        self.master_addr = ""
        self.master_log = Extent(0, 0)
        """The begin and end of the master's (or leader's) log when its offsets were last requested."""
        self.failure = ""
        waits = chain([first_s], repeat(period_s))
        timer = Periodic(
            asyncio.get_running_loop(), lambda: next(waits), self.sync, name="copy of the master's tables"
        )
        self.start, self.stop = timer.start, timer.cancel

    def follow(self, master_addr: str) -> None:
        """Copy the tables of the master at `master_addr` from now on."""
        if master_addr != self.master_addr:
            self.master_addr = master_addr
            self._master_offsets = None
            self._deleted.clear()
            self.master_log = Extent(0, 0)

    async def sync(self) -> None:
        """Copy all tables of the master once. A table whose copy fails is copied again in the next cycle."""
        if not self.master_addr:
            return
        try:
            await self.settings()
            await self._offsets()
            await self._lite_state()
        except CometError as error:
            if str(error) != self.failure:
                log.warning("tables of master %s could not be copied: %s", self.master_addr, error)
            self.failure = str(error)
        else:
            self.failure = ""

    async def settings(self) -> None:
        """Copy the tables of topics and groups. Raises CometError if that fails."""
        await self._topics()
        await self._groups()

    def _is_wanted(self, version: DataVersion | None, own: DataVersion | None) -> bool:
        if self._newer_only:
            return order(version) > order(own)
        return version is not None and version != own

    async def _request_table(self, code: int, kind: type[Table], header: Header | None = None) -> Table:
        """Request a table from the master. Decode it in a thread, because it may be long.

        To a request without a header, a RocketMQ 5.5 broker sends the whole table in one response rather than
        in pages.
        """
        asked = self.master_addr
        answer = success(await self._client.call(asked, Frame.request(code, header), TIMEOUT_S))
        table = await asyncio.to_thread(kind.decode, bytes(answer.body))
        self._require_master(asked)
        return table

    def _require_master(self, asked: str) -> None:
        if asked != self.master_addr:  # In a raft group, the leader may have changed during a request
            raise NotTheMaster(f"{asked} is no longer the master")

    async def _topics(self) -> None:
        table = await self._request_table(RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigTable)
        topics = self._tables.topics
        wanted = self._is_wanted(table.data_version, topics.version)
        # Compare the queues also after a start: if a power failure has removed records from the end of this
        # log, the master sends these records again, even records of topics that have been deleted since.
        looks = wanted or not (self._checked_queues or self._newer_only)
        gone: dict[str, int] = {}
        if looks:
            end = (await self._extent()).end
            table = await self._request_table(RequestCode.GET_ALL_TOPIC_CONFIG, TopicConfigTable)
            for topic in self._store.queues.topics():
                if topic not in table.topic_config_table and not topics.is_system(topic):
                    gone |= {topic: end} if await self._is_gone(topic) else {}
        gone |= self.unknown_deletions(table)
        if looks or gone:
            await self._confirm_log()
            self._deleted |= gone
            self._checked_queues = True
        if wanted and table.data_version is not None:
            topics.replace(table.data_version, table.topic_config_table)
        self.delete()

    async def _confirm_log(self) -> None:
        """Check that the master's log matches this broker's log. Raises CometError if the logs differ."""
        asked = self.master_addr
        await self._confirm(asked)
        self._require_master(asked)

    def unknown_deletions(self, table: TopicConfigTable) -> dict[str, int]:
        """Return the topic deletions, with log positions, that `table` contains but this broker lacks."""
        known = self._store.deleted.ends
        return {
            topic: end
            for topic, end in (table.deleted_topics or {}).items()
            if end > known.get(topic, 0) and is_legal_name(topic, MAX_STORED_TOPIC_LENGTH)
        }

    def take_deletions(self, table: TopicConfigTable) -> None:
        """Delete the topics that another member's table records as deleted.

        This broker's log must contain all entries of the group.
        """
        end = self._store.log.end
        self._deleted |= {topic: min(each, end) for topic, each in self.unknown_deletions(table).items()}
        self.delete()

    @property
    def deletions_wait(self) -> bool:
        """Whether deletions of the master wait until this broker's log has reached their log positions."""
        return bool(self._deleted)

    @property
    def offsets_wait(self) -> bool:
        """Whether offsets from the master wait until this broker's log is long enough for them."""
        return self._master_offsets is not None

    async def _is_gone(self, topic: str) -> bool:
        """Return whether the master has deleted a topic that is missing from the master's table.

        If the master still has the topic's queues, the topic was not deleted, but the table was lost.
        """
        longest = max(self._store.queues.of_topic(topic), key=lambda queue: queue.max_offset)
        header = QueueRequestHeader(topic=topic, queue_id=longest.queue_id)
        frame = Frame.request(RequestCode.GET_MAX_OFFSET, header)
        answer = success(await self._client.call(self.master_addr, frame, TIMEOUT_S))
        return answer.header(OffsetResponseHeader).offset < longest.max_offset

    def delete(self) -> None:
        """Apply the known topic deletions whose log position this broker's log has reached."""
        store = self._store
        if store.dispatcher.own_wait:
            return
        done = store.writer.covered().position
        reached = store.visible_end
        due = {topic: end for topic, end in self._deleted.items() if end <= reached}
        self._deleted = {topic: end for topic, end in self._deleted.items() if end > reached}
        for topic, end in list(due.items()):
            if self._goes_on(topic, end):
                if self._refuted.get(topic) != end:
                    self._refuted[topic] = end
                    text = (
                        "topic %s reported as deleted up to %d, but has later messages: its queues are kept"
                    )
                    log.warning(text, topic, end)
                del due[topic]
        there = due.keys() & store.queues.topics()
        for topic in there:
            store.deletion.delete_before(topic, due[topic], done)
        if due.keys() - there:
            store.deletion.record_before(sorted(due.keys() - there), reached)

    def _goes_on(self, topic: str, end: int) -> bool:
        """Return whether a queue of a topic has messages both before and after a deletion of the topic.

        A real deletion leaves no earlier messages. So if there are any, the deletion was made by a former
        leader whose log did not become the group's log.
        """
        queues = self._store.queues.of_topic(topic)
        return any(queue.first_position() < end < queue.max_physical for queue in queues)

    async def _groups(self) -> None:
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        table = await self._request_table(code, SubscriptionGroupTable)
        groups = self._tables.groups
        wanted = self._is_wanted(table.data_version, groups.version)
        if wanted or not self._newer_only:  # The modes of a RocketMQ master have no version
            modes = await self._modes()
            await self._confirm_log()
            self._tables.replace_modes(modes)
        if wanted and table.data_version is not None:
            groups.replace(table.data_version, table.subscription_group_table)

    async def _modes(self) -> MessageRequestModeTable:
        """Return the master's consume modes, or none if it is a broker of RocketMQ 4."""
        try:
            code = RequestCode.GET_ALL_MESSAGE_REQUEST_MODE
            return await self._request_table(code, MessageRequestModeTable)
        except BrokerError as error:
            if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise
            return MessageRequestModeTable()

    async def _offsets(self) -> None:
        if self._master_offsets is None:
            asked = self._store.replica.end
            offsets = await self._request_table(RequestCode.GET_ALL_CONSUMER_OFFSET, ConsumerOffsetTable)
            delays = await self._request_table(RequestCode.GET_ALL_DELAY_OFFSET, DelayOffsetTable)
            extent = await self._extent()
            await self._confirm_log()
            self._master_offsets, self.master_log = MasterOffsets(offsets, delays, extent.end, asked), extent
        if self._store.replica.end >= self._master_offsets.log_end:
            master, self._master_offsets = self._master_offsets, None
            await self._apply(master)

    async def _lite_state(self) -> None:
        """Copy the consumer offsets in lite topics that have changed since the last copy."""
        while self.lite is not None and (header := self.lite.request()) is not None:
            asked = self.master_addr
            try:
                table = await self._request_table(RequestCode.GET_LITE_STATE, LiteState, header)
            except BrokerError as error:
                if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                    raise
                return
            for _ in range(LOG_TESTS):
                if self._store.visible_end >= table.log_end:
                    break
                await asyncio.sleep(LOG_INTERVAL_S)
            else:
                return  # They are requested again in the next cycle
            if self.master_addr != asked or not self.lite.take(table):
                return

    async def _extent(self) -> Extent:
        """Return the positions at which the master's log currently begins and ends."""
        table = (await self._request_table(RequestCode.GET_BROKER_RUNTIME_INFO, KVTable)).table
        return Extent(int(table.get("commitLogMinOffset", 0)), int(table.get("commitLogMaxOffset", 0)))

    async def _apply(self, master: MasterOffsets) -> None:
        tables, given = self._tables, master.offsets
        if self._newer_only and order(given.data_version) <= order(tables.offsets.version):
            return
        gone = {topic for topic, end in self._store.deleted.ends.items() if end >= master.asked}
        offsets = {key: each for key, each in given.offset_table.items() if split_key(key)[0] not in gone}
        returned = self.merge(msgspec.structs.replace(given, offset_table=offsets))
        tables.delays.replace(master.delays.offset_table, master.delays.log_position)
        # If a topic was deleted and recreated after the master sent the minimum offsets, its minimum offset
        # is that of the deleted topic. In that case, the next copy of the offsets corrects it.
        floors = given.min_offsets or {}
        await self._purge({topic: dict(pairs) for topic, pairs in floors.items() if topic not in gone})
        await self._return_offsets(returned)

    async def _purge(self, floors: Offsets) -> None:
        """Hide the messages that the master hides because of a purge or of a topic's own retention."""
        store = self._store
        for topic, queues in floors.items():
            known = store.min_offsets.by_topic.get(topic, {})
            floors_here = (
                (each, min(floor, store.max_offset(topic, each))) for each, floor in queues.items()
            )
            higher = {queue_id: floor for queue_id, floor in floors_here if floor > known.get(queue_id, 0)}
            if higher:
                try:
                    await store.topic_retention.raise_min_offsets(topic, higher)
                except OSError as failure:
                    text = "topic %s was purged at the master, but could not be purged here: %s"
                    log.error(text, topic, failure)

    def merge(self, given: ConsumerOffsetTable) -> Returned:
        """Merge the master's consumer offsets with offsets that consumers have stored at this slave."""
        offsets = self._tables.offsets
        table, returned = merged(offsets.to_table()["offsetTable"], self._before, given.offset_table)
        self._before = given.offset_table
        offsets.replace(table, given.data_version)
        return returned

    async def _return_offsets(self, returned: Returned) -> None:
        taken = 0
        for key, queue_id, offset in returned[:MAX_RETURNED_OFFSETS]:
            topic, group = split_key(key)
            header = UpdateConsumerOffsetRequestHeader(
                consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset
            )
            frame = Frame.request(RequestCode.UPDATE_CONSUMER_OFFSET, header)
            answer = await self._client.call(self.master_addr, frame, TIMEOUT_S)
            # A RocketMQ 5 master refuses offsets of groups that it does not have.
            taken += answer.code == ResponseCode.SUCCESS
        if returned:
            text = "of %d offsets that were stored here %s has taken %d"
            log.info(text, len(returned), self.master_addr, taken)
