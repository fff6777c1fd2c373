"""What a name server can be asked. One server is asked until it fails, then the next one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cometmq.client.cluster.broker_api import Calls
from cometmq.client.cluster.requests import (
    NO_ROUTE_HINT,
    UNREACHABLE_HINT,
    hint_of,
    route_in,
    route_request,
    succeeded,
)
from cometmq.errors import BrokerError, NoRouteError, RemotingError
from cometmq.protocol.bodies import ClusterInfo, TopicList, TopicRouteData
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.ext import Header
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import (
    DeleteTopicRequestHeader,
    GetKVConfigRequestHeader,
    GetKVConfigResponseHeader,
    PutKVConfigRequestHeader,
)
from cometmq.remoting import RemotingClient

__all__ = ["NameServersUnreachable", "NamesrvApi"]


class NameServersUnreachable(NoRouteError):
    """None of the name servers answered."""


class NamesrvApi(Calls):
    """Name servers do not know of each other, so a topic that one does not know is asked of all."""

    def __init__(self, remoting: RemotingClient, addrs: Sequence[str], timeout_s: float = 3.0) -> None:
        super().__init__(remoting, timeout_s)
        self.addrs = tuple(addrs)
        self._at = random.randrange(len(self.addrs))

    @property
    def current(self) -> str:
        """The one that is asked first."""
        return self.addrs[self._at]

    def _in_turn(self) -> list[tuple[int, str]]:
        count = len(self.addrs)
        return [((self._at + step) % count, self.addrs[(self._at + step) % count]) for step in range(count)]

    async def ask_any(self, code: RequestCode, header: Header | None = None) -> Frame:
        """The answer of the first name server that is reached. Raises BrokerError or RemotingError."""
        request = Frame.request(code, header)
        failure: RemotingError | None = None
        for position, addr in self._in_turn():
            try:
                answer = await self.ask(addr, request)
            except RemotingError as error:
                failure = error
                continue
            self._at = position
            return succeeded(answer, addr)
        assert failure is not None
        raise failure

    async def route(self, topic: str) -> TopicRouteData:
        """Raises NoRouteError, which names every name server and what it answered."""
        asked: list[tuple[str, str]] = []
        reached: int | None = None
        hint = NO_ROUTE_HINT
        for position, addr in self._in_turn():
            try:
                answer = await self.ask(addr, route_request(topic))
            except RemotingError as error:
                asked.append((addr, str(error)))
                continue
            if reached is None:
                reached = self._at = position
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                hint = hint_of(answer.code)
            route = route_in(answer)
            if not isinstance(route, str):
                return route
            asked.append((addr, route))
        if reached is None:
            raise NameServersUnreachable(topic, asked, UNREACHABLE_HINT)
        raise NoRouteError(topic, asked, hint)

    async def cluster_info(self) -> ClusterInfo:
        """All brokers by name, and broker names by cluster."""
        answer = await self.ask_any(RequestCode.GET_BROKER_CLUSTER_INFO)
        return ClusterInfo.decode(answer.body)

    async def topics(self) -> list[str]:
        """All topics, system topics included."""
        answer = await self.ask_any(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        return sorted(TopicList.decode(answer.body).topic_list)

    async def delete_topic(self, addr: str, topic: str) -> None:
        """On one name server: each has to be told."""
        await self.call(
            addr, RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicRequestHeader(topic=topic), topic=topic
        )

    async def kv_config(self, namespace: str, key: str) -> str | None:
        """A value of the name server's own table; None: there is none."""
        try:
            answer = await self.ask_any(
                RequestCode.GET_KV_CONFIG, GetKVConfigRequestHeader(namespace=namespace, key=key)
            )
        except BrokerError as error:
            if error.code == ResponseCode.QUERY_NOT_FOUND:
                return None
            raise
        return answer.header(GetKVConfigResponseHeader).value

    async def put_kv_config(self, addr: str, namespace: str, key: str, value: str) -> None:
        """On one name server: each has to be told."""
        header = PutKVConfigRequestHeader(namespace=namespace, key=key, value=value)
        await self.call(addr, RequestCode.PUT_KV_CONFIG, header)

    async def delete_kv_config(self, addr: str, namespace: str, key: str) -> None:
        """On one name server, whether it has it or not: each has to be told."""
        header = GetKVConfigRequestHeader(namespace=namespace, key=key)
        await self.call(addr, RequestCode.DELETE_KV_CONFIG, header)
