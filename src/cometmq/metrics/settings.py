"""The metrics settings that brokers and name servers share, with the names of RocketMQ 5.x."""

from __future__ import annotations

from typing import Annotated

import msgspec

from cometmq.errors import ConfigError
from cometmq.settings import FIXED, INT_MAX, START, Range, check_host

DISABLE, PROM, OTLP_GRPC = TYPES = ("DISABLE", "PROM", "OTLP_GRPC")


class MetricsSettings(msgspec.Struct, kw_only=True, rename="camel"):
    """The metrics settings, with the defaults of RocketMQ 5.5.0 (docs/settings.md, Metrics)."""

    metrics_exporter_type: Annotated[str, FIXED] = DISABLE
    metrics_prom_exporter_port: Annotated[int, Range(0, 65_535, "a port (0: any free one)"), FIXED] = 5557
    metrics_prom_exporter_host: Annotated[str, FIXED] = ""
    metrics_otel_cardinality_limit: Annotated[int, Range(1, 10_000_000, "samples")] = 50_000
    metrics_label: str = ""
    metrics_grpc_exporter_target: Annotated[str, FIXED] = ""
    metrics_grpc_exporter_header: Annotated[str, START] = ""
    metrics_grpc_exporter_time_out_in_mills: Annotated[int, Range(1, 600_000, "milliseconds"), START] = 3_000
    metrics_grpc_exporter_interval_in_mills: Annotated[int, Range(1_000, INT_MAX, "milliseconds"), START] = (
        60_000
    )

    def check_metrics(self) -> None:
        """Check the metrics settings. Raises ConfigError for an invalid setting."""
        kind = self.metrics_exporter_type
        if kind not in TYPES:
            raise ConfigError("metricsExporterType", kind, " or ".join(TYPES))
        if self.metrics_prom_exporter_host:
            check_host("metricsPromExporterHost", self.metrics_prom_exporter_host)
        if not all(name.isascii() and name.isidentifier() for name, _ in self.metrics_labels()):
            raise ConfigError("metricsLabel", self.metrics_label, "names of letters, digits and _")
        self.metrics_headers()
        if kind == OTLP_GRPC and not self.metrics_grpc_exporter_target:
            raise ConfigError("metricsGrpcExporterTarget", "", "the collector's host:port or URL")

    def metrics_ports(self, interface: str) -> list[tuple[str, str, int]]:
        """Return the port for Prometheus, if any, as (setting, interface, port). `interface`: the default."""
        if self.metrics_exporter_type != PROM:
            return []
        host = self.metrics_prom_exporter_host or interface
        return [("metricsPromExporterPort", host, self.metrics_prom_exporter_port)]

    def metrics_labels(self) -> list[tuple[str, str]]:
        """Return the labels of every sample (`metricsLabel`). Raises ConfigError if they are invalid."""
        return _pairs("metricsLabel", self.metrics_label, self.metrics_label)

    def metrics_headers(self) -> list[tuple[str, str]]:
        """Return the headers of each push. Raises ConfigError, without them: they often contain a token."""
        return _pairs("metricsGrpcExporterHeader", self.metrics_grpc_exporter_header, "***")


def _pairs(key: str, text: str, shown: str) -> list[tuple[str, str]]:
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, value = part.partition(":")
        if not colon or not name.strip():
            raise ConfigError(key, shown, "name:value, several with , between")
        found.append((name.strip(), value.strip()))
    return found
