"""The RPCs about queues: QueryRoute and QueryAssignment.

The endpoints of this broker in a route are those that the client has sent with its request. So a client
behind a port mapping, a proxy or a Kubernetes service keeps the address under which it reaches the endpoint.

By default, a route contains only this broker. With the setting `grpcClusterRouteEnable` it contains all
masters that are registered at the name servers. Name servers do not know gRPC ports. If a broker has the same
`grpcPort` as this one, its port in the route is that of the request, which may be mapped. Otherwise it is its
`grpcPort`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, NamedTuple

from cometmq import logs
from cometmq.broker.access.rights import consumer_rights
from cometmq.broker.tables.subscription_groups import SubscriptionGroups
from cometmq.broker.tables.topics import TopicTable
from cometmq.errors import CometError
from cometmq.grpc.rpc.calls import Call
from cometmq.grpc.rpc.enums import AddressScheme, Code, Permission
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import ServiceError
from cometmq.grpc.service.clients import Clients
from cometmq.grpc.service.outcomes import status
from cometmq.grpc.service.sends import find_topic
from cometmq.grpc.service.sent import MIXED, accepted_types
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.bodies import TopicConfig, TopicRouteData
from cometmq.protocol.codes import Perm

log = logs.logger(__name__)

MAX_QUEUES = 10_000
MAX_ADDRESSES = 16
MAX_ENDPOINTS_BYTES = 4096
"""The maximum size of the endpoints in a request: each queue of the response contains them."""
CLUSTER_ROUTE_S = 5.0
"""The time, in seconds, for which the route of a name server is cached."""
NAME_SERVER_TIMEOUT_S = 2.0
PORT_S = 60.0
"""The time, in seconds, for which the port of another broker's endpoint is cached."""
MAX_CLUSTER_ROUTES = 1_000

FindRoute = Callable[[str], Awaitable[TopicRouteData | None]]
"""Returns the route of a topic from a name server, or None."""

FindEndpoint = Callable[[str], Awaitable[tuple[str, int]]]
"""Returns the host and port of the endpoint of a broker, by the broker's address. Raises CometError."""


class Share(NamedTuple):
    """The queues of a topic on one broker, and the `Endpoints` of the broker."""

    broker_name: str
    read_queues: int
    write_queues: int
    perm: int
    endpoints: Any


