"""Tools that read or rebuild the directory of a store, CometMQ's or Apache's, without opening the store."""

from cometmq.store.base.disk import Disk
from cometmq.store.inspect.log_walk import MemberLog, member_log
from cometmq.store.inspect.rebuild import rebuild
from cometmq.store.inspect.rebuild_parts import IndexMade, QueuesMade, RebuildParts, plan_rebuild
from cometmq.store.inspect.record_finder import RecordFinder
from cometmq.store.inspect.stats import StoreStats, store_stats
from cometmq.store.inspect.verify import VerifyReport, verify
from cometmq.store.recovery.store_layout import MAX_FILE_BYTES, same_directory

__all__ = [
    "MAX_FILE_BYTES", "Disk", "IndexMade", "MemberLog", "QueuesMade", "RebuildParts", "RecordFinder",
    "StoreStats", "VerifyReport", "member_log", "plan_rebuild", "rebuild", "same_directory", "store_stats",
    "verify",
]  # fmt: skip
