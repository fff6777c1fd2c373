"""Files on disk, no network: commit log, consume queues, index, checkpoint, flush, recovery, retention.

`MessageStore` stands in front of all of it; the formats are Apache RocketMQ's.
"""

from cometmq.store.appender import Appended
from cometmq.store.clock import Clock, ManualClock, SystemClock
from cometmq.store.config import SMALL_FILES, StoreConfig
from cometmq.store.disk import Disk, OsDisk
from cometmq.store.files import NotCached
from cometmq.store.message_store import Commit, MessageStore
from cometmq.store.reading import GetStatus, Got
from cometmq.store.refusal import StoreRefused
from cometmq.store.tables import JsonTable

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
