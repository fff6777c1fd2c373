"""The exceptions with which the store refuses messages, and the reasons why it is not writable.

The exceptions contain the protocol's response codes. The flags have the numbers of RocketMQ's running flags.
"""

from __future__ import annotations

import enum

from cometmq.errors import StoreError, Transient
from cometmq.protocol.codes import MAX_STORED_TOPIC_LENGTH, ResponseCode
from cometmq.text import printable


class StoreRefused(StoreError, Transient):
    """Raised when a message is refused. Nothing was stored. The client gets `response_code` and `remark`."""

    def __init__(self, response_code: int, remark: str) -> None:
        # pickle calls the class with BaseException.args, so these must be the arguments of the constructor.
        super().__init__(remark)
        self.args = (response_code, remark)
        self.response_code = response_code
        self.remark = remark

    def __str__(self) -> str:
        return f"[{self.response_code}] {self.remark}"


class QueueRefused(StoreRefused):
    """Raised for a topic or queue id that gets no queue: its directory would lie outside the store."""

    def __init__(self, topic: str, queue_id: int) -> None:
        super().__init__(
            ResponseCode.MESSAGE_ILLEGAL,
            f"no queue is made for topic {printable(topic)!r}, queue {queue_id}: a topic has 1 to "
            f"{MAX_STORED_TOPIC_LENGTH} letters, digits, %, |, _ and -, a queue a number from 0 on",
        )
        self.topic = topic
        self.queue_id = queue_id
        self.args = (topic, queue_id)


class Flag(enum.Enum):
    """A reason why a store is not writable. Each flag is raised and cleared independently."""

    NOT_WRITEABLE = 2
    WRITE_LOGICS_ERROR = 4
    WRITE_INDEX_ERROR = 8
    DISK_FULL = 16


class RunningFlags:
    """The raised flags of a store. Each has a text, which clients receive when a message is refused."""

    def __init__(self) -> None:
        self.reasons: dict[Flag, str] = {}

    def raise_flag(self, flag: Flag, reason: str) -> None:
        self.reasons[flag] = reason

    def clear(self, flag: Flag) -> None:
        self.reasons.pop(flag, None)

    @property
    def writeable(self) -> bool:
        return not self.reasons

    def why(self) -> str:
        """The texts of all raised flags; "" if the store is writable."""
        return "; ".join(self.reasons.values())
