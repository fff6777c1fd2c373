"""Queues that Apache's broker wrote with enableConsumeQueueExt: a unit's tags code is an address."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.inspect.verifying import check
from tests.store.kit import (
    START_MS,
    bodies,
    check_sound,
    delete_topic,
    drop_first_segment,
    everything,
    open_store,
    run_retention,
    send,
)
from tests.store.planted import alter

from cometmq.broker.pull.long_poll import LongPoll, ParkedPull
from cometmq.protocol.properties.values import java_hash
from cometmq.store import GetStatus, MessageStore
from cometmq.store.base.disk import Disk
from cometmq.store.derived.queue_ext import HEAD, ExtFiles
from cometmq.store.inspect.stats import store_stats
from cometmq.store.inspect.verify import verify

RED, BLUE = java_hash("red"), java_hash("blue")
LOWEST = -(1 << 63)
BITMAP = b"\x05" * 14
TAGS = ["red", "blue", "red", "blue", "red"]


def refer(root: Path, number: int, address: int, per_file: int = 100) -> None:
    """Set the tags code of a unit to an address."""
    path = root / "consumequeue" / "T" / "0" / f"{number // per_file * per_file * 20:020d}"
    alter(path, number % per_file * 20 + 12, struct.pack(">q", address))


def build(root: Path) -> None:
    """Build a store whose first three units contain addresses of ext units in two files, as Apache's."""
    store = open_store(root)
    for tag in TAGS:
        send(store, tag.encode(), properties=b"TAGS\x01" + tag.encode(), tags_code=java_hash(tag))
    store.close()
    size = HEAD.size + len(BITMAP)
    directory = root / "consumequeue_ext" / "T" / "0"
    directory.mkdir(parents=True)
    units = [HEAD.pack(size, java_hash(tag), 1_700_000_000_000, len(BITMAP)) + BITMAP for tag in TAGS[:3]]
    (directory / f"{0:020d}").write_bytes((units[0] + units[1] + struct.pack(">h", -1)).ljust(100, b"\0"))
    (directory / f"{100:020d}").write_bytes(units[2].ljust(100, b"\0"))
    for number, place in enumerate((0, size, 100)):
        refer(root, number, LOWEST + place)


@pytest.mark.parametrize("careful", [False, True])
def test_a_message_whose_tag_is_not_known_passes_the_filter(tmp_path: Path, careful: bool) -> None:
    build(tmp_path)
    store = open_store(tmp_path, check_crc_on_read=careful)
    answer = store.get_messages("T", 0, 0, 32, filter={RED})
    assert (bodies(answer), answer.next_begin_offset) == ([b"red", b"blue", b"red", b"red"], 5)
    answer = store.get_messages("T", 0, 3, 32, filter={1})
    assert (answer.status, answer.next_begin_offset) == (GetStatus.NO_MATCHED_MESSAGE, 5)


@pytest.mark.parametrize(
    ("code", "wakes"),
    [(RED, True), (BLUE, False), (LOWEST, True), (-(1 << 31) - 1, True), (-(1 << 31), False)],
)
def test_an_arrival_whose_tag_is_not_known_wakes_who_waits(code: int, wakes: bool) -> None:
    waiting = LongPoll()
    pull = ParkedPull("owner", "request", 0, frozenset({RED}))
    waiting.park("T", 0, pull, 0, 1000)
    assert waiting.arrived("T", 0, 1, code) == ([pull] if wakes else [])


def test_verify_follows_the_address(tmp_path: Path) -> None:
    build(tmp_path)
    report = check(tmp_path)
    assert (report.findings, report.units) == ([], len(TAGS))


# Damages: the file (the first ext file or the queue file), the byte in it, and the new content.
MISLEADING: dict[str, tuple[str, int, bytes]] = {
    "another tag": ("consumequeue_ext", 2, struct.pack(">q", BLUE)),
    "no unit": ("consumequeue_ext", 0, bytes(2)),
    "behind the end": ("consumequeue", 12, struct.pack(">q", LOWEST + 100 + 1000)),
    "flipped": ("consumequeue", 4 * 20 + 12, b"\x80"),  # makes a hash look like an address
    "no file": ("", 0, b""),
}


@pytest.mark.parametrize("damage", MISLEADING)
def test_verify_names_an_address_that_leads_nowhere_or_elsewhere(tmp_path: Path, damage: str) -> None:
    build(tmp_path)
    directory, at, data = MISLEADING[damage]
    if directory:
        alter(tmp_path / directory / "T" / "0" / f"{0:020d}", at, data)
    else:
        (tmp_path / "consumequeue_ext" / "T" / "0" / f"{100:020d}").unlink()
    (finding,) = check(tmp_path).findings
    assert (finding.kind, finding.severity) == ("queue-unit", "error")
    assert "tags code" in finding.problem


def test_a_broker_goes_on_behind_such_units(tmp_path: Path) -> None:
    build(tmp_path)
    store = open_store(tmp_path)
    send(store, b"more", properties=b"TAGS\x01blue", tags_code=BLUE)
    assert bodies(store.get_messages("T", 0, 0, 32)) == [*(tag.encode() for tag in TAGS), b"more"]
    check_sound(store)


EXT_SIZE = 100
PER_FILE = 4  # ext units of 20 bytes each


