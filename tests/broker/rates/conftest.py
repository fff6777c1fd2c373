"""Shared helpers of the tests of rate limits."""

from __future__ import annotations

from tests.kit.brokers import Cluster, Peer

from cometmq.broker.base.times import awake_ms
from cometmq.broker.server import Broker
from cometmq.store import ManualClock


def stopped_clock(running: Broker | Cluster) -> ManualClock:
    """Replace the clock of a broker's limits by a clock that only the test advances."""
    clock = ManualClock()
    broker = running if isinstance(running, Broker) else running.broker
    broker.parts.rates.now_ms = lambda: awake_ms(clock)
    return clock


async def limit_group(peer: Peer, group: str = "G", **rates: int) -> None:
    """Set the limits of a group: `messages`, `bytes`."""
    attributes = ",".join(f'"rate.receive.{unit}":"{rate}"' for unit, rate in rates.items())
    settings = f'{{"groupName":"{group}","attributes":{{{attributes}}}}}'
    answer = await peer.set_group(settings.encode())
    assert answer.code == 0, answer.remark
