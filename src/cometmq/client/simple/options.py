"""The settings of a simple consumer. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from cometmq.client.cluster.options import check_choice, check_ranges
from cometmq.client.group.options import LEASE_RANGE_S, ConsumeFromWhere
from cometmq.errors import ConfigError

MAX_MESSAGES = 32
"""The maximum number of messages per request to a broker, which brokers enforce."""
CHANGE_RANGE_S = (0.0, 43_200.0)
"""The permitted range of a changed lease in seconds."""
WAIT_RANGE_S = (0.0, 300.0)
"""The permitted range of the wait for messages in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleOptions:
    """The settings of a simple consumer. Times are in seconds.

    Attributes:
        consume_from_where: The position at which a new group starts: FIRST_OFFSET or LAST_OFFSET. As in
            RocketMQ, a new group starts at the first message of a queue, even with LAST_OFFSET, if the broker
            still has that message in memory.
        orderly: Receive the messages of a queue in order: while a message of a queue is leased, no other
            receive() returns messages of this queue. All members of the group must use the same value.
        invisible_s: The default length of a lease, 1 s to 12 hours.
        wait_s: The default time for which receive() waits for messages, up to 300 s.
    """

    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.LAST_OFFSET
    orderly: bool = False
    invisible_s: float = 60.0
    wait_s: float = 15.0

    def __post_init__(self) -> None:
        check_choice("consume_from_where", self.consume_from_where, ConsumeFromWhere)
        if self.consume_from_where is ConsumeFromWhere.TIMESTAMP:
            expected = "FIRST_OFFSET or LAST_OFFSET, because brokers choose the start of a simple consumer"
            raise ConfigError("consume_from_where", self.consume_from_where.name, expected)
        check_ranges(self, {"invisible_s": LEASE_RANGE_S, "wait_s": WAIT_RANGE_S})
