"""Operations on lite topics (requests 200074 to 200079 of 5.5)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from cometmq.admin.errors import UnknownNameError
from cometmq.admin.servers import ServerAdmin, ask_each
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.errors import CometError
from cometmq.protocol.bodies.admin import (
    LiteBrokerInfo,
    LiteClientInfo,
    LiteGroupInfo,
    LiteTopicInfo,
    ParentTopicInfo,
)
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import TopicRequestHeader
from cometmq.protocol.headers.admin import (
    GetLiteClientInfoHeader,
    GetLiteGroupInfoHeader,
    GetLiteTopicInfoHeader,
    TriggerLiteDispatchHeader,
)

T = TypeVar("T")


class LiteTopicAdmin(ServerAdmin):
    """Operations on lite topics.

    All but the first send a request to each broker that has the parent topic, and return the results by
    broker name. `missing` receives the errors of brokers that fail while others respond.
    """

    async def lite_broker_info(self, broker_addr: str) -> LiteBrokerInfo:
        """Return the numbers of lite topics, subscriptions and leases of a broker."""
        return await self.client.brokers.fetch(broker_addr, RequestCode.GET_BROKER_LITE_INFO, LiteBrokerInfo)

    async def parent_topic(self, parent: str, missing: dict[str, CometError]) -> dict[str, ParentTopicInfo]:
        """Return the groups and the number of lite topics of a parent topic."""
        code, header = RequestCode.GET_PARENT_TOPIC_INFO, TopicRequestHeader(topic=parent)
        return await self._of_parent(
            parent, missing, lambda addr: self.client.brokers.fetch(addr, code, ParentTopicInfo, header)
        )

    async def lite_topic(
        self, parent: str, lite_topic: str, missing: dict[str, CometError]
    ) -> dict[str, LiteTopicInfo]:
        """Return the offsets and the subscribers of a lite topic."""
        code, header = RequestCode.GET_LITE_TOPIC_INFO, GetLiteTopicInfoHeader(parent, lite_topic)
        return await self._of_parent(
            parent, missing, lambda addr: self.client.brokers.fetch(addr, code, LiteTopicInfo, header)
        )

    async def lite_client(
        self, parent: str, group: str, client_id: str, missing: dict[str, CometError]
    ) -> dict[str, LiteClientInfo]:
        """Return the lite topics to which a client is subscribed."""
        code, header = RequestCode.GET_LITE_CLIENT_INFO, GetLiteClientInfoHeader(parent, group, client_id)
        return await self._of_parent(
            parent, missing, lambda addr: self.client.brokers.fetch(addr, code, LiteClientInfo, header)
        )

    async def lite_group(
        self, parent: str, group: str, lite_topic: str | None, top: int, missing: dict[str, CometError]
    ) -> dict[str, LiteGroupInfo]:
        """Return a group's progress in a lite topic, or the `top` lite topics with the largest lags."""
        code, header = RequestCode.GET_LITE_GROUP_INFO, GetLiteGroupInfoHeader(group, lite_topic, top)
        return await self._of_parent(
            parent, missing, lambda addr: self.client.brokers.fetch(addr, code, LiteGroupInfo, header)
        )

    async def trigger_lite_dispatch(
        self,
        parent: str,
        group: str,
        client_id: str | None,
        broker_name: str | None,
        missing: dict[str, CometError],
    ) -> list[str]:
        """Offer all unconsumed lite topics to a client or to all clients of a group. Return broker names."""
        code, header = RequestCode.TRIGGER_LITE_DISPATCH, TriggerLiteDispatchHeader(group, client_id)
        return list(
            await self._of_parent(
                parent, missing, lambda addr: self.client.brokers.call(addr, code, header), broker_name
            )
        )

    async def _of_parent(
        self,
        parent: str,
        missing: dict[str, CometError],
        ask: Callable[[str], Awaitable[T]],
        broker_name: str | None = None,
    ) -> dict[str, T]:
        addrs = broker_addrs(await self.client.namesrv.route(parent))
        if broker_name is not None:
            if broker_name not in addrs:
                raise UnknownNameError("broker of the topic", broker_name, sorted(addrs))
            addrs = {broker_name: addrs[broker_name]}
        answers, failures = await ask_each(addrs, lambda _name, addr: ask(addr))
        missing |= failures
        return answers
