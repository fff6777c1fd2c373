"""The administration API and the `mqadmin` commands over it."""

from .admin import Admin, TopicSettings
from .errors import MessageNotFound, UnknownNameError
from .messages import ReadRange
from .values import (
    BrokerStatus,
    GroupProgress,
    GroupSummary,
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
    "GroupSummary",
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