def long(root: Path) -> list[int]:
    """Build a store like Apache's with 40 messages, eight per segment; return the addresses of the ext units.

    All messages but the last eight have ext units, in ten files.
    """
    store = reopen(root)
    for number in range(40):
        send(store, b"%02d" % number + bytes(1800), properties=b"TAGS\x01red", tags_code=RED)
    store.close()
    directory = root / "consumequeue_ext" / "T" / "0"
    directory.mkdir(parents=True)
    addresses = []
    for number in range(32):
        place = number // PER_FILE * EXT_SIZE + number % PER_FILE * HEAD.size
        with (directory / f"{place - place % EXT_SIZE:020d}").open("ab") as file:
            file.write(HEAD.pack(HEAD.size, RED, START_MS, 0))
        addresses.append(LOWEST + place)
        refer(root, number, addresses[-1], per_file=10)
    for path in directory.iterdir():
        path.write_bytes((path.read_bytes() + b"\xff\xff").ljust(EXT_SIZE, b"\0"))
    return addresses


def reopen(root: Path, disk: FaultyDisk | None = None) -> MessageStore:
    disk = disk or FaultyDisk(really_sync=False)
    return open_store(root, disk, mapped_file_size_commit_log=16 << 10, mapped_file_size_consume_queue=200)


def ext_files(root: Path, topic: str = "T") -> list[int]:
    directory = root / "consumequeue_ext" / topic / "0"
    return sorted(int(path.name) for path in directory.glob("[0-9]*"))


def test_ext_files_go_with_the_units_that_refer_to_them(tmp_path: Path) -> None:
    addresses = long(tmp_path)
    store = reopen(tmp_path)
    run_retention(store)
    assert ext_files(tmp_path) == list(range(0, 800, EXT_SIZE))
    kept = []
    while len(store.log.segments) > 1:
        drop_first_segment(store)
        first = store.min_offset("T", 0)
        if first < len(addresses):
            kept = [base for base in range(0, 800, EXT_SIZE) if base + EXT_SIZE > addresses[first] - LOWEST]
        assert ext_files(tmp_path) == kept  # as in Apache's broker, hashes show nothing about ext files
        report = verify(str(tmp_path), config=store.config, pause=lambda _: None)
        assert {each.kind for each in report.findings} <= {"stray"}
    assert 0 < len(kept) < 4
    assert len(everything(store)) == 40 - store.min_offset("T", 0)


@pytest.mark.parametrize("code", [RED, LOWEST + 800, LOWEST + (1 << 60), -1])
def test_what_is_no_address_of_theirs_takes_no_files_along(tmp_path: Path, code: int) -> None:
    long(tmp_path)
    files = ExtFiles(Disk(), str(tmp_path))
    assert files.paths_before("T", 0, code) == []
    assert len(files.paths_before("T", 0, LOWEST + 799)) == 7
    assert len(files.paths_before("T", 0, LOWEST + 100)) == 1
    assert len(files.paths_before("T", 0, LOWEST + 99)) == 0
    assert files.paths_before("T", 7, LOWEST) == []


def test_ext_files_of_a_deleted_topic_go_with_it(tmp_path: Path) -> None:
    long(tmp_path)
    other = tmp_path / "consumequeue_ext" / "Other" / "0" / f"{0:020d}"
    other.parent.mkdir(parents=True)
    other.touch()
    store = reopen(tmp_path)
    send(store, topic="Other")
    delete_topic(store, "T")
    assert [path.name for path in (tmp_path / "consumequeue_ext").iterdir()] == ["Other"]
    assert other.exists()


def test_what_a_crash_left_of_a_deleted_topic_goes_after_the_next_start(
    tmp_path: Path, disk: FaultyDisk
) -> None:
    long(tmp_path)
    notes = tmp_path / "consumequeue_ext" / "notes.txt"
    notes.write_text("mine")
    (tmp_path / "consumequeue_ext" / "T" / "0" / "notes.txt").write_text("mine")
    store = reopen(tmp_path, disk)
    disk.fail("unlink", match="consumequeue_ext")
    delete_topic(store, "T")
    assert len(ext_files(tmp_path)) == 8
    store.crash()
    store = reopen(tmp_path)
    run_retention(store)
    left = [path.name for path in (tmp_path / "consumequeue_ext").rglob("*") if path.is_file()]
    assert left == ["notes.txt"] * 2


def test_a_store_that_may_not_delete_them_says_so_and_tries_again(
    tmp_path: Path, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    long(tmp_path)
    store = reopen(tmp_path, disk)
    disk.fail("unlink", match="consumequeue_ext")
    drop_first_segment(store)
    assert "could not be deleted, trying again" in caplog.text
    assert ext_files(tmp_path)[0] == 0
    run_retention(store)
    assert ext_files(tmp_path)[0] > 0


def test_stats_count_their_files(tmp_path: Path) -> None:
    long(tmp_path)
    before = store_stats(str(tmp_path))
    with (tmp_path / "consumequeue_ext" / "T" / "0" / f"{0:020d}").open("r+b") as file:
        file.write(bytes(64 << 10))
    after = store_stats(str(tmp_path))
    assert before.queue_files == after.queue_files == 4 + 8
    assert after.queue_allocated - before.queue_allocated >= 56 << 10
