"""The exceptions with which the store refuses messages. They contain the protocol's response codes."""

from __future__ import annotations

from cometmq.errors import StoreError, Transient
from cometmq.protocol.codes import MAX_STORED_TOPIC_LENGTH, ResponseCode
from cometmq.text import printable


class StoreRefused(StoreError, Transient):
    """Raised when the store refuses a message. Nothing was stored.

    The client gets `response_code` and `remark`.
    """

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
