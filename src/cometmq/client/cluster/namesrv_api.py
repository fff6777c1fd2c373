"""The requests of clients to name servers. If one fails, the request goes to the next one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from cometmq.client.cluster.broker_api import Calls
from cometmq.client.cluster.requests import (
    RouteAnswers,
    broker_error,
    kv_request,
    kv_value,
    route_request,
    succeeded,
)
from cometmq.errors import CometError, ConnectError, RemotingError
from cometmq.protocol.bodies import ClusterInfo, TopicList, TopicRouteData
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.ext import Header
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    DeleteTopicRequestHeader,
    GetKVConfigRequestHeader,
    PutKVConfigRequestHeader,
)
from cometmq.remoting import RemotingClient

T = TypeVar("T")

_PATIENCE_S = 0.5
"""Seconds without an answer after which the request is also sent to the next name server."""


class NamesrvApi(Calls):
    """The API of the name servers.

    Name servers are independent: if a name server has no route of a topic, the request goes to the others.
    """

    def __init__(self, remoting: RemotingClient, addrs: Sequence[str], timeout_s: float = 3.0) -> None:
        super().__init__(remoting, timeout_s)
        self.addrs: tuple[str, ...] = ()
        self.current = ""
        """The address of the name server that receives requests first, "" while no name server is known."""
        self.use(addrs)

    def use(self, addrs: Sequence[str]) -> None:
        """Replace the addresses of the name servers. The current server stays current if it is among them."""
        self.addrs = tuple(addrs)
        if self.current not in self.addrs:
            self.current = random.choice(self.addrs) if self.addrs else ""

    async def _answers(self, request: Frame) -> AsyncGenerator[tuple[str, Frame | RemotingError], None]:
        """Yield the answers of the name servers, beginning with the current one.

        The request goes to the next name server when the caller requests another answer, or after
        `_PATIENCE_S` seconds without one, so that a server that hangs does not use up the timeout of a send.
        """
        waiting: dict[asyncio.Task[Frame], str] = {}
        start = self.addrs.index(self.current) if self.current in self.addrs else 0
        left = [*self.addrs[start:], *self.addrs[:start]]
        try:
            while left or waiting:
                if left:
                    addr = left.pop(0)
                    waiting[asyncio.create_task(self.ask(addr, request))] = addr
                patience_s = _PATIENCE_S if left else None
                done, _ = await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    addr = waiting.pop(task)
                    error = task.exception()
                    if error is not None and not isinstance(error, RemotingError):
                        raise error
                    yield addr, task.result() if error is None else error
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def ask_any(self, code: RequestCode, header: Header | None = None) -> Frame:
        """Return the answer of the first reachable name server. Raises BrokerError or RemotingError."""
        failure: RemotingError = ConnectError("(no name server)", "none is known")
        async with aclosing(self._answers(Frame.request(code, header))) as answers:
            async for addr, answer in answers:
                if isinstance(answer, Frame):
                    self.current = addr
                    return succeeded(answer, addr)
                failure = answer
        raise failure

    async def route(self, topic: str) -> TopicRouteData:
        """Return the route of a topic.

        Raises NoRouteError with the answers of all name servers if none of them has a route.
        """
        return await self.route_as(topic, lambda data: data)

    async def route_as(self, topic: str, read: Callable[[TopicRouteData], T]) -> T:
        """Return the result of `read` for a topic's route.

        Raises:
            NoRouteError: No name server returned a route.
            BodyError: Name servers returned routes, but all of them are invalid.
        """
        found = RouteAnswers(topic, read)
        async with aclosing(self._answers(route_request(topic))) as answers:
            async for addr, answer in answers:
                route = found.take(addr, answer)
                self.current = found.first or self.current
                if route is not None:
                    return route
        raise found.failure

    async def cluster_info(self) -> ClusterInfo:
        """Return the addresses of all brokers by broker name, and the broker names by cluster."""
        answer = await self.ask_any(RequestCode.GET_BROKER_CLUSTER_INFO)
        return ClusterInfo.decode(answer.body)

    async def topics(self) -> list[str]:
        """Return all topics, including system topics."""
        answer = await self.ask_any(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        return sorted(TopicList.decode(answer.body).topic_list)

    async def delete_topic(self, addr: str, topic: str) -> None:
        """Delete a topic's route at one name server. Each of the servers needs the request."""
        await self.call(
            addr, RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicRequestHeader(topic=topic), topic=topic
        )

    async def kv_config(self, namespace: str, key: str) -> str | None:
        """Return the value of a key in the KV configuration, from the first name server that has the key.

        Name servers do not share their KV configurations, and a new name server starts with an empty one.

        Returns:
            The value. None if at least one name server answered that it lacks the key, and no other has it.

        Raises:
            BrokerError: All name servers failed, and the last failure was a refusal.
            RemotingError: All name servers failed, and the last failure was a missing answer.
        """
        absent = False
        failure: CometError = ConnectError("(no name server)", "none is known")
        async with aclosing(self._answers(kv_request(namespace, key))) as answers:
            async for addr, answer in answers:
                if (value := kv_value(answer)) is not None:
                    return value
                if not isinstance(answer, Frame):
                    failure = answer
                elif answer.code in (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND):
                    absent = True
                else:
                    failure = broker_error(answer, addr)
        if absent:
            return None
        raise failure

    async def put_kv_config(self, addr: str, namespace: str, key: str, value: str) -> None:
        """Store a key's value at one name server. The servers are independent, so each needs the request."""
        header = PutKVConfigRequestHeader(namespace=namespace, key=key, value=value)
        await self.call(addr, RequestCode.PUT_KV_CONFIG, header)

    async def delete_kv_config(self, addr: str, namespace: str, key: str) -> None:
        """Delete a key at one name server, if it exists there. Each name server needs its own request."""
        header = GetKVConfigRequestHeader(namespace=namespace, key=key)
        await self.call(addr, RequestCode.DELETE_KV_CONFIG, header)
