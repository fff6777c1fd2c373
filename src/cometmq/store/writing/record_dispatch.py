"""The dispatch of records that arrive encoded, from the log (recovery) or from a master (replication).

Records with the next offset of their queue are processed in groups, all others one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import InitVar, dataclass
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.codes import SCHEDULE_TOPIC, TIMER_TOPIC
from cometmq.protocol.properties.key_hashes import Keys, key_prefix
from cometmq.protocol.properties.template import codes_and_keys
from cometmq.protocol.properties.values import stored_tags_code, value_of
from cometmq.protocol.record.layout import TRANSACTION_MASK
from cometmq.protocol.record.many import RecordGroup
from cometmq.protocol.record.one import Facts
from cometmq.protocol.timers import timer_tags_code
from cometmq.store.base.config import StoreConfig
from cometmq.store.base.refusal import QueueRefused
from cometmq.store.derived.consume_queue import UNIT_STRUCT, ConsumeQueue
from cometmq.store.derived.index_service import IndexService
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.tables.deleted_topics import DeletedTopics
from cometmq.store.writing.queue_order import QueueOrder

Arrivals = list[tuple[str, int, int, int, int]]
"""Newly visible messages: topic, queue id, offset after the message, tags code, store time in ms."""

Watched = Container[tuple[str, int]] | None
"""The queues (topic, queue id) whose newly visible messages are collected; None for all queues."""

ALL, NONE = range(1 << 62), range(0)
"""Ranges of log positions: `ALL` contains every position, `NONE` contains none."""

_pack = UNIT_STRUCT.pack

MAX_REPORTED_REJECTIONS = 200  # maximum number of logged rejections; a hostile peer may cause any number

WAITING_TOPICS = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC})
"""The topics of delayed messages. Their queue units contain delivery times instead of tag hashes."""


class StartEarlier(Exception):
    """Raised if a queue lacks units of records before the start of the scan, which must start earlier."""


def tags_code_of(facts: Facts, delays_ms: dict[int, int]) -> int:
    """Return the tags code for a record's unit: the hash of TAGS, or a delayed message's delivery time."""
    if facts.topic == TIMER_TOPIC:
        return timer_tags_code(facts.properties)
    if facts.topic == SCHEDULE_TOPIC:
        level = value_of(facts.properties, b"DELAY")
        if level.isdigit() and int(level) > 0:
            number = min(int(level), max(delays_ms, default=0))
            return facts.store_ms + delays_ms.get(number, 1000)
    return stored_tags_code(facts.properties)


def set_delivery_times(
    codes: NDArray[np.int64], group: RecordGroup, rows: NDArray[np.int64], delays_ms: dict[int, int]
) -> None:
    """Replace the tags codes, of the records `rows` of `group`, of delayed messages by delivery times."""
    for topic in WAITING_TOPICS.intersection(group.names):
        waiting = np.flatnonzero(group.topic[rows] == group.names.index(topic))
        codes[waiting] = [tags_code_of(each, delays_ms) for each in group.facts(rows[waiting])]


def key_columns(group: RecordGroup, keys: list[bytes] | None) -> list[Sequence[Any]]:
    """Return the arguments of `IndexService.add` for records. `keys` is a result of `codes_and_keys`."""
    given: list[Keys] = [None] * len(group.properties) if keys is None else [*keys]
    for row in np.flatnonzero(group.rolled_back).tolist():
        given[row] = ()
    prefixes = [key_prefix(name) for name in group.names]
    numbers = [prefixes[number] for number in group.topic.tolist()]
    return [numbers, group.position.tolist(), group.store_ms.tolist(), group.properties, given]


@dataclass(eq=False)
class RecordDispatch:
    """Makes encoded records visible: adds their units to the consume queues and their keys to the index.

    All methods must be called on the loop.

    Attributes:
        former_ends: The end that each queue had at the last clean stop, by topic and queue id.
        not_served: Called with a description of each record that fits into no queue.
    """

    queues: QueueTable
    index: IndexService
    deleted: DeletedTopics
    config: InitVar[StoreConfig]
    former_ends: InitVar[Mapping[str, Mapping[int, int]]]
    not_served: Callable[[str], None]

    def __post_init__(self, config: StoreConfig, former_ends: Mapping[str, Mapping[int, int]]) -> None:
        self._delays = config.delay_levels_ms
        self._order = QueueOrder(former_ends, self._push, self._leave_out)
        self._touched: set[ConsumeQueue] = set()
        self.watched: Watched = frozenset()
        """The queues whose newly visible messages are added to `arrivals`."""
        self.arrivals: Arrivals = []
        self.on_restart: Callable[[ConsumeQueue, int], None] | None = None
        """Called with a nonempty queue and the log position of a record with queue offset 0.

        The master has deleted the queue's topic and created it again. The callback may replace the queue by a
        new object, so the queue must be looked up again after the call.
        """

    def add(
        self, group: RecordGroup, *, queued: range = ALL, indexed: range = ALL, may_wait: bool = True
    ) -> set[ConsumeQueue]:
        """Add the queue units and the index keys of records. Return the queues to which units were added.

        `queued` and `indexed` are ranges of log positions. If a record whose offset is greater than its
        queue's end may not wait for the next record of that queue, or for `finish`, raise StartEarlier.
        """
        codes, keys = codes_and_keys(group.properties)
        if indexed:
            self._index_group(group, keys, indexed)
        self._queue_group(group, codes, queued.start, may_wait)
        return self._take_touched()

    def finish(self) -> set[ConsumeQueue]:
        """Add the records that still wait for the next record of their queue. Return the changed queues."""
        self._order.finish()
        return self._take_touched()

    def _take_touched(self) -> set[ConsumeQueue]:
        touched, self._touched = self._touched, set()
        return touched

    def _index_group(self, group: RecordGroup, keys: list[bytes] | None, indexed: range) -> None:
        positions = group.position
        wanted = (indexed.start <= positions) & (positions < indexed.stop)
        if self.deleted:
            wanted &= ~self.deleted.hidden(group)
        columns = key_columns(group, keys)
        if not wanted.all():
            columns = [list(compress(column, wanted.tolist())) for column in columns]
        self.index.add(*columns)

    def _push(self, queue: ConsumeQueue, facts: Facts) -> None:
        code, offset = tags_code_of(facts, self._delays), facts.queue_offset
        queue.push(facts.position, facts.size, code, offset)
        self._touched.add(queue)
        if self.watched is None or (queue.topic, queue.queue_id) in self.watched:
            self.arrivals.append((queue.topic, queue.queue_id, offset + 1, code, facts.store_ms))

    def _leave_out(self, facts: Facts, end: int, _following: Facts | None) -> None:
        place = f"queue offset {facts.queue_offset} of {facts.topic}/{facts.queue_id}"
        self.not_served(f"record at {facts.position}: {place} where {end} was expected")

    def _queue_group(self, group: RecordGroup, codes: list[int], start: int, may_wait: bool) -> None:
        """Add units to the queues for the records in `group` that lie at or after log position `start`."""
        by_key, waiting = self.queues.by_key, self._order.waiting
        names, properties = group.names, group.properties
        touched, watched = self._touched, self.watched
        careful = bool(self.deleted)
        columns = [column.tolist() for column in group[:7]]
        for row, (position, size, queue_id, offset, sys_flag, store_ms, number) in enumerate(
            zip(*columns, strict=True)
        ):
            topic = names[number]
            key = topic, queue_id
            queue = by_key.get(key)
            if (
                queue is None
                or offset != queue.max_offset
                or position < start
                or sys_flag & TRANSACTION_MASK
                or topic in WAITING_TOPICS
                or waiting
                or careful
            ):
                if position >= start:
                    facts = Facts(
                        position, size, queue_id, offset, sys_flag, store_ms, topic, properties[row]
                    )
                    self._queue_one(facts, may_wait)
                continue
            queue.window += _pack(position, size, codes[row])  # `ConsumeQueue.push`, inlined for speed
            queue.max_offset = offset + 1
            queue.max_physical = position + size
            touched.add(queue)
            if watched is None or key in watched:
                self.arrivals.append((topic, queue_id, offset + 1, codes[row], store_ms))

    def _queue_one(self, facts: Facts, may_wait: bool) -> None:
        """Add the unit of one record after all checks. One without a valid place in a queue is left out."""
        topic, queue_id = facts.topic, facts.queue_id
        if not facts.queued or (self.deleted and self.deleted.hides(topic, facts.position)):
            return
        try:
            queue = self.queues.of_record(topic, queue_id)
        except QueueRefused as refusal:
            self.not_served(f"record at {facts.position}: {refusal.remark}")
            return
        if facts.queue_offset == 0 < queue.max_offset and self.on_restart is not None:
            self.on_restart(queue, facts.position)
            queue = self.queues.of_record(topic, queue_id)
        if not self._order.add(queue, facts, may_wait=may_wait):
            raise StartEarlier(
                f"consume queue {topic}/{queue_id} ends at offset {queue.max_offset}, but the next record "
                f"has offset {facts.queue_offset}"
            )
