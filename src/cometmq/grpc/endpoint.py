"""The gRPC endpoint of a broker: one more listener, for the clients of RocketMQ 5.x."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from functools import partial

from cometmq import logs
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.parts import BrokerParts
from cometmq.errors import ConfigError
from cometmq.grpc.gateway.gateway import Gateway
from cometmq.grpc.listener.self_signed import self_signed
from cometmq.grpc.listener.server import GrpcServer
from cometmq.grpc.rpc.calls import Method
from cometmq.grpc.rpc.enums import Code
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import GrpcStatus
from cometmq.grpc.service.clients import Clients
from cometmq.grpc.service.endpoints import Endpoints
from cometmq.grpc.service.lite import sync_lite_subscription
from cometmq.grpc.service.receives import Receives
from cometmq.grpc.service.renewals import RENEW_S, Renewals
from cometmq.grpc.service.routes import FindEndpoint, Routes
from cometmq.grpc.service.sends import Sends
from cometmq.grpc.service.sessions import Sessions
from cometmq.grpc.service.traces import Traces
from cometmq.metrics import Families
from cometmq.periodic import Periodic
from cometmq.remoting import Limits, port_error

log = logs.logger(__name__)

CALL_TIMEOUT_S = 3.0
"""The time within which the broker must respond to a request of the endpoint, beside long polls."""
LINK_IDLE_S = 3600.0
"""The time after which an unused link closes. It opens again with the next request."""


class GrpcEndpoint:
    """Serves 5.x clients beside the remoting port of a broker."""

    def __init__(self) -> None:
        self.port = 0
        self._server: GrpcServer | None = None
        self._checks: Periodic | None = None

    async def start(self, parts: BrokerParts, host: str, port: int) -> int:
        """Listen on an address and return the port. Raises ConfigError if the port cannot be used."""
        try:
            messages()
        except ImportError:
            expected = "-1 (none), unless the extra cometmq[grpc] is installed"
            raise ConfigError("grpcPort", str(port), expected) from None
        loop = asyncio.get_running_loop()
        config, tables = parts.config, parts.tables
        max_body = config.store.max_message_size
        sessions = self.sessions = Sessions(tables.groups, max_body)
        limits = Limits(idle_s=LINK_IDLE_S)
        clients = self.clients = Clients(
            parts.server, parts.tick, parts.security.guard, CALL_TIMEOUT_S, sessions.handlers, limits,
            sessions.end,
        )  # fmt: skip
        sessions.clients = clients
        renewals = Renewals(clients, tables.groups, parts.pops.pops, parts.lite)
        self.renewals = sessions.renewals = renewals
        traces = self.traces = Traces(parts.traces)
        sends = Sends(clients, tables.topics, config, traces)
        receives = Receives(clients, tables.groups, renewals, config.broker_name, traces)
        find_endpoint = Endpoints(parts.client, lambda: self.port).find
        routes = self.routes = Routes(
            clients, tables.topics, tables.groups, config.broker_name, config.broker_ip1
        )
        if config.grpc_cluster_route_enable:
            routes.find_route = parts.registrar.route
            routes.find_endpoint = find_endpoint
        server = self._server = GrpcServer(
            {
                "QueryRoute": routes.query_route,
                "QueryAssignment": routes.query_assignment,
                "Telemetry": sessions.telemetry,
                "Heartbeat": sessions.heartbeat,
                "NotifyClientTermination": sessions.notify_client_termination,
                "SendMessage": sends.send_message,
                "EndTransaction": sends.end_transaction,
                "RecallMessage": sends.recall_message,
                "ReceiveMessage": receives.receive_message,
                "AckMessage": receives.ack_message,
                "ChangeInvisibleDuration": receives.change_invisible_duration,
                "ForwardMessageToDeadLetterQueue": receives.forward_to_dead_letters,
                "SyncLiteSubscription": partial(sync_lite_subscription, clients),
            },
            on_close=sessions.closed,
            tick=parts.tick,
            tls=parts.security.tls,
            make_tls=None if config.tls_config_file or config.tls_server_mode else self_signed,
            gateway=partial(_http_gateway, clients) if config.http_gateway_enable else None,
            is_proxy=(lambda _: True) if config.grpc_proxy_protocol_enable else parts.replication.has_member,
        )
        self._forward(server, parts, find_endpoint)
        try:
            self.port = routes.port = await server.start(host, port)
        except OSError as error:
            raise port_error("grpcPort", port, error) from error

        async def check() -> None:
            sessions.expire(loop.time())
            await renewals.renew_all(loop.time())

        self._checks = Periodic(loop, RENEW_S, check, name="renewal of leases")
        self._checks.start()
        traces.start()
        parts.more_metrics.append(lambda families: _collect(families, config, server, clients, traces))
        log.info("5.x clients are served on %s:%d", host, self.port)
        return self.port

    def _forward(self, server: GrpcServer, parts: BrokerParts, find_endpoint: FindEndpoint) -> None:
        """Let the server pass connections on while another broker leads."""

        def leader() -> str | None:
            return (parts.replication.leader_addr or "") if parts.store.slave else None

        server.forward(leader, find_endpoint, not parts.config.grpc_proxy_protocol_enable)
        parts.replication.leader_changed = server.leader_changed

    async def stop(self, drain_s: float) -> None:
        """Stop listening, and close all connections after their calls."""
        if self._checks is not None:
            self._checks.cancel()
        if self._server is not None:
            await self._server.stop(drain_s)
            await self.renewals.stop()
            await self.traces.stop()


def _http_gateway(clients: Clients, methods: Mapping[bytes, Method]) -> Method:
    """Return the method that handles the requests of HTTP clients."""
    return Gateway(clients, methods).method()


def _collect(
    families: Families, config: BrokerConfig, server: GrpcServer, clients: Clients, traces: Traces
) -> None:
    """Add the metrics of an endpoint (docs/metrics.md) to `families`."""
    node = {"cluster": config.broker_cluster_name, "node_type": "proxy", "node_id": config.broker_name}
    words = "Whether the endpoint for 5.x clients is open."
    families.gauge("rocketmq_proxy_up", words, 1, **node, proxy_mode="local")
    renewed = sum(len(client.leased) for client in clients.connected)
    for name, words, value in (
        ("connections", "Open connections of gRPC clients.", len(server.connections)),
        ("clients", "Connected gRPC clients.", len(clients.connected)),
        ("renewed_leases", "Leases of push consumers that the endpoint renews.", renewed),
    ):
        families.gauge(f"cometmq_grpc_{name}", words, value, **node)
    if config.grpc_trace_enable:
        words = "Trace records of gRPC clients that were not stored."
        families.counter("cometmq_grpc_traces_dropped", words, traces.dropped, **node)
    calls: Counter[tuple[str, str]] = Counter()
    for (method, outcome), count in server.ended.items():
        calls[method, _outcome_name(outcome)] += count
    words = "Calls of gRPC clients that have ended, by their RocketMQ or gRPC status."
    for (method, code), count in sorted(calls.items()):
        families.counter("cometmq_grpc_calls", words, count, **node, method=method, code=code)


def _outcome_name(outcome: int) -> str:
    return GrpcStatus(outcome).name if outcome <= max(GrpcStatus) else Code(outcome).name
