"""What the parts of a push consumer share: name, client instance, subscriptions and offsets."""

from __future__ import annotations

from dataclasses import dataclass, field

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.group.filter_servers import Pulls
from cometmq.client.group.offsets import OffsetStore
from cometmq.client.group.options import MessageModel, PushOptions
from cometmq.client.group.subscription import Subscription
from cometmq.message import MessageExt
from cometmq.protocol.codes import RETRY_PREFIX
from cometmq.protocol.properties.values import RETRY_TOPIC

__all__ = ["ConsumerGroup"]


@dataclass(slots=True)
class ConsumerGroup:
    """One consumer, as its parts see it."""

    name: str
    instance: ClientInstance
    options: PushOptions
    offsets: OffsetStore
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    start_timestamp_ms: int = 0
    pulls: Pulls = field(init=False)

    def __post_init__(self) -> None:
        self.pulls = Pulls(self.instance, self.name)

    @property
    def retry_topic(self) -> str:
        return RETRY_PREFIX + self.name

    def restore_topic(self, message: MessageExt) -> None:
        """Listeners see a message of the retry topic under the topic it was sent to."""
        if message.topic == self.retry_topic:
            message.topic = self.instance.namespace.unwrap(message.properties.get(RETRY_TOPIC, message.topic))

    @property
    def clustering(self) -> bool:
        return self.options.message_model is MessageModel.CLUSTERING
