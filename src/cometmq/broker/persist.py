"""The broker's tables on disk: topics.json, subscriptionGroup.json, consumerOffset.json, delayOffset.json.

Topics and groups are written on each change, offsets every few seconds and at the end (storage.md 1.6). The
tables are turned into text in the loop, where they are consistent, and written by a thread; a newer text of
the same file waits for the one under way.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cometmq.broker.context import BrokerContext
from cometmq.broker.schedule import ScheduleService
from cometmq.protocol.bodies import Body, SubscriptionGroupTable, TopicConfigTable
from cometmq.store.disk import Disk
from cometmq.store.tables import JsonTable

log = logging.getLogger(__name__)

TOPICS = "topics.json"
GROUPS = "subscriptionGroup.json"
OFFSETS = "consumerOffset.json"
DELAYS = "delayOffset.json"
# Apache's broker waits so long before it first writes offsets.
FIRST_WRITE_S = 10.0


class TableFile:
    """One file: asked to save, it writes the newest content, never two at a time."""

    def __init__(self, disk: Disk, path: str, content: Callable[[], dict[str, Any]]) -> None:
        self._file = JsonTable(path, disk)
        self._content = content
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def save(self) -> None:
        """Write soon; changes until then are in."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        else:
            self._again = True

    async def _run(self) -> None:
        await asyncio.sleep(0)  # changes of the same tick are written together
        while True:
            self._again = False
            content = self._content()
            try:
                await asyncio.to_thread(self._file.save, content)
            except OSError as error:
                log.error("%s not written: %s", self._file.path, error)
            if not self._again:
                return

    async def finish(self) -> None:
        """Write what the table holds now."""
        self.save()
        if self._task is not None:
            await self._task

    def load(self) -> Mapping[str, Any]:
        """What was written last; empty without a file. Raises StoreCorrupt."""
        return self._file.load()


class Tables:
    """The four files of a broker."""

    def __init__(self, context: BrokerContext, schedule: ScheduleService, disk: Disk, directory: str) -> None:
        self._context = context
        self._schedule = schedule
        self._loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []

        def file(name: str, content: Callable[[], dict[str, Any]]) -> TableFile:
            return TableFile(disk, os.path.join(directory, name), content)

        self.topics = file(
            TOPICS, lambda: plain(TopicConfigTable(context.topics.table, context.topics.version))
        )
        self.groups = file(
            GROUPS, lambda: plain(SubscriptionGroupTable(context.groups.table, context.groups.version))
        )
        self.offsets = file(OFFSETS, context.offsets.to_table)
        self.delays = file(DELAYS, schedule.to_table)

    def load(self) -> None:
        """Fill the tables from the files."""
        context = self._context
        topics = TopicConfigTable.from_plain(self.topics.load())
        context.topics.load(topics.data_version, topics.topic_config_table)
        groups = SubscriptionGroupTable.from_plain(self.groups.load())
        context.groups.load(groups.data_version, groups.subscription_group_table)
        context.offsets.load(self.offsets.load())
        self._schedule.load(self.delays.load())

    def start(self) -> None:
        """Begin the periodic writes of offsets."""
        config = self._context.config
        self._every(config.flush_consumer_offset_interval / 1000, self._save_offsets)
        self._every(config.flush_delay_offset_interval / 1000, self.delays.save)

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
