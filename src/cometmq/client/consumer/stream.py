"""A message stream: a member of a group whose messages are read with `async for` and acknowledged one by one.

async with MessageStream("billing", {"orders": "new || paid"}) as stream:
    async for message in stream:
        ...
        await stream.ack(message)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.consumer.delivery import Delivery
from cometmq.client.consumer.push import PushConsumer
from cometmq.client.consumer.push_session import PushSession
from cometmq.client.group.options import PushOptions
from cometmq.client.group.subscription import Subscriptions
from cometmq.errors import ClientStateError, ConfigError
from cometmq.message import MessageExt


async def _no_listener(messages: list[MessageExt]) -> None:
    """Refuse an administrator's request to consume a message directly: there is no listener."""
    raise ClientStateError(
        f"a stream has no listener, so message {messages[0].msg_id} cannot be consumed directly"
    )


class MessageStream(PushConsumer):
    """A push consumer without a listener: `async for` returns its messages, in one or several tasks.

    Each message must be acknowledged with ack() or nack(), in any order. A message that is not acknowledged
    within `consume_timeout_s` is sent back to the broker and delivered again. Messages that were pulled and
    not acknowledged count towards `flow_limits`: a queue that has reached its limit is not pulled. With
    `orderly=True` each queue returns one message at a time, and the next one after the acknowledgement.

    stop(), called from another task, ends the iteration and waits up to `drain_timeout_s` for
    acknowledgements. Leaving `async with` does not wait. Messages that are not acknowledged are delivered
    again to the next owner of the queue.

    Args:
        group: The name of the consumer group.
        subscriptions: A topic, several topics, or a mapping from topic to an expression, as in PushConsumer.
        namesrv: The name servers, as in PushConsumer.
        options: The settings of the consumer, without consume_hooks and with a `consume_batch_max_size` of 1.
            Default: PushOptions().
        client: A client instance to share. Default: the stream creates its own.
        client_options: The settings of connections, routes and heartbeats. Default: ClientOptions().

    Raises:
        MessageIllegal: The name of the group or of a topic is illegal.
        ConfigError: A setting is invalid or does not apply to a stream.
    """

    _kind = "message stream"

    def __init__(
        self,
        group: str,
        subscriptions: Subscriptions = (),
        *,
        namesrv: str | Sequence[str] | None = None,
        options: PushOptions | None = None,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        if options is not None and options.consume_batch_max_size != 1:
            size = str(options.consume_batch_max_size)
            raise ConfigError("consume_batch_max_size", size, "1 in a stream, which returns single messages")
        if options is not None and options.consume_hooks:
            count = str(len(options.consume_hooks))
            raise ConfigError("consume_hooks", count, "none in a stream, where no listener is called")
        super().__init__(
            group,
            _no_listener,
            subscriptions,
            namesrv=namesrv,
            options=options,
            client=client,
            client_options=client_options,
        )

    def _new_session(self, client: ClientInstance) -> PushSession:
        return PushSession(
            self.group, _no_listener, self._subscriptions, self._options, client, delivers=True
        )

    async def __aexit__(self, *raised: object) -> None:
        self._leave()
        await super().__aexit__(*raised)

    def _leave(self) -> None:
        """Record that the caller reads no more: a stop waits only for acknowledgements in progress."""
        if self._session is not None:
            self._delivery.leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MessageExt:
        """Wait for the next message and return it. The iteration ends when the stream is stopped."""
        if self._state in ("stopping", "stopped"):
            raise StopAsyncIteration
        return await self._delivery.next()

    async def ack(self, message: MessageExt) -> None:
        """Acknowledge a message as consumed.

        Args:
            message: A message that the iteration returned.

        Raises:
            ClientStateError: The message cannot be acknowledged (any more): the stream was stopped,
                `consume_timeout_s` has passed, or the queue was assigned to another member. The message is
                delivered again.
        """
        await self._delivery.ack(message)

    async def nack(self, message: MessageExt, delay_level: int = 0) -> None:
        """Reject a message, so that it is delivered again later.

        A call that is cancelled leaves the message unacknowledged. In an orderly stream the message is
        returned again after `suspend_current_queue_s` seconds, before any other message of its queue.

        Args:
            message: A message that the iteration returned.
            delay_level: 0: the broker chooses the delay by the number of retries. 1 to 18: a delay level. -1:
                the message goes to the dead-letter queue immediately. An orderly stream accepts 0 only.

        Raises:
            ClientStateError: The message cannot be acknowledged (any more), as in `ack`.
            ConfigError: The delay level is invalid.
        """
        await self._delivery.nack(message, delay_level)

    @property
    def _delivery(self) -> Delivery[Any, Any]:
        delivery = self._running_session().consuming
        assert isinstance(delivery, Delivery)
        return delivery
