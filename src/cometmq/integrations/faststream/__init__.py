"""CometMQ as a broker of FastStream.

    broker = CometMQBroker("127.0.0.1:9876")
    app = FastStream(broker)

    @broker.subscriber("orders", group="billing", expression="new || paid")
    @broker.publisher("invoices")
    async def bill(order: Order) -> Invoice: ...

Each subscriber is a member of a consumer group. Headers are user properties of messages. docs/faststream.md
is the guide.
"""

from cometmq.integrations.faststream.annotations import CometMQMessage
from cometmq.integrations.faststream.broker import (
    CometMQBroker,
    CometMQPublisher,
    CometMQRoute,
    CometMQRouter,
)
from cometmq.integrations.faststream.command import CometMQResponse
from cometmq.integrations.faststream.testing import TestCometMQBroker

__all__ = [
    "CometMQBroker", "CometMQMessage", "CometMQPublisher", "CometMQResponse", "CometMQRoute",
    "CometMQRouter", "TestCometMQBroker",
]  # fmt: skip
