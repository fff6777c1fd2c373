"""The bytes of the HA port (docs/reference/storage.md, HA port)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.broker.replication.ha_frames import Pieces, Reports, beat, cut
from cometmq.errors import ProtocolError


def test_frames_are_position_size_and_bytes():
    assert b"".join(cut(5, memoryview(b"abcde"), 3)).hex() == (
        "000000000000000500000003616263" + "0000000000000008000000026465"
    )
    assert beat(7).hex() == "000000000000000700000000"


@given(st.binary(max_size=60), st.integers(1, 20), st.lists(st.integers(1, 9), min_size=1))
def test_pieces_come_back_however_they_are_cut(data, most, sizes):
    sent = b"".join([*cut(100, memoryview(data), most), beat(100 + len(data))])
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
