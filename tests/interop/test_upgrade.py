"""Migration of Apache's cluster to ours and back, broker by broker, under load.

See docs/replication.md, From Apache's cluster and back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.interop import store_input, wire
from tests.interop.driver import Driver
from tests.interop.mixed_load import MixedLoad
from tests.interop.our_driver import OurDriver
from tests.interop.processes import side_by_side
from tests.interop.replicas import OURS, Replicas, same
from tests.long_form import long_form

TOPIC = "Mixed"
SETTINGS = {
    "mappedFileSizeCommitLog": str(1 << 20),
    "maxMessageSize": str(512 * 1024),
    "slaveReadEnable": "true",
    "transactionCheckInterval": "3000",
    "transactionTimeOut": "1000",
}


@long_form("two minutes: eight brokers are replaced, and Apache's take ten seconds to stop")
@pytest.mark.parametrize("apache", ["4.9.7", "5.5.0"])
def test_a_cluster_of_apaches_becomes_ours_and_goes_back(
    names: str, tmp_path: Path, java_clients: Callable[[str], Driver], apache: str
) -> None:
    makes = {"master": apache, "slave": apache}
    pairs = [
        Replicas(tmp_path / name, names, name, dict(makes), settings=SETTINGS)
        for name in ("broker-a", "broker-b")
    ]
    ours = OurDriver()
    try:
        side_by_side(begin, [(pair,) for pair in pairs])
        load = MixedLoad([java_clients("4.9.8"), ours], names, TOPIC)
        with load.running():
            for make in (OURS, apache):
                for role in ("slave", "master"):
                    for pair in pairs:
                        # The slaves of one pair are killed, and all other brokers are stopped cleanly.
                        pair.replace(role, make, kill=role == "slave" and pair is pairs[0])
                        pair.under_way()
        report = load.report()
        print(f"{report}, refused {load.refused}, longest {load.longest_s}")
        assert report.sent > 4_000
        assert load.transactions > 200
        assert report.duplicates < report.delivered / 50  # the consumers continue at their stored offsets
        for pair in pairs:
            pair.equal()
            same(pair, [(TOPIC, queue) for queue in range(4)])
    finally:
        ours.stop()
        for pair in pairs:
            pair.kill()


def begin(pair: Replicas) -> None:
    pair.start("master")
    with wire.Connection(pair.port("master")) as connection:
        store_input.Feeder(connection).update_topic(TOPIC, 4)
    pair.start("slave")
    pair.in_step()
