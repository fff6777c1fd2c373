"""The push of metrics to an OpenTelemetry collector by OTLP over gRPC, once per minute by default."""

from __future__ import annotations

import threading
import time

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from cometmq import logs
from cometmq.metrics.families import Families, Family, Source
from cometmq.metrics.settings import MetricsSettings

log = logs.logger(__name__)

SCHEMA = ""


class OtlpPush:
    """A thread that pushes samples until `stop`. It logs when the collector fails and responds again."""

    def __init__(self, settings: MetricsSettings, source: Source) -> None:
        target = settings.metrics_grpc_exporter_target
        timeout_s = settings.metrics_grpc_exporter_time_out_in_mills / 1000
        self._exporter = OTLPMetricExporter(
            endpoint=target,
            insecure=not target.startswith("https://"),
            headers=tuple(settings.metrics_headers()),
            timeout=timeout_s,
        )
        self._target = target
        self._source = source
        self._interval_s = settings.metrics_grpc_exporter_interval_in_mills / 1000
        self._resource = Resource.create({"service.name": "cometmq"})
        self._began_ns = time.time_ns()
        self._failed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics push", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        self._exporter.shutdown(timeout_millis=1000)
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                done = self._exporter.export(self._data(self._source.families()))
                failed = done is not MetricExportResult.SUCCESS
            except TimeoutError:
                failed = True
            except Exception:  # continue after any failure, because the next push may succeed
                failed = True
                if not self._failed and not self._stopping.is_set():
                    log.exception("could not push the metrics")
            if failed != self._failed and not self._stopping.is_set():
                self._failed = failed
                what = "collector %s accepts no metrics" if failed else "collector %s accepts metrics again"
                log.warning(what, self._target)

    def _data(self, families: Families) -> sdk.MetricsData:
        now = time.time_ns()
        metrics = [self._metric(family, now) for family in families.table.values()]
        scope = sdk.ScopeMetrics(InstrumentationScope("cometmq"), metrics, SCHEMA)
        return sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scope], SCHEMA)])

    def _metric(self, family: Family, now: int) -> sdk.Metric:
        points = [
            sdk.NumberDataPoint(dict(zip(family.labels, values, strict=True)), self._began_ns, now, number)
            for values, number in family.samples
        ]
        if family.kind == "gauge":
            return sdk.Metric(family.name, family.words, family.unit, sdk.Gauge(points))
        grows = sdk.Sum(points, sdk.AggregationTemporality.CUMULATIVE, is_monotonic=True)
        return sdk.Metric(f"{family.name}_total", family.words, "", grows)
