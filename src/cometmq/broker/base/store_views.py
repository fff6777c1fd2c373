"""What the broker's requests want to know of a store beyond reading and writing messages."""

from __future__ import annotations

import json

from cometmq.store import MessageStore, Reads

MAX_ENTRIES = 4096


def is_on_disk(store: MessageStore, topic: str, queue_id: int, offset: int, reads: Reads) -> bool:
    """Whether a message lies so far behind the log's end that it counts as being on disk only.

    The share of memory that counts is accessMessageInMemoryMaxRatio. False for a message that does not exist.
    """
    queue = store.queues.find(topic, queue_id)
    if queue is None or not queue.min_offset <= offset < queue.max_offset:
        return False
    unit = queue.unit(offset, reads)
    return unit is not None and store.log.end - unit[0] > store.reader.memory_window


def queue_entries(
    store: MessageStore, topic: str, queue_id: int, first: int, count: int, reads: Reads
) -> list[tuple[int, int, int]]:
    """(log position, record size in bytes, tags code) of up to `count` entries of a consume queue."""
    queue = store.queues.find(topic, queue_id)
    if queue is None:
        return []
    stop = min(first + max(min(count, MAX_ENTRIES), 0), queue.max_offset)
    units = (queue.unit(offset, reads) for offset in range(max(first, queue.min_offset), stop))
    return [unit for unit in units if unit is not None]


def index_position(store: MessageStore) -> tuple[int, int]:
    """(store time in ms, log position) of the newest record in the index; zeros for an empty one."""
    files = store.index.files
    return (files[-1].end_ms, files[-1].end_position) if files else (0, 0)


def runtime_facts(store: MessageStore) -> dict[str, str]:
    """The store's part of the runtime table (docs/reference/remoting.md, Runtime table)."""
    fullness = store.fullness
    return {
        "commitLogMaxOffset": str(store.log.end),
        "commitLogMinOffset": str(store.log.min_position),
        "commitLogDirCapacity": capacity(store),
        "commitLogDiskRatio": ratio(fullness.log_ratio),
        **{f"commitLogDiskRatio_{path}": ratio(used) for path, used in fullness.log_ratios.items()},
        "consumeQueueDiskRatio": ratio(fullness.queue_ratio),
        "dispatchBehindBytes": "0",
        "remainHowManyDataToFlush": size_text(store.log.end - store.flusher.flushed),
        "putMessageDistributeTime": json.dumps({}),
        "storeFlags": store.flags.why() or "ok",
    }


def capacity(store: MessageStore) -> str:
    """Size and free space of the log's partition, in Apache's words."""
    try:
        usage = store.disk.usage(store.config.commit_log_dirs[0])
    except OSError:
        return "Total : unknown, Free : unknown."
    return f"Total : {size_text(usage.total)}, Free : {size_text(usage.usable)}."


def ratio(value: float) -> str:
    """A share as text."""
    return str(max(value, 0.0))


def size_text(size: int) -> str:
    """Bytes for people: 512 B, 1.5 KiB, 20.0 GiB."""
    if size < 1024:
        return f"{size} B"
    amount = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 1024 or unit == "TiB":
            return f"{amount:.1f} {unit}"
    return f"{size} B"
