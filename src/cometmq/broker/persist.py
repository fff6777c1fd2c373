"""The broker's tables on disk: topics.json, subscriptionGroup.json, consumerOffset.json, delayOffset.json.

Topics and groups are written on each change, offsets every few seconds if they have changed, and everything
at the end (docs/reference/storage.md, Writing tables).

An offset never lasts longer than the log that it was won by: before offsets are written the log is flushed up
to where it ended when they were taken. Else a power failure could leave the cursor of a delayed message, or
the offset behind a message that was sent back, without the copy that it speaks of.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import Any

import msgspec

from cometmq import logs
from cometmq.broker.context import BrokerContext
from cometmq.broker.tables.table_file import TableFile
from cometmq.broker.timers.schedule import ScheduleService
from cometmq.protocol.bodies import Body, SubscriptionGroupTable, TopicConfigTable
from cometmq.store import DELAYS, GROUPS, OFFSETS, TOPICS, Disk

log = logs.logger(__name__)

# Apache's broker waits so long before it first writes offsets.
FIRST_WRITE_S = 10.0


class Tables:
    """The four files of a broker."""

    def __init__(self, context: BrokerContext, schedule: ScheduleService, disk: Disk, directory: str) -> None:
        self._context = context
        self._schedule = schedule
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []

        self.topics = TableFile(
            disk,
            os.path.join(directory, TOPICS),
            lambda: plain(TopicConfigTable(context.topics.table, context.topics.version)),
        )
        self.groups = TableFile(
            disk,
            os.path.join(directory, GROUPS),
            lambda: plain(SubscriptionGroupTable(context.groups.table, context.groups.version)),
        )
        self.offsets = TableFile(
            disk, os.path.join(directory, OFFSETS), context.offsets.to_table, self._log_flushed
        )
        self.delays = TableFile(disk, os.path.join(directory, DELAYS), schedule.to_table, self._log_flushed)

    async def _log_flushed(self) -> None:
        """The log as it is now is on the device. Raises OSError if it does not get there."""
        store = self._context.store
        done: asyncio.Future[bool] = self._loop.create_future()
        store.flusher.wait_for(store.log.end, lambda ok: None if done.done() else done.set_result(ok))
        if not await done:
            raise store.flusher.failure or OSError(errno.ETIMEDOUT, "the commit log was not flushed in time")

    def load(self) -> None:
        """Fill the tables from the files. Raises StoreCorrupt, OSError."""
        context = self._context
        topics = TopicConfigTable.from_plain(self.topics.load())
        context.topics.load(topics.data_version, topics.topic_config_table, self._queues_with_messages)
        groups = SubscriptionGroupTable.from_plain(self.groups.load())
        context.groups.load(groups.data_version, groups.subscription_group_table)
        context.offsets.load(self.offsets.load())
        if not context.store.recovered.clean:
            for key, lowered in context.offsets.lower(context.store.max_offset):
                log.warning(
                    "the last stop was not clean: offsets of %s were beyond the ends of their queues: %s",
                    key, ", ".join(f"queue {q}: {was}, now {end}" for q, was, end in lowered),
                )  # fmt: skip
        self._schedule.load(self.delays.load())

    def _queues_with_messages(self, topic: str) -> int:
        """How many queues a topic must have for all of its messages to be reached."""
        queues = self._context.store.queues.of_topic(topic)
        return max((queue.queue_id + 1 for queue in queues if queue.max_offset > queue.min_offset), default=0)

    def start(self) -> None:
        """Begin the periodic writes of offsets."""
        config = self._context.config
        self._every(config.flush_consumer_offset_interval / 1000, self._save_offsets)
        self._every(config.flush_delay_offset_interval / 1000, self._save_delays)

    def _every(self, period_s: float, job: Callable[[], None]) -> None:
        def run() -> None:
            job()
            self._timers.append(self._loop.call_later(period_s, run))
            del self._timers[:-16]

        self._timers.append(self._loop.call_later(max(FIRST_WRITE_S, period_s), run))

    def _save_offsets(self) -> None:
        if self._context.offsets.dirty:
            self._context.offsets.dirty = False
            self.offsets.save()

    def _save_delays(self) -> None:
        if self._schedule.take_dirty():
            self.delays.save()

    async def stop(self) -> None:
        """Write everything a last time."""
        for timer in self._timers:
            timer.cancel()
        for file in (self.topics, self.groups, self.offsets, self.delays):
            await file.finish()


def plain(table: Body) -> dict[str, Any]:
    """A table as plain JSON values."""
    values: dict[str, Any] = msgspec.to_builtins(table)
    return values
