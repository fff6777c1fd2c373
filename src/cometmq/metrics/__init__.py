"""Numbers of a running server for monitoring: families of samples, a port for Prometheus, a push by OTLP."""

from cometmq.metrics.exporter import MetricsExporter
from cometmq.metrics.families import Families, Family
from cometmq.metrics.settings import METRICS_RANGES, MetricsSettings

__all__ = ["METRICS_RANGES", "Families", "Family", "MetricsExporter", "MetricsSettings"]
