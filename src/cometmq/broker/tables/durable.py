"""The persistent tables of a broker: topics, groups, consume modes, offsets of consumers and delays, timers.

Each table has its own file. Topics, groups and modes are written after each change, the others every few
seconds if they have changed, and all but the modes when the broker stops
(docs/reference/storage.md, Writing tables).

An offset in a file must never refer to messages that the log on the disk lacks. So, before offsets are
written, the log is flushed up to the end that it had when the offsets were read. Otherwise, after a power
failure, the offset of a delivered or sent-back message could exist without the stored copy of that message.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from functools import partial
from itertools import chain, repeat
from typing import Any, Protocol

import msgspec

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.tables.consume_modes import ConsumeModeTable
from cometmq.broker.tables.consumer_offsets import ConsumerOffsets
from cometmq.broker.tables.delay_offsets import DelayOffsets
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.broker.tables.table_file import TableFile
from cometmq.broker.tables.timer_state import TimerState
from cometmq.broker.tables.topics import TopicTable
from cometmq.broker.tables.versions import Versions
from cometmq.errors import CommandError
from cometmq.periodic import Periodic
from cometmq.protocol import bodies
from cometmq.protocol.bodies import Body, DataVersion
from cometmq.protocol.codes import TRANS_CHECK_MAX_TIME_TOPIC, UNSENDABLE_TOPICS
from cometmq.store import DELAYS, GROUPS, OFFSETS, TIMERS, TOPICS, Clock, MessageStore

log = logs.logger(__name__)

NOT_LISTED = UNSENDABLE_TOPICS - {TRANS_CHECK_MAX_TIME_TOPIC}
"""The system topics that `adopt` must not add to the topic table."""

MODES = "messageRequestMode.json"
Offsets = ConsumerOffsets | DelayOffsets | TimerState
# The minimum delay, in seconds, before offsets are written for the first time, as in Apache's broker.
FIRST_WRITE_S = 10.0


class SettingsReplicas(Protocol):
    """The other members of a raft group, which have copies of this leader's topics and groups."""

    def check(self) -> int:
        """Return the term since which this broker has been the leader. Raises CommandError if it is not."""

    async def confirm(self) -> int:
        """Return the result of `check` once a majority has confirmed it. Raises CommandError."""

    async def keep(self, since: int) -> None:
        """Wait until a majority has the current tables. `since` is the result of `check` before the change.

        Raises CommandError if none has them, or if another broker has been the leader meanwhile.
        """


