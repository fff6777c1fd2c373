"""A member of a group that gives messages out to `async for` and is told of each what became of it.

async with MessageStream("billing", {"orders": "new || paid"}) as stream:
    async for message in stream:
        ...
        await stream.ack(message)
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.options import ClientOptions
from cometmq.client.consumer.giving import Giving
from cometmq.client.consumer.listener import ConsumeContext, ConsumeStatus, OrderlyStatus
from cometmq.client.consumer.push import PushConsumer
from cometmq.client.consumer.push_session import PushSession
from cometmq.client.consumer.retry_topic import check_delay_level
from cometmq.client.group.options import PushOptions
from cometmq.client.group.subscription import Subscriptions
from cometmq.errors import ClientStateError, ConfigError
from cometmq.message import MessageExt

__all__ = ["MessageStream"]


async def _no_listener(messages: list[MessageExt]) -> None:
    """What an administrator hears who has a message handled by this consumer."""
    raise ClientStateError(f"a stream has no listener for message {messages[0].msg_id}")


class MessageStream(PushConsumer):
    """A push consumer without a listener: `async for` gives its messages out, from several tasks as well.

    Each message has to be acknowledged, in any order. One that is not within `consume_timeout_s` goes back
    to the broker and comes again. What is pulled and not acknowledged counts in `flow_limits`: when a queue
    is at its limit, it is pulled no further. With `orderly=True` each queue gives one message at a time, and
    the next after its acknowledgement.

    `stop`, from another task, ends the iteration and waits up to `drain_timeout_s` for what is given out to
    be acknowledged; leaving `async with` does not wait. What is not acknowledged comes again, to whoever has
    the queue then.
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
            raise ConfigError(
                "consume_batch_max_size", size, "1 in a stream, which gives out single messages"
            )
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
        return PushSession(self.group, _no_listener, self._subscriptions, self._options, client, gives=True)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        await super().__aexit__(kind, error, trace)

    def _leave(self) -> None:
        """Whoever iterated has gone."""
        if self._session is not None:
            self._giving.leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MessageExt:
        """The next message; the iteration ends when the stream is stopped."""
        if self._state in ("stopping", "stopped"):
            raise StopAsyncIteration
        return await self._giving.next()

    async def ack(self, message: MessageExt) -> None:
        """Say that a message was handled. Raises ClientStateError for one that is not given out (any more):
        after the stop, when it was held too long, or when its queue went to another member. Then it comes
        again."""
        await self._giving.settle(
            message, OrderlyStatus.SUCCESS if self._options.orderly else ConsumeStatus.SUCCESS
        )

    async def nack(self, message: MessageExt, delay_level: int = 0) -> None:
        """Have a message again later: level 0 lets the broker choose by the number of tries, 1 to 18 is a
        delay level, -1 means dead letter at once. An orderly stream gives it again after
        `suspend_current_queue_s`, and nothing else of its queue before; it takes no level. A call that is
        cancelled leaves the message to be acknowledged."""
        context = self._giving.context(message)
        if isinstance(context, ConsumeContext):
            check_delay_level(delay_level)
            context.delay_level = delay_level
            await self._giving.settle(message, ConsumeStatus.RECONSUME_LATER)
            return
        if delay_level:
            raise ConfigError("delay_level", str(delay_level), "0 in an orderly stream: its queue waits")
        await self._giving.settle(message, OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT)

    @property
    def _giving(self) -> Giving[Any, Any]:
        giving = self._running_session().consuming
        assert isinstance(giving, Giving)
        return giving
