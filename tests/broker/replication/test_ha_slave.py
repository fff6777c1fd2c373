"""A slave's connections, reports and reasons to stop, as tables of events."""

from __future__ import annotations

import pytest

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.replication.ha_slave import (
    COMPARE_INTERVAL_S,
    RETRY_INTERVAL_S,
    Compare,
    Connect,
    Disconnect,
    HaSlave,
    MasterAddress,
    MasterLog,
    Phase,
    Report,
    Tail,
    find_divergence,
)

MASTER = MasterAddress("m:1", "m:2")
OTHER = MasterAddress("n:1", "n:2")


def following(end: int = 500) -> HaSlave:
    """Return a slave that is connected and has reported the position `end` at time 0."""
    slave = HaSlave(BrokerConfig())
    slave.follow(0.0, MASTER)
    assert slave.turn(0.0, end, end) == [Compare("m:1")]
    slave.compared(0.0, "")
    assert slave.turn(0.0, end, end) == [Connect("m:2")]
    slave.connected(0.0)
    assert slave.turn(0.0, end, end) == [Report(end)]
    return slave


def test_without_a_master_nothing_is_done():
    slave = HaSlave(BrokerConfig())
    assert (slave.turn(100.0, 0, 0), slave.phase) == ([], Phase.NO_MASTER)


def test_the_first_report_waits_until_everything_is_safe():
    slave = HaSlave(BrokerConfig())
    slave.follow(0.0, MASTER)
    slave.turn(0.0, 500, 400)
    slave.compared(0.0, "")
    slave.connected(0.0)
    assert slave.turn(0.0, 500, 400) == [Connect("m:2")]
    assert slave.turn(0.1, 500, 499) == []
    assert slave.turn(0.2, 500, 500) == [Report(500)]


def test_growth_is_reported_as_far_as_it_is_safe():
    slave = following()
    assert slave.turn(0.1, 700, 500) == []
    assert slave.turn(0.2, 700, 600) == [Report(600)]
    assert slave.turn(0.2, 700, 600) == []


def test_an_idle_slave_reports_all_the_same():
    slave = following()
    assert slave.turn(4.9, 500, 500) == []
    assert slave.turn(5.0, 500, 500) == [Report(500)]


def test_a_silent_master_is_left():
    slave = following()
    slave.received(3.0, 500)
    assert slave.turn(22.9, 500, 500) == [Report(500)]
    (effect,) = slave.turn(23.0, 500, 500)
    assert isinstance(effect, Disconnect)
    assert (slave.phase, slave.problem) == (Phase.PAUSING, "the master was silent for 20 s")


@pytest.mark.parametrize("way", ["compare", "connect", "later"])
def test_what_fails_is_tried_again_after_a_pause(way):
    slave = following()
    slave.lost(1.0, "gone")
    if way != "later":
        assert slave.turn(1.0 + RETRY_INTERVAL_S, 500, 500) == [Compare("m:1")]
        if way == "connect":
            slave.compared(2.0, "")
            assert slave.turn(2.0, 500, 500) == [Connect("m:2")]
        slave.lost(2.0, "still gone")
    begun = 1.0 if way == "later" else 2.0
    assert slave.turn(begun + RETRY_INTERVAL_S - 0.1, 500, 500) == []
    assert slave.turn(begun + RETRY_INTERVAL_S, 500, 500) == [Compare("m:1")]
    assert slave.problem == ("gone" if way == "later" else "still gone")


def test_a_contradiction_stops_it_until_one_of_the_logs_has_changed():
    slave = following()
    slave.lost(1.0, "gone")
    slave.turn(6.0, 500, 500)
    slave.compared(6.0, "they differ")
    assert (slave.phase, slave.problem) == (Phase.STOPPED, "they differ")
    assert slave.turn(6.0 + COMPARE_INTERVAL_S - 0.1, 500, 500) == []
    assert slave.turn(6.0 + COMPARE_INTERVAL_S, 500, 500) == [Compare("m:1")]
    slave.compared(36.0, "")
    assert slave.turn(36.0, 500, 500) == [Connect("m:2")]


def test_a_master_with_another_log_is_left_while_it_is_followed():
    slave = following()
    slave.report_divergence(10, "the slave's log ends at 500, ahead of the master's, which ends at 0")
    assert [type(effect) for effect in slave.turn(10, 500, 500)] == [Disconnect]
    assert slave.phase is Phase.STOPPED
    assert "500" in slave.problem
    assert slave.turn(10 + COMPARE_INTERVAL_S, 500, 500) == [Compare("m:1")]
    slave.report_divergence(41, "another look")  # a check is already running
    assert slave.phase is Phase.COMPARING


def test_another_master_is_followed_at_once():
    slave = following()
    slave.follow(1.0, MASTER)
    assert slave.turn(1.0, 500, 500) == []
    slave.follow(3.0, OTHER)
    disconnect, compare = slave.turn(3.0, 500, 500)
    assert isinstance(disconnect, Disconnect)
    assert compare == Compare("n:1")


def test_answers_that_come_too_late_are_ignored():
    slave = following()
    slave.compared(0.0, "they differ")
    slave.connected(0.0)
    assert slave.phase is Phase.FOLLOWING
    slave.lost(1.0, "gone")
    slave.lost(2.0, "gone again")
    slave.compared(3.0, "")
    assert (slave.phase, slave.problem) == (Phase.PAUSING, "gone")


@pytest.mark.parametrize(
    ("own", "master", "words"),
    [
        (Tail(500, 400, b"x"), MasterLog(0, 500, b"x"), ""),
        (Tail(500, 400, b"x"), MasterLog(0, 900, b"x"), ""),
        (Tail(500, 400, b"x"), MasterLog(450, 900, None), ""),  # the master has deleted this part
        (Tail(500, -1, None), MasterLog(0, 900, None), ""),
        (Tail(500, 400, b"x"), MasterLog(0, 499, b"x"), "ahead of the master's, which ends at 499"),
        (Tail(500, 400, b"x"), MasterLog(501, 900, None), "ends at 500, and the master's begins at 501"),
        (Tail(500, 400, b"x"), MasterLog(0, 900, b"y"), "at 400 is not the master's; the slave's"),
        (Tail(500, 400, b"x"), MasterLog(0, 900, None), "at 400, where the master has none"),
    ],
)  # fmt: skip
def test_logs_that_contradict_each_other_are_named_with_both_positions(own, master, words):
    found = find_divergence(own, master)
    assert words in found
    assert bool(found) == bool(words)


def test_what_a_former_connection_said_of_the_masters_end_is_forgotten():
    slave = following()
    slave.received(1.0, 1 << 62)
    slave.lost(1.0, "gone")
    slave.turn(1.0 + RETRY_INTERVAL_S, 500, 500)
    slave.compared(6.0, "")
    slave.connected(6.0)
    assert slave.master_end == -1
    slave.received(6.0, 600)
    assert slave.master_end == 600
