"""The administration API and the `mqadmin` commands over it."""

from cometmq.admin.admin import Admin, TopicSettings
from cometmq.admin.dead_letters import Resending, Selection
from cometmq.admin.errors import (
    DeadLettersHidden,
    IndexSilent,
    ResendStopped,
    UnknownNameError,
)
from cometmq.admin.messages import ReadRange
from cometmq.admin.values import (
    BrokerStatus,
    DeadLetterCount,
    DeadLetterView,
    GroupProgress,
    GroupSubscriptions,
    GroupSummary,
    MemberSubscriptions,
    MessageTrack,
    MessageView,
    QueueProgress,
    QueueStatus,
    Resend,
    ResendResult,
    RetryLimits,
    TopicUse,
    TrackType,
)
from cometmq.errors import MessageNotFound

__all__ = [
    "Admin",
    "BrokerStatus",
    "DeadLetterCount",
    "DeadLetterView",
    "DeadLettersHidden",
    "GroupProgress",
    "GroupSubscriptions",
    "GroupSummary",
    "IndexSilent",
    "MemberSubscriptions",
    "MessageNotFound",
    "MessageTrack",
    "MessageView",
    "QueueProgress",
    "QueueStatus",
    "ReadRange",
    "Resend",
    "ResendResult",
    "ResendStopped",
    "Resending",
    "RetryLimits",
    "Selection",
    "TopicSettings",
    "TopicUse",
    "TrackType",
    "UnknownNameError",
]