@dataclass(eq=False)
class Routes:
    """Handles the calls about queues.

    Attributes:
        host: The host of the endpoint, for clients that do not send any endpoints.
        find_route: Finds the other masters of a topic. None: routes contain this broker alone.
        port: The port of the endpoint, set once it listens.
        find_endpoint: Finds the endpoint of another master. None: it has the port of the request.
    """

    clients: Clients
    topics: TopicTable
    groups: SubscriptionGroups
    broker_name: str
    host: str
    find_route: FindRoute | None = None
    port: int = 0
    find_endpoint: FindEndpoint | None = None
    _ports: dict[str, tuple[float, int]] = field(default_factory=dict)
    _found: dict[str, tuple[float, TopicRouteData | None]] = field(default_factory=dict)

    async def query_route(self, call: Call, request: Any) -> Any:
        """Return the queues of a topic."""
        self.clients.find(call)
        _check_endpoints(request.endpoints)
        config = self._topic(request.topic.name)
        queues: list[Any] = []
        for share in await self._shares(request, config):
            reads = share.read_queues if share.perm & Perm.READ else 0
            writes = share.write_queues if share.perm & Perm.WRITE else 0
            both = min(reads, writes)
            permissions = [Permission.READ] * (reads - both) + [Permission.WRITE] * (writes - both)
            permissions += [Permission.READ_WRITE] * both
            queues += [
                self._queue(call, share, config, queue_id, permission)
                for queue_id, permission in enumerate(permissions[: MAX_QUEUES - len(queues)])
            ]
        return messages().QueryRouteResponse(status=status(Code.OK), message_queues=queues)

    async def query_assignment(self, call: Call, request: Any) -> Any:
        """Return the queues from which a consumer receives: -1 for all, or each queue of an ordered group."""
        self.clients.find(call, consumer_rights(request.topic.name, request.group.name))
        _check_endpoints(request.endpoints)
        config = self._topic(request.topic.name)
        group = self.groups.table.get(request.group.name)
        ordered = group is not None and bool(group.consume_message_orderly)
        queues: list[Any] = []
        for share in await self._shares(request, config):
            if share.perm & Perm.READ and share.read_queues:
                ids = range(min(share.read_queues, MAX_QUEUES - len(queues))) if ordered else (-1,)
                queues += [self._queue(call, share, config, each, Permission.READ) for each in ids]
        if not queues:
            raise ServiceError(Code.FORBIDDEN, f"topic {config.topic_name} cannot be read")
        m = messages()
        assignments = [m.Assignment(message_queue=queue) for queue in queues]
        return m.QueryAssignmentResponse(status=status(Code.OK), assignments=assignments)

    async def _shares(self, request: Any, config: TopicConfig) -> list[Share]:
        """Return the queues of a topic on this broker and, if the setting allows it, on the other masters."""
        endpoints = messages().Endpoints()
        if request.endpoints.addresses:
            endpoints.CopyFrom(request.endpoints)
        else:
            endpoints = _endpoints(self.host, self.port)
        numbers = config.read_queue_nums, config.write_queue_nums, config.perm
        shares = [Share(self.broker_name, *numbers, endpoints)]
        route = await self._route(config.topic_name)
        if route is None:
            return shares
        masters = {each.broker_name: each.broker_addrs.get(0, "") for each in route.broker_datas}
        for each in route.queue_datas:
            addr = masters.get(each.broker_name, "")
            address = parse_address(addr)
            if address is not None and each.broker_name != self.broker_name:
                port = await self._port_of(addr) or endpoints.addresses[0].port
                other = _endpoints(address[0], port)
                numbers = each.read_queue_nums, each.write_queue_nums, each.perm
                shares.append(Share(each.broker_name, *numbers, other))
        return shares

    async def _port_of(self, broker_addr: str) -> int:
        """Return the port of another broker's endpoint if it differs from this broker's port, else 0."""
        now = asyncio.get_running_loop().time()
        if (known := self._ports.get(broker_addr)) is not None and now - known[0] < PORT_S:
            return known[1]
        port = 0
        if self.find_endpoint is not None:
            try:
                _, port = await asyncio.wait_for(self.find_endpoint(broker_addr), NAME_SERVER_TIMEOUT_S)
            except (CometError, TimeoutError) as error:
                log.info("broker %s: the port of its endpoint is unknown: %s", broker_addr, error)
        if len(self._ports) >= MAX_CLUSTER_ROUTES:
            self._ports.clear()
        self._ports[broker_addr] = now, 0 if port == self.port else port
        return self._ports[broker_addr][1]

    async def _route(self, topic: str) -> TopicRouteData | None:
        """Return a topic's route from the name servers. Use a cached route for some time, or if they fail."""
        if self.find_route is None:
            return None
        now = asyncio.get_running_loop().time()
        since, known = self._found.get(topic, (0.0, None))
        if known is not None and now - since < CLUSTER_ROUTE_S:
            return known
        try:
            known = await asyncio.wait_for(self.find_route(topic), NAME_SERVER_TIMEOUT_S) or known
        except TimeoutError:
            pass  # use the cached route again
        self._found.pop(topic, None)
        if len(self._found) >= MAX_CLUSTER_ROUTES:
            del self._found[next(iter(self._found))]
        self._found[topic] = now, known
        return known

    def _topic(self, name: str) -> TopicConfig:
        config = find_topic(self.topics, name)
        if config is None:
            raise ServiceError(Code.TOPIC_NOT_FOUND, f"topic {name[:200]} does not exist")
        return config

    def _queue(
        self, call: Call, share: Share, config: TopicConfig, queue_id: int, permission: Permission
    ) -> Any:
        m = messages()
        types = accepted_types((config.attributes or {}).get("message.type", ""))
        version, language = call.text(b"x-mq-client-version"), call.text(b"x-mq-language")
        if version.startswith("5.0.") or (version.startswith("5.1.") and language in ("JAVA", "DOTNET")):
            # These clients do not start if a route contains a type that is newer than they are.
            types = [each for each in types if each in MIXED]
        return m.MessageQueue(
            topic=m.Resource(name=config.topic_name),
            id=queue_id,
            permission=permission,
            broker=m.Broker(name=share.broker_name, id=0, endpoints=share.endpoints),
            accept_message_types=types,
        )


def _endpoints(host: str, port: int) -> Any:
    """Return the `Endpoints` of one address."""
    try:
        scheme = AddressScheme.IPv6 if ip_address(host).version == 6 else AddressScheme.IPv4
    except ValueError:
        scheme = AddressScheme.DOMAIN_NAME
    m = messages()
    return m.Endpoints(scheme=scheme, addresses=[m.Address(host=host, port=port)])


def _check_endpoints(endpoints: Any) -> None:
    """Raise ServiceError if a client sends more endpoints than a route may contain."""
    count, size = len(endpoints.addresses), endpoints.ByteSize()
    if count > MAX_ADDRESSES or size > MAX_ENDPOINTS_BYTES:
        problem = (
            f"endpoints: {count} addresses with {size} bytes, at most {MAX_ADDRESSES} with "
            f"{MAX_ENDPOINTS_BYTES} bytes"
        )
        raise ServiceError(Code.ILLEGAL_ACCESS_POINT, problem)
