"""`stats`: how much a store contains, and how long retention will keep it (docs/store.md, stats)."""

from __future__ import annotations

from typing import Unpack

import msgspec
import numpy as np

from cometmq.store.base.clock import Clock
from cometmq.store.base.disk import Disk
from cometmq.store.base.files import ReadOnlyFiles
from cometmq.store.derived.consume_queue import FILLER_SIZE
from cometmq.store.derived.queue_ext import ExtFiles
from cometmq.store.inspect.index_check import read_header
from cometmq.store.inspect.unit_files import UnitFiles
from cometmq.store.inspect.verify import Progress, no_progress
from cometmq.store.log.log_reader import LogReader
from cometmq.store.recovery.store_layout import Look, QueueFiles, StoreLayout, read_layout
from cometmq.store.tables.min_offsets import MinOffsets

_HOUR_MS = 3_600_000
_DAY_MS = 86_400_000


class QueueStats(msgspec.Struct):
    """The statistics of one queue. Times are epoch ms, or -1 if the queue has no messages."""

    topic: str
    queue_id: int
    min_offset: int
    max_offset: int
    messages: int
    bytes: int
    oldest_ms: int
    newest_ms: int


class TopicStats(msgspec.Struct):
    """The statistics of the messages of a topic that consumers can still read."""

    topic: str
    queues: int
    messages: int
    bytes: int
    oldest_ms: int
    newest_ms: int


class Outlook(msgspec.Struct):
    """The forecast for retention.

    Times are epoch ms; -1 means never or unknown. Ratios are shares of the disk partition.

    Attributes:
        next_expiry_ms: The time at which the oldest segment exceeds fileReservedTime; -1 if the log has only
            one segment, because the last segment never expires.
        bytes_per_day: The size of all messages, divided by the days between the store times of the oldest and
            the newest one; 0 if these are less than an hour apart.
        full_in_days: The number of days until the disk usage reaches diskMaxUsedSpaceRatio, if the log grows
            by `bytes_per_day` and nothing is deleted; -1 if `bytes_per_day` is 0.
    """

    file_reserved_hours: int
    delete_when: str
    oldest_segment_ms: int
    next_expiry_ms: int
    expired_segments: int
    disk_used_ratio: float
    disk_max_used_ratio: float
    bytes_per_day: int
    full_in_days: float


class StoreStats(msgspec.Struct):
    """The statistics of a whole store. `queue_files` includes the files of consumequeue_ext.

    The fields whose names end in `allocated` hold the bytes that files occupy on disk.
    """

    root: str
    live: bool
    clean: bool
    segments: int
    segment_size: int
    first_position: int
    log_allocated: int
    queue_files: int
    queue_allocated: int
    index_files: int
    index_entries: int
    index_allocated: int
    messages: int
    bytes: int
    topics: list[TopicStats]
    queues: list[QueueStats]
    outlook: Outlook


def store_stats(
    root: str,
    *,
    disk: Disk | None = None,
    clock: Clock | None = None,
    progress: Progress = no_progress,
    **look: Unpack[Look],
) -> StoreStats:
    """Return the statistics of the store in `root`. Raises StoreError if there is no store, and OSError.

    `progress` receives the number of counted queues, and their total.
    """
    disk, clock = disk or Disk(), clock or Clock()
    layout = read_layout(disk, root, **look)
    with ReadOnlyFiles(disk) as files:
        log = LogReader(files, layout.config)
        floors = MinOffsets(disk, layout.root).by_topic
        queues = []
        for queue in layout.queues:
            floor = floors.get(queue.topic, {}).get(queue.queue_id, 0)
            queues.append(_queue(layout, files, log, queue, floor))
            progress(len(queues), len(layout.queues))
        headers = [read_header(files, file.path) for file in layout.index_files]
    topics = _topics(queues)
    ext = ExtFiles(disk, layout.root)
    queue_paths = [file.path for queue in layout.queues for file in queue.files]
    queue_paths += [path for queue in ext.queues() for path in ext.paths(*queue)]
    segments, index = ([file.path for file in files] for files in (layout.segments, layout.index_files))
    entries = sum(max(0, header.next_number - 1) for header in headers if header)
    return StoreStats(
        layout.root, layout.live, layout.clean, len(segments), layout.config.mapped_file_size_commit_log,
        layout.log_min, _allocated(disk, segments), len(queue_paths), _allocated(disk, queue_paths),
        len(index), entries, _allocated(disk, index), sum(queue.messages for queue in queues),
        sum(queue.bytes for queue in queues), topics, queues, _outlook(disk, layout, clock, topics),
    )  # fmt: skip


