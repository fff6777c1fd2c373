"""Topics with known messages in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from cometmq.message import MessageQueue
from cometmq.pipeline.cluster import Cluster
from cometmq.pipeline.options import Topics, write_options
from cometmq.pipeline.plan import Bounds
from cometmq.pipeline.rows import Outgoing
from cometmq.pipeline.sending import Sender


@dataclass
class Topic:
    """A topic of one test and what was sent to it."""

    name: str
    namesrv: str
    sent: list[str] = field(default_factory=list)

    def send(self, count: int, *, tags: Sequence[str] = ("A", "B", "C"), body_size: int = 0) -> list[str]:
        """Send `count` messages with the next numbers as keys; their bodies."""
        first = len(self.sent)
        bodies = [f"{number}:".ljust(body_size, "x") for number in range(first, first + count)]
        options = write_options({"namesrv": self.namesrv, "topic": self.name, "batchRecords": "16"})
        with Sender(options) as sender:
            for number, body in enumerate(bodies, first):
                properties = (
                    f"UNIQ_KEY\x01{number:032X}\x02KEYS\x01k{number}\x02TAGS\x01{tags[number % len(tags)]}"
                    f"\x02parity\x01{number % 2}"
                )
                sender.send(Outgoing(self.name, body.encode(), properties.encode(), number % 7, 0, None))
            sender.flush()
        self.sent += bodies
        return bodies

    def bounds(self) -> dict[MessageQueue, Bounds]:
        with Cluster((self.namesrv,), timeout_ms=10_000) as cluster:
            return cluster.bounds(cluster.queues(Topics(names=(self.name,))))

    @property
    def options(self) -> dict[str, str]:
        return {"namesrv": self.namesrv, "subscribe": self.name}


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)
