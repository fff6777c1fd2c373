"""Files on disk, no network: commit log, consume queues, index, checkpoint, flush, recovery, retention.

`MessageStore` stands in front of all of it; the formats are Apache RocketMQ's.
"""

from cometmq.store.base.clock import Clock, ManualClock, SystemClock
from cometmq.store.base.config import SMALL_FILES, StoreConfig
from cometmq.store.base.disk import Disk, OsDisk
from cometmq.store.base.files import NotCached
from cometmq.store.base.refusal import StoreRefused
from cometmq.store.message_store import Commit, MessageStore
from cometmq.store.reading.queue_reader import GetStatus, Got
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.writing.appender import Appended

__all__ = [
    "SMALL_FILES",
    "Appended",
    "Clock",
    "Commit",
    "Disk",
    "GetStatus",
    "Got",
    "JsonTable",
    "ManualClock",
    "MessageStore",
    "NotCached",
    "OsDisk",
    "StoreConfig",
    "StoreRefused",
    "SystemClock",
]
