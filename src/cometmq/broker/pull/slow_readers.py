"""Detects groups that are far behind the end of the log, and may disable them.

See docs/reference/storage.md, Slow readers.
"""

from __future__ import annotations

import msgspec

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.pull.backlog import Reader
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.protocol.codes import is_system_group

log = logs.logger(__name__)

CHECK_S = 180.0
MAX_SLOW_READERS = 10_000  # Maximum number of readers whose lag is recorded


class SlowReaders(msgspec.Struct, eq=False):
    """The readers (group, queue) that are further behind than `consumerFallbehindThreshold`.

    The threshold is a number of bytes between the end of a reader's last pull and the end of the log.
    """

    config: BrokerConfig
    groups: SubscriptionGroups
    _behind: dict[Reader, int] = msgspec.field(default_factory=dict)

    def record_lag(self, reader: Reader, behind: int) -> None:
        """Record a reader's lag: the number of bytes from the end of its last pull to the end of the log.

        A lag of at most `consumerFallbehindThreshold` is not recorded, and deletes an earlier record.
        """
        if behind <= self.config.consumer_fallbehind_threshold:
            self._behind.pop(reader, None)
        elif len(self._behind) < MAX_SLOW_READERS:
            self._behind[reader] = behind

    def check(self) -> None:
        """If `disableConsumeIfConsumerReadSlowly` is set, disable the groups that are too far behind.

        RocketMQ's own groups are exempt, because tools use them to read old messages.
        """
        behind, self._behind = self._behind, {}
        if not self.config.disable_consume_if_consumer_read_slowly:
            return
        for (group, topic, queue_id), size in behind.items():
            most = self.config.consumer_fallbehind_threshold
            if size > most and not is_system_group(group) and self.groups.disable_consume(group):
                log.warning(
                    "group %s disabled: its lag in topic %s queue %d is %d bytes, above "
                    "consumerFallbehindThreshold=%d. Set consumeEnable to enable it again",
                    group, topic, queue_id, size, most,
                )  # fmt: skip
