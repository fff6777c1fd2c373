"""The administration API and the `mqadmin` commands over it."""

from cometmq.admin.admin import Admin, TopicSettings
from cometmq.admin.errors import MessageNotFound, UnknownNameError
from cometmq.admin.messages import ReadRange
from cometmq.admin.values import (
    BrokerStatus,
    GroupProgress,
    GroupSubscriptions,
    GroupSummary,
    MemberSubscriptions,
    MessageTrack,
    MessageView,
    QueueProgress,
    QueueStatus,
    TopicUse,
    TrackType,
)

__all__ = [
    "Admin",
    "BrokerStatus",
    "GroupProgress",
    "GroupSubscriptions",
    "GroupSummary",
    "MemberSubscriptions",
    "MessageNotFound",
    "MessageTrack",
    "MessageView",
    "QueueProgress",
    "QueueStatus",
    "ReadRange",
    "TopicSettings",
    "TopicUse",
    "TrackType",
    "UnknownNameError",
]
