"""The metrics of the endpoint for 5.x clients (docs/metrics.md)."""

from __future__ import annotations

from collections import Counter

from cometmq.broker.base.config import BrokerConfig
from cometmq.grpc.listener.server import GrpcServer
from cometmq.grpc.rpc.enums import Code
from cometmq.grpc.rpc.status import GrpcStatus
from cometmq.grpc.service.clients import Clients
from cometmq.grpc.service.traces import Traces
from cometmq.metrics import Families


def collect(
    families: Families, config: BrokerConfig, server: GrpcServer, clients: Clients, traces: Traces
) -> None:
    """Add the metrics of an endpoint to `families`."""
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
