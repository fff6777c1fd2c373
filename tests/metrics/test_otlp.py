"""OTLP push to a test collector that uses gRPC."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as messages
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as service

from cometmq.metrics import Families, MetricsExporter, MetricsSettings

Pushed = tuple[messages.ExportMetricsServiceRequest, dict[str, str]]


class Collector(service.MetricsServiceServicer):
    """A collector that stores the pushed data and headers."""

    def __init__(self) -> None:
        self.pushed: queue.Queue[Pushed] = queue.Queue()

    def Export(  # noqa: N802
        self, request: messages.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> messages.ExportMetricsServiceResponse:
        self.pushed.put((request, {key: str(value) for key, value in context.invocation_metadata()}))
        return messages.ExportMetricsServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, int]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    kept = Collector()
    service.add_MetricsServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, port
    server.stop(None).wait()


async def test_numbers_are_pushed_with_headers_and_labels(collector: tuple[Collector, int]) -> None:
    async def collect(families: Families) -> None:
        families.gauge("room_temperature", "Degrees.", 21.5, unit="celsius", room="kitchen")
        families.counter("doors_opened", "Times.", 3)

    kept, port = collector
    settings = MetricsSettings(
        metrics_exporter_type="OTLP_GRPC",
        metrics_grpc_exporter_target=f"127.0.0.1:{port}",
        metrics_grpc_exporter_header="token:secret",
        metrics_grpc_exporter_interval_in_mills=50,
        metrics_label="site:lab",
    )
    one = MetricsExporter(settings, "", collect, str)
    await one.start()
    try:
        request, headers = await asyncio.to_thread(kept.pushed.get, timeout=30)
    finally:
        await one.stop()
    assert headers["token"] == "secret"
    degrees, doors = request.resource_metrics[0].scope_metrics[0].metrics
    point = degrees.gauge.data_points[0]
    assert (degrees.name, degrees.unit, point.as_double) == ("room_temperature", "celsius", 21.5)
    labels = {each.key: each.value.string_value for each in point.attributes}
    assert labels == {"site": "lab", "room": "kitchen"}
    assert (doors.name, doors.sum.data_points[0].as_double) == ("doors_opened_total", 3)
    assert doors.sum.is_monotonic


async def test_a_collector_that_is_away_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    looks: asyncio.Queue[int] = asyncio.Queue()

    async def collect(families: Families) -> None:
        families.gauge("room_temperature", "Degrees.", 21.5)
        looks.put_nowait(1)

    settings = MetricsSettings(
        metrics_exporter_type="OTLP_GRPC",
        metrics_grpc_exporter_target="127.0.0.1:1",
        metrics_grpc_exporter_interval_in_mills=50,
        metrics_grpc_exporter_time_out_in_mills=100,
    )
    one = MetricsExporter(settings, "", collect, str)
    await one.start()
    try:
        async with asyncio.timeout(60):
            for _ in range(3):
                await looks.get()
    finally:
        await one.stop()
    said = [record.message for record in caplog.records if record.name.startswith("cometmq")]
    assert said == ["collector 127.0.0.1:1 accepts no metrics"]


async def test_numbers_that_fail_once_are_pushed_again(
    collector: tuple[Collector, int], caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0

    async def collect(families: Families) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise LookupError("a queue went away meanwhile")
        families.gauge("room_temperature", "Degrees.", 21.5)

    kept, port = collector
    settings = MetricsSettings(
        metrics_exporter_type="OTLP_GRPC",
        metrics_grpc_exporter_target=f"127.0.0.1:{port}",
        metrics_grpc_exporter_interval_in_mills=50,
    )
    one = MetricsExporter(settings, "", collect, str)
    await one.start()
    try:
        await asyncio.to_thread(kept.pushed.get, timeout=30)
    finally:
        await one.stop()
    assert "a queue went away" in caplog.text