class DurableTables:
    """The six tables of a broker, and their files in the directory `config` of the store."""

    def __init__(
        self, config: BrokerConfig, clock: Clock, store: MessageStore, topics_changed: Callable[[], None]
    ) -> None:
        """Create empty tables. `topics_changed` is called after each change of the topic table."""
        self._config = config
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._topics_changed = topics_changed
        self.versions = Versions(clock.time_ms)
        self.replicas: SettingsReplicas | None = None
        """In a raft group: the members, of which a majority must store each change. Otherwise None."""
        self.topics = topics = TopicTable(config, self.versions, self._save_topics)
        self.groups = groups = SubscriptionGroups(config, self.versions, lambda: self.groups_file.save())
        self.modes = ConsumeModeTable()
        self.offsets = ConsumerOffsets()
        self.delays = DelayOffsets()
        self.timers = TimerState(clock.time_ms)
        self.topics_file = self._file(
            TOPICS, lambda: plain(bodies.TopicConfigTable(topics.table, topics.version)), after_log=False
        )
        self.groups_file = self._file(
            GROUPS,
            lambda: plain(bodies.SubscriptionGroupTable(groups.table, groups.version)),
            after_log=False,
        )
        self.modes_file = self._file(MODES, self.modes.to_table, after_log=False)
        self.offsets_file = self._file(OFFSETS, self._offsets_table, after_log=True)
        self.delays_file = self._file(DELAYS, self.delays.to_file, after_log=True)
        self.timers_file = self._file(TIMERS, self.timers.to_table, after_log=True)
        self._timers = [
            self._every(config.flush_consumer_offset_interval, self.offsets, self.offsets_file),
            self._every(config.flush_delay_offset_interval, self.delays, self.delays_file),
            self._every(config.flush_delay_offset_interval, self.timers, self.timers_file),
        ]

    def _file(self, name: str, content: Callable[[], dict[str, Any]], *, after_log: bool) -> TableFile:
        path = os.path.join(self._config.store.root, "config", name)
        return TableFile(self._store.disk, path, content, self.log_flushed if after_log else None)

    def _every(self, period_ms: int, table: Offsets, file: TableFile) -> Periodic:
        period_s = period_ms / 1000
        waits = chain([max(FIRST_WRITE_S, period_s)], repeat(period_s))
        job = partial(save_changes, table, file)
        return Periodic(self._loop, lambda: next(waits), job, name=f"writing {os.path.basename(file.path)}")

    async def log_flushed(self) -> None:
        """Wait until the log, up to its current end, is on the disk. Raises OSError if the flush fails."""
        store = self._store
        done: asyncio.Future[bool] = self._loop.create_future()
        store.flusher.wait_for(store.log.end, lambda ok: None if done.done() else done.set_result(ok))
        if not await done:
            raise store.flusher.failure or OSError(errno.ETIMEDOUT, "the commit log was not flushed in time")

    def load(self) -> None:
        """Load all tables from their files. Raises StoreCorrupt or OSError."""
        topics = bodies.TopicConfigTable.from_plain(self.topics_file.load())
        self.topics.load(topics.data_version, topics.topic_config_table, self._queues_with_messages)
        groups = bodies.SubscriptionGroupTable.from_plain(self.groups_file.load())
        self.groups.load(groups.data_version, groups.subscription_group_table)
        self.modes.load(self.modes_file.load())
        offsets = self.offsets_file.load()
        self.offsets.load(offsets)
        if self.versions.term is not None:
            plain_version = {"dataVersion": offsets.get("dataVersion")}
            self.offsets.version = bodies.ConsumerOffsetTable.from_plain(plain_version).data_version
        if not self._store.recovered.clean:
            version = self.offsets.version
            for key, lowered in self.offsets.lower(self._store.max_offset):
                # Lower the version, so that the table of another member, whose offsets were not lowered,
                # counts as newer.
                if version is not None:
                    older = msgspec.structs.replace(version, counter=version.counter - 1)
                    self.offsets.version = older
                log.warning(
                    "the last stop was not clean: consumer offsets of %s were beyond the ends of "
                    "their queues and were lowered: %s",
                    key, ", ".join(f"queue {q}: {was}, now {end}" for q, was, end in lowered),
                )  # fmt: skip
        self.delays.load(self.delays_file.load())
        self.timers.load(self.timers_file.load_or_empty(), self._store.log.end)

    def adopt(self) -> None:
        """Add topics and queues that have messages in the log but are missing in the topic table.

        The table may lack the changes of the last seconds, after a kill or if it was copied from a former
        master. Queues are added to a known topic only if they contain a message that is newer than the table:
        any other missing queue was removed on purpose.
        """
        topics, store = self.topics, self._store
        counts: dict[str, int] = {}
        for queue in store.queues:
            known = topics.get(queue.topic)
            if queue.topic in NOT_LISTED:
                continue
            if not queue.max_offset or (known is not None and queue.queue_id < known.read_queue_nums):
                continue
            newest = queue.max_offset - 1
            try:
                is_newer = known is None or (
                    store.lookups.store_time_of(queue, newest) > topics.version.timestamp
                )
            except CommandError:
                continue  # The object store does not answer. The message is older than all local segments
            if is_newer:
                counts[queue.topic] = max(counts.get(queue.topic, 0), queue.queue_id + 1)
        topics.adopt(counts)

    def _queues_with_messages(self, topic: str) -> int:
        """Return how many queues a topic must have so that all its messages can be read."""
        queues = self._store.queues.of_topic(topic)
        return max((queue.queue_id + 1 for queue in queues if queue.max_offset > queue.min_offset), default=0)

    def start(self) -> None:
        """Start to write the offsets periodically."""
        for timer in self._timers:
            timer.start()

    def check_changeable(self) -> int:
        """Return the argument for `topics_kept` or `groups_kept` after a change at this broker.

        Raises CommandError if topics and groups must be changed at the leader of the raft group.
        """
        return 0 if self.replicas is None else self.replicas.check()

    async def confirm_changeable(self) -> int:
        """Do the same as `check_changeable`, once a majority of the raft group has confirmed it."""
        return 0 if self.replicas is None else await self.replicas.confirm()

    async def topics_kept(self, since: int) -> None:
        """Wait until all changes of topics so far are durable. Raises OSError or CommandError."""
        await self._kept(self.topics_file, since)

    async def groups_kept(self, since: int) -> None:
        """Wait until all changes of groups and modes so far are durable. Raises OSError or CommandError."""
        await self.modes_file.saved()
        await self._kept(self.groups_file, since)

    async def _kept(self, file: TableFile, since: int) -> None:
        await file.saved()
        if self.replicas is not None:
            await self.replicas.keep(since)

    async def settings_saved(self) -> None:
        """Wait until all topics, groups and modes are on the disk. Raises OSError."""
        for file in (self.topics_file, self.modes_file, self.groups_file):
            await file.saved()

    def offsets_version(self) -> DataVersion | None:
        """In a raft group, return the version of the leader's offsets that this member has; otherwise None.

        On the leader itself, each call creates a new version.
        """
        if self.versions.term is not None:
            self.offsets.version = self.versions.after(self.offsets.version or self.versions.first())
        return self.offsets.version

    def _offsets_table(self) -> dict[str, Any]:
        self.offsets_version()
        return self.offsets.to_table()

    def _save_topics(self) -> None:
        self.topics_file.save()
        self._topics_changed()

    def modes_changed(self) -> None:
        """Start to write the consume modes. They have no version, so the groups get a new one."""
        self.modes_file.save()
        self.groups.touch()

    def replace_modes(self, table: bodies.MessageRequestModeTable) -> None:
        """Replace the consume modes with those of a master."""
        groups = table.message_request_mode_map.values()
        if self.modes.replace(mode for modes in groups for mode in modes.values()):
            self.modes_file.save()

    async def stop(self) -> None:
        """Stop the periodic writes, and write all tables for the last time."""
        for timer in self._timers:
            timer.cancel()
        files = [self.topics_file, self.groups_file, self.offsets_file, self.delays_file]
        if self.timers.take_changes():
            files.append(self.timers_file)
        for file in files:
            await file.finish()


def save_changes(table: Offsets, file: TableFile) -> None:
    """Start to write a table's file if it must be written now."""
    if table.take_changes():
        file.save()


def plain(table: Body) -> dict[str, Any]:
    """Return a table as dicts, lists, strings and numbers for JSON."""
    values: dict[str, Any] = msgspec.to_builtins(table)
    return values
