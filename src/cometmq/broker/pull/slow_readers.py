"""Groups that read too slowly and may be stopped (docs/reference/storage.md, Slow readers)."""

from __future__ import annotations

from dataclasses import dataclass, field

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.pull.backlog import Reader
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.protocol.codes import is_system_group

log = logs.logger(__name__)

CHECK_S = 180.0
MAX_SLOW_READERS = 10_000  # further readers are recorded only when others have been removed


@dataclass(eq=False)
class SlowReaders:
    """The readers whose last pull ended more than consumerFallbehindThreshold before the end of the log."""

    config: BrokerConfig
    groups: SubscriptionGroups
    _behind: dict[Reader, int] = field(default_factory=dict)

    def record_lag(self, reader: Reader, behind: int) -> None:
        """Record that a pull returned messages which lie this many bytes before the end of the log."""
        if behind <= self.config.consumer_fallbehind_threshold:
            self._behind.pop(reader, None)
        elif len(self._behind) < MAX_SLOW_READERS:
            self._behind[reader] = behind

    def check(self) -> None:
        """Disable the groups that are too far behind, if disableConsumeIfConsumerReadSlowly is set.

        RocketMQ's own groups, with which tools read old messages, are exempt.
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
