"""Pulls of messages from brokers, and with a filter class from the filter servers of brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.routes import ReadTarget
from cometmq.client.group.subscription import Subscription
from cometmq.errors import BrokerError, NoRouteError, RemotingError
from cometmq.message import MessageQueue, PullResult, add_properties
from cometmq.protocol.codes import MASTER_ID, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.properties.values import MAX_OFFSET, MIN_OFFSET

RequestFor = Callable[[ReadTarget], Awaitable[Frame]]
"""A function that creates the pull request for a broker."""


@dataclass(eq=False)
class Pulls:
    """The pulls of one group. A filter class is uploaded to a filter server before the first pull there."""

    instance: ClientInstance
    group: str
    _uploaded: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """By (filter server, topic): name and source of the class that was uploaded there and not lost."""
    _uploading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _turn: int = 0
    _suggested: dict[MessageQueue, int] = field(default_factory=dict)
    """By queue: the id of the broker that the last answer suggested, if it was not the master."""

    async def pull(
        self,
        queue: MessageQueue,
        subscription: Subscription,
        request: RequestFor,
        timeout_s: float,
        max_body: int,
    ) -> PullResult:
        """Pull messages of a queue from the broker that the answer to the queue's last pull suggested.

        If that broker does not serve the pull, another one is asked (`Reads.run`, whose errors are raised).
        If the subscription has a filter class, the pull goes to a filter server of the broker. `request`
        creates the request for a broker, `timeout_s` is the timeout for the answer of one broker.

        Returns:
            The answer. Each message has the queue's min and max offset as properties, as in Java's client.
        """

        async def attempt(target: ReadTarget) -> PullResult:
            frame = await request(target)
            return await self._pull(target.addr, queue, subscription, frame, timeout_s, max_body)

        result = await self.instance.reads.run(queue, attempt, self._suggested.get(queue, MASTER_ID))
        if result.suggest_which_broker_id != MASTER_ID:
            self._suggested[queue] = result.suggest_which_broker_id
        else:
            self._suggested.pop(queue, None)
        bounds = {MIN_OFFSET: str(result.min_offset), MAX_OFFSET: str(result.max_offset)}
        add_properties(result.messages, bounds)
        return result

    async def _pull(
        self,
        broker_addr: str,
        queue: MessageQueue,
        subscription: Subscription,
        request: Frame,
        timeout_s: float,
        max_body: int,
    ) -> PullResult:
        brokers = self.instance.brokers
        source = subscription.source
        if source is None:
            return await brokers.pull(broker_addr, queue, request, timeout_s, max_body)
        addr = self._filter_server(broker_addr, queue)
        wanted = subscription.expression, source
        try:
            await self._upload(addr, queue.topic, wanted)
            try:
                return await brokers.pull(addr, queue, request, timeout_s, max_body)
            except BrokerError as error:
                if error.code != ResponseCode.FILTER_DATA_NOT_EXIST:
                    raise
            # The filter server has dropped the class, which no pull had used for a while. Upload it again.
            self._uploaded.pop((addr, queue.topic), None)
            await self._upload(addr, queue.topic, wanted)
            return await brokers.pull(addr, queue, request, timeout_s, max_body)
        except RemotingError:
            self._uploaded.clear()
            self._turn += 1
            self.instance.refresh_soon(queue.topic)
            raise

    async def _upload(self, addr: str, topic: str, wanted: tuple[str, str]) -> None:
        async with self._uploading:
            if self._uploaded.get((addr, topic)) != wanted:
                await self.instance.brokers.upload_filter_class(addr, self.group, topic, *wanted)
                self._uploaded[addr, topic] = wanted

    def _filter_server(self, broker_addr: str, queue: MessageQueue) -> str:
        """Return a filter server of the queue's broker: another one after each transport error."""
        known = self.instance.routes.filter_servers(queue.topic, broker_addr)
        if not known:
            self.instance.refresh_soon(queue.topic)
            raise NoRouteError(
                queue.topic,
                [(self.instance.namesrv.current, f"broker {queue.broker_name} has no filter server")],
                "Set filterServerNums in the broker's configuration file, or filter by tags or SQL92.",
            )
        return known[(queue.queue_id + self._turn) % len(known)]
