"""The store on disk: commit log, consume queues, index, checkpoint, flush, recovery, retention.

`MessageStore` is the interface of the store; the formats are Apache RocketMQ's. Other packages import only
this module, and `cometmq.store.raft_log` for members of raft groups. The tools that read the directory of a
store without its broker are in `cometmq.store.inspect`.
"""

from cometmq.store.background.topic_retention import TopicLimit
from cometmq.store.base.clock import Clock, ManualClock, SteadyTime
from cometmq.store.base.config import LOCATIONS, SLAVE, SMALL_FILES, SYNC_MASTER, WIRE_NAMES, StoreConfig
from cometmq.store.base.disk import Buffer, Disk, DiskUsage, FileFacts, read_file, replace_file
from cometmq.store.base.files import CACHED, WAITING, NotInMemory, Reads
from cometmq.store.base.refusal import Flag, StoreRefused
from cometmq.store.derived.consume_queue import FILLER_SIZE, UNIT_DTYPE, ConsumeQueue
from cometmq.store.derived.queue_table import QueueTable
from cometmq.store.message_store import Commit, MessageStore
from cometmq.store.reading.links import link_to, links
from cometmq.store.reading.lookup import lost_units
from cometmq.store.reading.queue_reader import GetStatus, ReadResult, RecordFilter, Unit, tag_matches
from cometmq.store.recovery.store_layout import check_locations
from cometmq.store.restore import LostRange, RestoreReport, restore_store
from cometmq.store.tables.json_table import JsonTable
from cometmq.store.tables.table_checks import DELAYS, GROUPS, OFFSETS, TIMERS, TOPICS, TimerTable
from cometmq.store.tiered.layout import ObjectStore, ObjectStoreFailed
from cometmq.store.truncation import TruncateReport, truncate_log
from cometmq.store.writing.appender import Appender, BatchRecords, Body, TickMessage, Traits
from cometmq.store.writing.record_dispatch import WAITING_TOPICS, Arrivals

__all__ = [
    "CACHED", "DELAYS", "FILLER_SIZE", "GROUPS", "LOCATIONS", "OFFSETS", "SLAVE", "SMALL_FILES",
    "SYNC_MASTER", "TIMERS", "TOPICS", "UNIT_DTYPE", "WAITING", "WAITING_TOPICS", "WIRE_NAMES", "Appender",
    "Arrivals", "BatchRecords", "Body", "Buffer", "Clock", "Commit", "ConsumeQueue", "Disk", "DiskUsage",
    "FileFacts", "Flag", "GetStatus", "JsonTable", "LostRange", "ManualClock", "MessageStore", "NotInMemory",
    "ObjectStore", "ObjectStoreFailed", "QueueTable", "ReadResult", "Reads", "RecordFilter", "RestoreReport",
    "SteadyTime", "StoreConfig", "StoreRefused", "TickMessage", "TimerTable", "TopicLimit", "Traits",
    "TruncateReport", "Unit", "check_locations", "link_to", "links", "lost_units", "read_file",
    "replace_file", "restore_store", "tag_matches", "truncate_log",
]  # fmt: skip
