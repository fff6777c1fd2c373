"""Metrics of a running server: families of samples, a port for Prometheus, and a push by OTLP."""

from cometmq.metrics.exporter import MetricsExporter
from cometmq.metrics.families import Families, Family
from cometmq.metrics.settings import MetricsSettings

__all__ = ["Families", "Family", "MetricsExporter", "MetricsSettings"]
