"""The RPCs about queues: QueryRoute and QueryAssignment.

A route contains this broker alone. Its endpoints are those that the client has sent with its request. So a
client behind a port mapping, a proxy or a Kubernetes service keeps the address under which it reaches the
endpoint.
"""

from __future__ import annotations

from typing import Any

from cometmq.grpc.rpc.calls import Call
from cometmq.grpc.rpc.enums import AddressScheme, Code, Permission
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import ServiceError
from cometmq.grpc.service.clients import Clients
from cometmq.grpc.service.outcomes import status
from cometmq.grpc.service.renewals import Groups
from cometmq.grpc.service.sends import Topics, find_topic
from cometmq.grpc.service.sent import MIXED, accepted_types
from cometmq.protocol.bodies import TopicConfig
from cometmq.protocol.codes import Perm

MAX_QUEUES = 10_000
MAX_ADDRESSES = 16
MAX_ENDPOINTS_BYTES = 4096
"""The maximum size of the endpoints in a request: each queue of the response contains them."""


class Routes:
    """Handles the calls about queues.

    Args:
        topics: The topics of the broker.
        groups: The groups of the broker.
        broker_name: The name of the broker.
        host: The host of the endpoint, for clients that do not send any endpoints.

    Attributes:
        port: The port of the endpoint, set once it listens.
    """

    def __init__(self, clients: Clients, topics: Topics, groups: Groups, broker_name: str, host: str) -> None:
        self._clients = clients
        self._topics = topics
        self._groups = groups
        self._broker_name = broker_name
        self._host = host
        self.port = 0

    def query_route(self, call: Call, request: Any) -> Any:
        """Return the queues of a topic."""
        self._clients.find(call)
        _check_endpoints(request.endpoints)
        config = self._topic(request.topic.name)
        reads = config.read_queue_nums if config.perm & Perm.READ else 0
        writes = config.write_queue_nums if config.perm & Perm.WRITE else 0
        both = min(reads, writes)
        permissions = [Permission.READ] * (reads - both) + [Permission.WRITE] * (writes - both)
        permissions += [Permission.READ_WRITE] * both
        queues = [
            self._queue(call, request, config, queue_id, permission)
            for queue_id, permission in enumerate(permissions[:MAX_QUEUES])
        ]
        return messages().QueryRouteResponse(status=status(Code.OK), message_queues=queues)

    def query_assignment(self, call: Call, request: Any) -> Any:
        """Return the queues from which a consumer receives: -1 for all, or each queue of an ordered group."""
        self._clients.find(call)
        _check_endpoints(request.endpoints)
        config = self._topic(request.topic.name)
        if not config.perm & Perm.READ or not config.read_queue_nums:
            raise ServiceError(Code.FORBIDDEN, f"topic {config.topic_name} cannot be read")
        group = self._groups.find(request.group.name)
        ordered = group is not None and bool(group.consume_message_orderly)
        ids = range(min(config.read_queue_nums, MAX_QUEUES)) if ordered else (-1,)
        m = messages()
        found = [
            m.Assignment(message_queue=self._queue(call, request, config, queue_id, Permission.READ))
            for queue_id in ids
        ]
        return m.QueryAssignmentResponse(status=status(Code.OK), assignments=found)

    def _topic(self, name: str) -> TopicConfig:
        config = find_topic(self._topics, name)
        if config is None:
            raise ServiceError(Code.TOPIC_NOT_FOUND, f"topic {name[:200]} does not exist")
        return config

    def _queue(
        self, call: Call, request: Any, config: TopicConfig, queue_id: int, permission: Permission
    ) -> Any:
        m = messages()
        broker = m.Broker(name=self._broker_name, id=0)
        if request.endpoints.addresses:
            broker.endpoints.CopyFrom(request.endpoints)
        else:
            broker.endpoints.scheme = AddressScheme.IPv6 if ":" in self._host else AddressScheme.IPv4
            broker.endpoints.addresses.add(host=self._host, port=self.port)
        types = accepted_types((config.attributes or {}).get("message.type", ""))
        version, language = call.text(b"x-mq-client-version"), call.text(b"x-mq-language")
        if version.startswith("5.0.") or (version.startswith("5.1.") and language in ("JAVA", "DOTNET")):
            # These clients do not start if a route contains a type that is newer than they are.
            types = [each for each in types if each in MIXED]
        return m.MessageQueue(
            topic=m.Resource(name=config.topic_name),
            id=queue_id,
            permission=permission,
            broker=broker,
            accept_message_types=types,
        )


def _check_endpoints(endpoints: Any) -> None:
    """Raise ServiceError if a client sends more endpoints than a route may contain."""
    count, size = len(endpoints.addresses), endpoints.ByteSize()
    if count > MAX_ADDRESSES or size > MAX_ENDPOINTS_BYTES:
        problem = (
            f"endpoints: {count} addresses with {size} bytes, at most {MAX_ADDRESSES} with "
            f"{MAX_ENDPOINTS_BYTES} bytes"
        )
        raise ServiceError(Code.ILLEGAL_ACCESS_POINT, problem)
