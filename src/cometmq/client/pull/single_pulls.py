"""Pulls for which the caller names a queue and an offset. The queue need not be assigned."""

from __future__ import annotations

import msgspec

from cometmq.client.cluster.lookups import QueryClient
from cometmq.client.cluster.requests import pull_request
from cometmq.client.cluster.routes import ReadTarget
from cometmq.client.group.group import Group
from cometmq.client.group.options import PullOptions
from cometmq.client.group.subscription import Expression, Subscription, as_subscription
from cometmq.message import MessageQueue, PullResult
from cometmq.protocol.frame import Frame


class SinglePulls(QueryClient):
    """A client that pulls messages from one queue per call."""

    options: PullOptions

    @property
    def _group(self) -> Group:
        raise NotImplementedError

    async def fetch_queues(self, topic: str) -> list[MessageQueue]:
        """Return the readable queues of a topic.

        Raises:
            NoRouteError: The name servers have no route of the topic, or no name server can be reached.
        """
        return list(await self._running().read_queues(topic))

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        max_count: int | None = None,
        expression: Expression = "*",
        timeout_s: float | None = None,
    ) -> PullResult:
        """Pull messages from one queue without waiting for new ones.

        Args:
            queue: The queue.
            offset: The offset of the first message, 0 or more.
            max_count: The maximum number of messages. Brokers return at most 32 by default. Default:
                `PullOptions.pull_batch_size`.
            expression: Tags (`"TagA || TagB"`), `sql92(...)` or `filter_class(...)`.
            timeout_s: The timeout in seconds. Default: `PullOptions.pull_timeout_s`.

        Returns:
            The messages, the status and the offset of the next pull.

        Raises:
            ValueError: The offset is negative, or `max_count` is not positive.
            NoRouteError: The queue's broker is unknown.
            BrokerError: The broker refused the request.
            RemotingError: The broker cannot be reached or did not answer in time.
        """
        subscription = as_subscription(queue.topic, expression)
        limit = self.options.pull_timeout_s if timeout_s is None else timeout_s
        return await self._pull(queue, offset, max_count, subscription, 0.0, limit)

    async def pull_blocking(
        self, queue: MessageQueue, offset: int, *, max_count: int | None = None, expression: Expression = "*"
    ) -> PullResult:
        """Pull messages from one queue. If there are none, the broker waits for new messages.

        The wait takes at most `PullOptions.broker_suspend_s` seconds.

        Args:
            queue: The queue.
            offset: The offset of the first message, 0 or more.
            max_count: The maximum number of messages. Default: `PullOptions.pull_batch_size`.
            expression: Tags (`"TagA || TagB"`), `sql92(...)` or `filter_class(...)`.

        Returns:
            The messages, the status and the offset of the next pull.

        Raises:
            ValueError: The offset is negative, or `max_count` is not positive.
            CometError: The pull failed. The error is one of those that `pull` raises.
        """
        subscription = as_subscription(queue.topic, expression)
        options = self.options
        return await self._pull(
            queue, offset, max_count, subscription, options.broker_suspend_s, options.suspend_timeout_s
        )

    async def _pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_count: int | None,
        subscription: Subscription,
        suspend_s: float,
        timeout_s: float,
    ) -> PullResult:
        if offset < 0 or (max_count is not None and max_count <= 0):
            raise ValueError(
                f"offset {offset} and max_count {max_count}: the offset must be 0 or more, max_count positive"
            )

        async def request(target: ReadTarget) -> Frame:
            await self._group.compile_expression(target.addr, subscription)
            return pull_request(
                self.group,
                queue,
                offset,
                self.options.pull_batch_size if max_count is None else max_count,
                subscription.expression,
                expression_type=subscription.expression_type,
                sub_version=subscription.version,
                suspend_s=suspend_s,
                class_filter=subscription.source is not None,
            )

        self._running()
        result = await self._group.pulls.pull(queue, subscription, request, timeout_s, self.options.max_body)
        if not subscription.tags:
            return result
        return msgspec.structs.replace(result, messages=subscription.filter(result.messages))