def _queue(
    layout: StoreLayout, files: ReadOnlyFiles, log: LogReader, queue: QueueFiles, floor: int
) -> QueueStats:
    """Return the statistics of a queue. `floor` is its stored minimum offset (see MinOffsets)."""
    units = UnitFiles(files, queue, layout.config.consume_queue_file_size)
    messages = size = 0
    first = last = -1
    first_offset = units.end
    for offset, chunk in units.chunks(max(units.first, floor), units.end):
        positions, sizes = chunk["position"].astype(np.int64), chunk["size"].astype(np.int64)
        alive = np.flatnonzero((positions >= layout.log_min) & (sizes > 0) & (sizes != FILLER_SIZE))
        if not len(alive):
            continue
        if first < 0:
            first, first_offset = int(positions[alive[0]]), offset + int(alive[0])
        last = int(positions[alive[-1]])
        messages += len(alive)
        size += int(sizes[alive].sum())
    oldest, newest = log.facts(first), log.facts(last)
    return QueueStats(
        queue.topic, queue.queue_id, first_offset, units.end, messages, size,
        oldest.store_ms if oldest else -1, newest.store_ms if newest else -1,
    )  # fmt: skip


def _topics(queues: list[QueueStats]) -> list[TopicStats]:
    topics: dict[str, TopicStats] = {}
    for queue in queues:
        topic = topics.setdefault(queue.topic, TopicStats(queue.topic, 0, 0, 0, -1, -1))
        topic.queues += 1
        topic.messages += queue.messages
        topic.bytes += queue.bytes
        if queue.oldest_ms >= 0 and not 0 <= topic.oldest_ms <= queue.oldest_ms:
            topic.oldest_ms = queue.oldest_ms
        topic.newest_ms = max(topic.newest_ms, queue.newest_ms)
    return sorted(topics.values(), key=lambda topic: (-topic.bytes, topic.topic))


def _allocated(disk: Disk, paths: list[str]) -> int:
    return sum(facts.allocated for path in paths if (facts := disk.facts(path)) is not None)


def _outlook(disk: Disk, layout: StoreLayout, clock: Clock, topics: list[TopicStats]) -> Outlook:
    config, now = layout.config, clock.time_ms()
    reserved = config.file_reserved_time * _HOUR_MS
    times = [facts.modified_ms for file in layout.segments[:-1] if (facts := disk.facts(file.path))]
    usage = disk.usage(config.commit_log_dirs[0] if layout.segments else layout.root)
    whole = usage.used + usage.usable
    limit = min(max(config.disk_max_used_space_ratio, 10), 95) / 100
    oldest = min((topic.oldest_ms for topic in topics if topic.oldest_ms >= 0), default=-1)
    newest = max((topic.newest_ms for topic in topics), default=-1)
    grown = sum(topic.bytes for topic in topics)
    per_day = int(grown * _DAY_MS / (newest - oldest)) if newest - oldest >= _HOUR_MS else 0
    room = limit * whole - usage.used
    return Outlook(
        file_reserved_hours=config.file_reserved_time,
        delete_when=config.delete_when,
        oldest_segment_ms=times[0] if times else -1,
        next_expiry_ms=times[0] + reserved if times else -1,
        expired_segments=sum(modified + reserved < now for modified in times),
        disk_used_ratio=round(usage.used / whole, 4) if whole else -1.0,
        disk_max_used_ratio=limit,
        bytes_per_day=per_day,
        full_in_days=round(max(room, 0) / per_day, 1) if per_day else -1.0,
    )
