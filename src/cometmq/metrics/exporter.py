"""The export of a server's metrics: none, a port that Prometheus scrapes, or a push to an OTLP collector.

The event loop owns the server's state. The threads of the port and of the push request the samples from the
loop and encode the samples themselves.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from cometmq import logs
from cometmq.errors import ConfigError
from cometmq.metrics.families import Families
from cometmq.metrics.settings import DISABLE, PROM, MetricsSettings

if TYPE_CHECKING:
    from cometmq.metrics.otlp import OtlpPush
    from cometmq.metrics.port import MetricsPort

log = logs.logger(__name__)

T = TypeVar("T")
COLLECT_TIMEOUT_S = 10.0
"""Maximum time, in seconds, that the event loop may take to collect the samples."""


class MetricsExporter:
    """The metrics of one server. It is created and started inside the server's loop."""

    def __init__(
        self,
        settings: MetricsSettings,
        interface: str,
        collect: Callable[[Families], Awaitable[None]],
        why_not_ready: Callable[[], str],
    ) -> None:
        """Create an exporter of what `collect` adds. `interface` is used if the settings name none.

        `why_not_ready` returns the reason why the server is not ready, or "".
        """
        self._settings = settings
        self._interface = settings.metrics_prom_exporter_host or interface
        self._collect = collect
        self._why_not_ready = why_not_ready
        self._loop = asyncio.get_running_loop()
        self._asking = threading.Lock()  # ensures that only one collection runs at a time
        self._cut_told = False
        self._running: MetricsPort | OtlpPush | None = None
        self.port: int | None = None
        """The port that Prometheus scrapes, or None if there is no open port."""

    async def start(self) -> None:
        """Open the port for Prometheus or start the push to a collector, if the settings require one.

        Raises ConfigError, also if a required package is missing.
        """
        settings = self._settings
        if settings.metrics_exporter_type == DISABLE:
            return
        try:
            if settings.metrics_exporter_type == PROM:
                from cometmq.metrics.port import MetricsPort

                number = settings.metrics_prom_exporter_port
                self._running = running = MetricsPort(self._interface, number, self)
                self.port = running.port
            else:
                from cometmq.metrics.otlp import OtlpPush

                self._running = OtlpPush(settings, self)
        except ImportError as error:
            expected = f"DISABLE, or pip install 'cometmq[metrics]' ({error})"
            raise ConfigError("metricsExporterType", settings.metrics_exporter_type, expected) from error

    async def stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await asyncio.to_thread(running.stop)

    def families(self) -> Families:
        """Collect the samples. Threads call this. Raises TimeoutError if the event loop is too busy."""
        with self._asking:
            return self._ask(self._families())

    def why_not_ready(self) -> str:
        """Return why the server is not ready, or "". Threads call this. Raises TimeoutError."""

        async def ask() -> str:
            return self._why_not_ready()

        return self._ask(ask())

    async def _families(self) -> Families:
        most = self._settings.metrics_otel_cardinality_limit
        found = Families(most, self._settings.metrics_labels())
        await self._collect(found)
        if found.cut and not self._cut_told:
            log.warning(
                "the metrics are incomplete: they have more than %d samples (metricsOtelCardinalityLimit)",
                most,
            )
        self._cut_told = found.cut
        return found

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        try:
            asked = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError as error:  # the event loop is closed
            question.close()
            raise TimeoutError from error
        try:
            return asked.result(COLLECT_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            asked.cancel()
            raise TimeoutError from None
