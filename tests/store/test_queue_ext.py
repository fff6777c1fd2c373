"""Queues that Apache's broker wrote with enableConsumeQueueExt: the tags code of a unit is an address."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tests.store.kit import bodies, committed, got, open_store, put, small

from cometmq.broker.long_poll import HeldPull, LongPoll
from cometmq.protocol.properties import java_hash
from cometmq.store import GetStatus, MessageStore
from cometmq.store.consume_queue import UNIT_STRUCT
from cometmq.store.queue_ext import HEAD
from cometmq.store.verify import VerifyReport, verify

RED, BLUE = java_hash("red"), java_hash("blue")
LOWEST = -(1 << 63)
BITMAP = b"\x05" * 14
TAGS = ["red", "blue", "red", "blue", "red"]


def build(root: Path) -> list[int]:
    """A store whose first three units are addresses of ext units in two files, as Apache's broker writes
    them; returns the addresses."""
    store = open_store(root)
    for tag in TAGS:
        put(store, tag.encode(), properties=b"TAGS\x01" + tag.encode(), tags_code=java_hash(tag))
    committed(store.commit())
    records = [store.queues.get("T", 0).unit(offset) for offset in range(len(TAGS))]
    store.close()
    size = HEAD.size + len(BITMAP)
    directory = root / "consumequeue_ext" / "T" / "0"
    directory.mkdir(parents=True)
    units = [HEAD.pack(size, java_hash(tag), 1_700_000_000_000, len(BITMAP)) + BITMAP for tag in TAGS[:3]]
    (directory / f"{0:020d}").write_bytes((units[0] + units[1] + struct.pack(">h", -1)).ljust(100, b"\0"))
    (directory / f"{100:020d}").write_bytes(units[2].ljust(100, b"\0"))
    addresses = [LOWEST, LOWEST + size, LOWEST + 100]
    with (root / "consumequeue" / "T" / "0" / f"{0:020d}").open("r+b") as file:
        for record, address in zip(records, addresses, strict=False):
            assert record is not None
            file.write(UNIT_STRUCT.pack(*record[:2], address))
    return addresses


def check(root: Path) -> VerifyReport:
    return verify(str(root), config=small(root))


@pytest.mark.parametrize("careful", [False, True])
def test_a_message_whose_tag_is_not_known_passes_the_filter(tmp_path: Path, careful: bool) -> None:
    build(tmp_path)
    store = open_store(tmp_path, check_crc_on_read=careful)
    answer = store.get_messages("T", 0, 0, 32, filter={RED})
    assert (bodies(answer), got(answer).next_begin_offset) == ([b"red", b"blue", b"red", b"red"], 5)
    answer = got(store.get_messages("T", 0, 3, 32, filter={1}))
    assert (answer.status, answer.next_begin_offset) == (GetStatus.NO_MATCHED_MESSAGE, 5)
    store.close()


@pytest.mark.parametrize(
    ("code", "wakes"),
    [(RED, True), (BLUE, False), (LOWEST, True), (-(1 << 31) - 1, True), (-(1 << 31), False)],
)
def test_an_arrival_whose_tag_is_not_known_wakes_who_waits(code: int, wakes: bool) -> None:
    waiting = LongPoll()
    pull = HeldPull("owner", "request", 0, frozenset({RED}))
    waiting.park("T", 0, pull, 0, 1000)
    assert waiting.arrived("T", 0, 1, code) == ([pull] if wakes else [])


def test_verify_follows_the_address(tmp_path: Path) -> None:
    build(tmp_path)
    report = check(tmp_path)
    assert report.findings == []
    assert report.units == len(TAGS)


@pytest.mark.parametrize("damage", ["another tag", "no file", "no unit", "behind the end", "flipped"])
def test_verify_names_an_address_that_leads_nowhere_or_elsewhere(tmp_path: Path, damage: str) -> None:
    addresses = build(tmp_path)
    first = tmp_path / "consumequeue_ext" / "T" / "0" / f"{0:020d}"
    queue = tmp_path / "consumequeue" / "T" / "0" / f"{0:020d}"
    data, units = bytearray(first.read_bytes()), bytearray(queue.read_bytes())
    if damage == "another tag":
        data[2:10] = struct.pack(">q", BLUE)
    elif damage == "no file":
        (first.parent / f"{100:020d}").unlink()
    elif damage == "no unit":
        data[:2] = bytes(2)
    elif damage == "behind the end":
        units[12:20] = struct.pack(">q", addresses[2] + 1000)
    else:
        units[4 * 20 + 12] ^= 0x80  # of a hash it makes what looks like an address
    first.write_bytes(data)
    queue.write_bytes(units)
    (finding,) = check(tmp_path).findings
    assert (finding.kind, finding.severity) == ("queue-unit", "error")
    assert "tags code" in finding.problem


def test_a_broker_goes_on_behind_such_units(tmp_path: Path) -> None:
    build(tmp_path)
    store: MessageStore = open_store(tmp_path)
    put(store, b"more", properties=b"TAGS\x01blue", tags_code=BLUE)
    committed(store.commit())
    assert bodies(store.get_messages("T", 0, 0, 32)) == [*(tag.encode() for tag in TAGS), b"more"]
    store.close()
    assert check(tmp_path).findings == []
