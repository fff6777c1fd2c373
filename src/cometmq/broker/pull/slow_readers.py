"""Groups that read too slowly, which may be kept from reading at all (docs/reference/storage.md, Slow
readers)."""

from __future__ import annotations

from dataclasses import dataclass, field

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.pull.backlog import Reader
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.protocol.codes import is_system_group

log = logs.logger(__name__)

CHECK_S = 180.0
MOST_READERS = 10_000  # that are kept; the others are looked at when these are gone


@dataclass(eq=False)
class SlowReaders:
    """Keeps the readers whose last pull left more of the log behind it than consumerFallbehindThreshold."""

    config: BrokerConfig
    groups: SubscriptionGroups
    _behind: dict[Reader, int] = field(default_factory=dict)

    def note(self, reader: Reader, behind: int) -> None:
        """A pull got messages that lie so many bytes in front of the log's end."""
        if behind <= self.config.consumer_fallbehind_threshold:
            self._behind.pop(reader, None)
        elif len(self._behind) < MOST_READERS:
            self._behind[reader] = behind

    def check(self) -> None:
        """Disable the groups that are too far behind, if disableConsumeIfConsumerReadSlowly says so. Those of
        RocketMQ itself, which tools read old messages with, go on."""
        behind, self._behind = self._behind, {}
        if not self.config.disable_consume_if_consumer_read_slowly:
            return
        for (group, topic, queue_id), size in behind.items():
            most = self.config.consumer_fallbehind_threshold
            if size > most and not is_system_group(group) and self.groups.disable_consume(group):
                log.warning(
                    "group %s may not consume any more: it is %d bytes behind in %s/%d, and "
                    "consumerFallbehindThreshold is %d. consumeEnable of its settings lets it go on",
                    group, size, topic, queue_id, most,
                )  # fmt: skip
