"""Transfers, accepted reports and waits of a master, as tables of events (docs/reference/storage.md)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.replication.ha_master import (
    HEADER,
    NOWHERE,
    SEND_BYTES,
    Beat,
    Close,
    HaMaster,
    LogState,
    Reports,
    Send,
    cut,
)
from cometmq.broker.replication.ha_slave import Pieces
from cometmq.errors import ProtocolError
from cometmq.store import StoreConfig

SEGMENT = 1000
LOG = LogState(first=0, sendable=2500, end=2500, segment_size=SEGMENT, readable=0)


def made_for(role: str = "ASYNC_MASTER", **settings: object) -> HaMaster:
    return HaMaster(BrokerConfig(store=StoreConfig(broker_role=role), **settings))  # type: ignore[arg-type]


def master(*slaves: tuple[str, int], log: LogState = LOG, **settings: object) -> HaMaster:
    """Return a master whose slaves, by address, reported a position each and have received all data since."""
    made = made_for("SYNC_MASTER", **settings)
    for number, (host, position) in enumerate(slaves, 1):
        made.opened(0.0, number, host)
        made.reported(0.0, number, position)
    while any(isinstance(effect, Send) for effect in made.turn(0.0, log)):
        for number in made.slaves:
            made.taken(0.0, number)
    return made


def test_nothing_is_sent_before_the_first_report():
    ha = made_for()
    ha.opened(0.0, 1, "a")
    assert ha.turn(0.0, LOG) == []
    assert ha.turn(19.0, LOG) == []
    assert [type(effect) for effect in ha.turn(20.0, LOG)] == [Close]


@pytest.mark.parametrize(
    ("reported", "first", "expected"),
    [
        (0, 0, Send(1, 0, 1000)),  # the whole log, not only the last segment
        (0, 1000, Send(1, 1000, 1000)),
        (1, 0, Send(1, 1, 999)),
        (1999, 0, Send(1, 1999, 1)),
        (2000, 0, Send(1, 2000, 500)),
        (2500, 0, None),
        (1000, 1000, Send(1, 1000, 1000)),
    ],
)
def test_the_first_report_says_where_to_begin(reported, first, expected):
    ha = made_for()
    ha.opened(0.0, 1, "a")
    ha.reported(0.0, 1, reported)
    assert ha.turn(0.0, LOG._replace(first=first, readable=first)) == ([expected] if expected else [])


@pytest.mark.parametrize(("reported", "position"), [(1, 1), (0, 1000)])
def test_a_slave_that_has_older_records_continues_with_those_in_the_object_store(reported, position):
    ha = made_for()
    ha.opened(0.0, 1, "a")
    ha.reported(0.0, 1, reported)
    (effect,) = ha.turn(0.0, LOG._replace(first=1000))
    assert isinstance(effect, Send)
    assert effect.position == position


@pytest.mark.parametrize(
    ("reported", "first", "words"),
    [
        (2501, 0, "ends at 2501, ahead of this master's, which ends at 2500"),
        (999, 1000, "ends at 999, and this master's begins at 1000"),
        (-1, 0, "no position"),
    ],
)
def test_a_first_report_that_cannot_be_served_ends_the_connection(reported, first, words):
    ha = made_for("SYNC_MASTER")
    ha.opened(0.0, 1, "a")
    ha.reported(0.0, 1, reported)
    (effect,) = ha.turn(0.0, LOG._replace(first=first, readable=first))
    assert isinstance(effect, Close)
    assert words in effect.reason
    assert (ha.copies(1), ha.needed(2500)) == (0, None)


@pytest.mark.parametrize(
    ("reported", "words"), [(2501, "was sent the log up to 2500"), (1499, "had 1500 already")]
)
def test_a_later_report_that_cannot_be_true_ends_the_connection(reported, words):
    ha = master(("a", 1500))
    ha.reported(1.0, 1, reported)
    (effect,) = ha.turn(1.0, LOG)
    assert isinstance(effect, Close)
    assert words in effect.reason


def test_a_slave_is_sent_one_piece_after_the_other():
    log = LogState(0, 3 * SEND_BYTES, 3 * SEND_BYTES, 1 << 30, 0)
    ha = made_for()
    ha.opened(0.0, 1, "a")
    ha.reported(0.0, 1, 0)
    assert ha.turn(0.0, log) == [Send(1, 0, SEND_BYTES)]
    assert ha.turn(0.0, log) == []
    ha.taken(0.0, 1)
    assert ha.turn(0.0, log) == [Send(1, SEND_BYTES, SEND_BYTES)]


def test_what_is_not_on_the_device_is_not_sent():
    ha = made_for()
    ha.opened(0.0, 1, "a")
    ha.reported(0.0, 1, 2100)
    assert ha.turn(0.0, LOG._replace(sendable=2100)) == []
    assert ha.turn(0.0, LOG._replace(sendable=2200)) == [Send(1, 2100, 100)]


def test_an_idle_connection_gets_heart_beats():
    ha = master(("a", 2500))
    assert ha.turn(4.9, LOG) == []
    assert ha.turn(5.0, LOG) == [Beat(1, 2500)]
    assert ha.turn(9.9, LOG) == []
    ha.reported(9.9, 1, 2500)
    assert ha.turn(10.0, LOG) == [Beat(1, 2500)]


@pytest.mark.parametrize(
    ("slaves", "rules", "end", "expected"),
    [
        ([], {}, 2500, None),
        ([("a", 2500)], {}, 2500, 1),
        ([("a", 2500)], {"in_sync_replicas": 2}, 2500, 1),
        ([("a", 2500)], {"in_sync_replicas": 3}, 2500, None),
        ([("a", 2500), ("b", 2500)], {"in_sync_replicas": 3}, 2500, 2),
        ([("a", 2500)], {"ha_slave_fallbehind_max": 100}, 2599, 1),
        ([("a", 2500)], {"ha_slave_fallbehind_max": 100}, 2600, None),
        ([("a", 2500), ("b", 2000)], {"ha_slave_fallbehind_max": 100}, 2550, 1),
        ([], {"enable_auto_in_sync_replicas": True}, 2500, 0),
        ([], {"enable_auto_in_sync_replicas": True, "min_in_sync_replicas": 2}, 2500, None),
        ([("a", 2500)], {"enable_auto_in_sync_replicas": True, "in_sync_replicas": 3}, 2500, 1),
        (
            [("a", 2500), ("b", 2500), ("c", 2500)],
            {"enable_auto_in_sync_replicas": True, "in_sync_replicas": 3},
            2500,
            2,
        ),
    ],
)
def test_a_write_waits_for_so_many_slaves(slaves, rules, end, expected):
    assert master(*slaves, **rules).needed(end) == expected


def test_an_async_master_waits_for_nobody():
    assert made_for(in_sync_replicas=3).needed(100) == 0


@pytest.mark.parametrize(
    ("slaves", "acks", "position", "expected"),
    [
        ([("a", 1500)], {}, 1500, 1),
        ([("a", 1500)], {}, 1501, 0),
        ([("a", 1500)], {1: 1700}, 1700, 1),
        ([("a", 1500)], {1: 1700}, 1701, 0),
        ([("a", 1500), ("b", 1500)], {1: 2000}, 2000, 1),
        ([("a", 1500), ("b", 1500)], {1: 2000, 2: 2500}, 2000, 2),
        ([("a", 1500), ("a", 1500)], {1: 2000, 2: 2000}, 2000, 2),  # two slaves on one machine
        ([("a", 1500), ("a", 2000)], {1: 2000}, 2000, 1),  # a slave that has reconnected
        ([("a", 1500), ("b", 2000)], {1: 2000}, 2000, 2),
    ],
)
def test_copies_are_counted_once_for_each_slave(slaves, acks, position, expected):
    ha = master(*slaves)
    for number, ack in acks.items():
        ha.reported(1.0, number, ack)
    assert ha.turn(1.0, LOG) == []
    assert ha.copies(position) == expected


def test_what_the_slowest_slave_has_not_said_to_have_is_wanted():
    ha = master(("a", 2500), ("b", 0))
    ha.opened(0.0, 3, "c")
    assert ha.first_needed_position == 0
    ha.reported(0.0, 2, 1200)
    ha.turn(0.0, LOG)
    assert ha.first_needed_position == 1200
    for number in (1, 2):
        ha.closed(number)
    assert ha.first_needed_position == NOWHERE


def test_a_slave_that_is_gone_counts_no_more():
    ha = master(("a", 2500))
    ha.closed(1)
    assert (ha.copies(2500), ha.needed(2500), ha.turn(1.0, LOG)) == (0, None, [])


def test_events_of_connections_that_are_gone_are_ignored():
    ha = made_for()
    ha.reported(0.0, 7, 5)
    ha.taken(0.0, 7)
    ha.closed(7)
    assert ha.turn(0.0, LOG) == []


# -- The bytes of the HA port (docs/reference/storage.md, HA port)


def test_frames_are_position_size_and_bytes():
    assert b"".join(cut(5, memoryview(b"abcde"), 3)).hex() == (
        "000000000000000500000003616263" + "0000000000000008000000026465"
    )
    assert HEADER.pack(7, 0).hex() == "000000000000000700000000"


@given(st.binary(max_size=60), st.integers(1, 20), st.lists(st.integers(1, 9), min_size=1))
def test_pieces_come_back_however_they_are_cut(data, most, sizes):
    sent = b"".join([*cut(100, memoryview(data), most), HEADER.pack(100 + len(data), 0)])
    pieces, found, at = Pieces(), [], 0
    for turn in range(len(sent) + 1):
        size = sizes[turn % len(sizes)]
        found += [(at_, bytes(piece)) for at_, piece in pieces.feed(memoryview(sent)[at : at + size])]
        at += size
    assert b"".join(piece for _, piece in found) == data
    position = 100
    for where, piece in found:
        assert where == position
        position += len(piece)
    assert found[-1] == (100 + len(data), b"")


@pytest.mark.parametrize("header", ["ffffffffffffffff00000001", "0000000000000001ffffffff"])
def test_positions_and_sizes_that_are_none_are_refused(header):
    with pytest.raises(ProtocolError):
        list(Pieces().feed(memoryview(bytes.fromhex(header))))


def test_the_last_whole_report_counts():
    reports = Reports()
    three = b"".join(number.to_bytes(8, "big") for number in (1, 2, 3))
    assert reports.feed(three[:5]) is None
    assert reports.feed(three[5:17]) == 2
    assert reports.feed(three[17:]) == 3
    assert reports.feed(b"") is None
