"""The metrics of a name server (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cometmq.metrics import Families
from cometmq.namesrv.tables import RouteTables


@dataclass(frozen=True, kw_only=True)
class NamesrvMetrics:
    """Collects metrics from the tables.

    Attributes:
        now_ms: The clock that decides when brokers expire, in ms.
        connections: Returns the number of open connections.
    """

    tables: RouteTables
    now_ms: Callable[[], int]
    connections: Callable[[], int]

    def why_not_ready(self) -> str:
        """Return "": a listening name server is ready, whether brokers have registered or not."""
        return ""

    async def collect(self, families: Families) -> None:
        """Add all metrics to `families`."""
        live, now = self.tables.live(), self.now_ms()
        for name, words, value in (
            ("brokers", "Brokers that are registered.", len(live)),
            ("topics", "Topics with a route.", self.tables.topic_count),
            ("connections", "Connections.", self.connections()),
        ):
            families.gauge(f"cometmq_namesrv_{name}", words, value)
        for addr, seen_ms in sorted(live.items()):
            families.gauge(
                "cometmq_namesrv_broker_silent_seconds", "Since a broker registered last.",
                (now - seen_ms) / 1000, broker=addr,
            )  # fmt: skip
