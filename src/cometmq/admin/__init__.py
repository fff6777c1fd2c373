"""The administration API and the `mqadmin` commands that use it."""

from cometmq.admin.admin import Admin, TopicSettings
from cometmq.admin.dead_letters import Resend, Resending, ResendResult, Selection
from cometmq.admin.errors import (
    AllQueuesOnly,
    DeadLettersHidden,
    IndexSilent,
    ResendStopped,
    UnknownNameError,
)
from cometmq.admin.messages import Newest, ReadRange
from cometmq.admin.offsets import OffsetWay, QueueReset, Reset
from cometmq.admin.values import (
    BrokerStatus,
    DeadLetterCount,
    DeadLetterView,
    GroupConfig,
    GroupProgress,
    GroupQueueProgress,
    GroupSubscriptions,
    GroupSummary,
    MemberSubscriptions,
    MessageTrack,
    MessageView,
    PermChange,
    QueueProgress,
    QueueStatus,
    RetryLimits,
    SendTime,
    SettingsChange,
    Stats,
    StatsSpan,
    TopicStats,
    TopicUse,
    TraceView,
    TrackType,
    Undone,
)
from cometmq.errors import MessageNotFound

__all__ = [
    "Admin", "AllQueuesOnly", "BrokerStatus", "DeadLetterCount", "DeadLetterView", "DeadLettersHidden",
    "GroupConfig", "GroupProgress", "GroupQueueProgress", "GroupSubscriptions", "GroupSummary", "IndexSilent",
    "MemberSubscriptions", "MessageNotFound", "MessageTrack", "MessageView", "Newest", "OffsetWay",
    "PermChange", "QueueProgress", "QueueReset", "QueueStatus", "ReadRange", "Resend", "ResendResult",
    "ResendStopped", "Resending", "Reset", "RetryLimits", "Selection", "SendTime", "SettingsChange", "Stats",
    "StatsSpan", "TopicSettings", "TopicStats", "TopicUse", "TraceView", "TrackType", "Undone",
    "UnknownNameError",
]  # fmt: skip
