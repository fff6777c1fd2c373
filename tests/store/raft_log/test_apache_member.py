"""The store of a raft member that Apache's 4.9.7 broker wrote: opened, read and continued."""

from __future__ import annotations

import json
import struct
import tarfile
from pathlib import Path

import pytest
from tests.golden.record_ledger import TARGET
from tests.interop.store_input import TINY_SLOTS
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import open_configured
from tests.store.raft_log.members import add, agree, elect, raft_log, seen

from cometmq.errors import StoreCorrupt
from cometmq.store import MessageStore, StoreConfig
from cometmq.store.raft_log.entry_index import FILE_SIZE
from cometmq.store.raft_log.member_files import RaftLogCheckpoint, TermAndVote, read_checkpoint, read_term

LAST = 141
BODIES = [b"%d:" % number + b"x" * (number * 37 % 1500) for number in range(120)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Extract the recorded store, with every file at its full length."""
    with tarfile.open(TARGET) as archive:
        archive.extractall(tmp_path, filter="data")
    for name, length in json.loads((tmp_path / "lengths.json").read_text()).items():
        with open(tmp_path / name, "r+b") as file:
            file.truncate(length)
    (tmp_path / "lengths.json").unlink()
    return tmp_path


def opened(root: Path) -> MessageStore:
    config = StoreConfig(
        store_path_root_dir=str(root), mapped_file_size_commit_log=32 << 10,
        mapped_file_size_consume_queue=2000, max_hash_slot_num=TINY_SLOTS, max_index_num=400,
        enable_d_leger_commit_log=True,
        d_leger_group="broker-a", d_leger_self_id="n0",
    )  # fmt: skip
    return open_configured(config, FaultyDisk(really_sync=False))


def alpha(store: MessageStore) -> list[bytes]:
    """Return the bodies of the numbered messages, as readers receive them."""
    found = [body for queue_id in range(3) for body in seen(store, "Alpha", queue_id)]
    return sorted((body for body in found if b":" in body), key=lambda body: int(body.split(b":")[0]))


def test_everything_is_served(root: Path) -> None:
    before = {path.name: path.read_bytes() for path in (root / "dledger-n0" / "data").iterdir()}
    store = opened(root)
    log = raft_log(store)
    assert (log.first, log.last, log.committed, log.synced) == (0, LAST, LAST, LAST)
    assert store.recovered.notes == []
    assert alpha(store) == BODIES
    assert len(seen(store, "Alpha", 1)) == 40 + 20
    assert len(seen(store, "SCHEDULE_TOPIC_XXXX", 17)) == 2
    assert {log.term_of(index) for index in range(LAST + 1)} == {0}
    store.close()
    after = {path.name: path.read_bytes() for path in (root / "dledger-n0" / "data").iterdir()}
    assert after == before


def test_it_goes_on(root: Path) -> None:
    store = opened(root)
    assert elect(store, 1) == LAST + 1
    for number in range(40):
        add(store, b"more %d" % number + bytes(1000), topic="Beta")
    agree(store)
    store.close()
    store = opened(root)
    assert (raft_log(store).last, raft_log(store).committed) == (LAST + 41, LAST + 41)
    assert alpha(store) == BODIES
    assert len(seen(store, "Beta")) == 40


@pytest.mark.parametrize("lost", ["checkpoint", "index", "queues"])
def test_what_follows_from_the_log_is_made_anew(root: Path, lost: str) -> None:
    place = root / ("consumequeue" if lost == "queues" else f"dledger-n0/{lost}")
    paths = [place] if place.is_file() else [each for each in place.rglob("*") if each.is_file()]
    kept = {path: path.read_bytes().rstrip(b"\0") for path in paths}
    for path in paths:
        path.unlink()
    store = opened(root)
    if lost == "checkpoint":
        assert (raft_log(store).committed, alpha(store)) == (-1, [])
        raft_log(store).commit_to(LAST)
    assert alpha(store) == BODIES
    store.close()
    if lost != "checkpoint":
        assert {path: path.read_bytes().rstrip(b"\0") for path in paths} == kept
        assert all(path.stat().st_size in (FILE_SIZE, 2000) for path in paths)


def test_its_term_and_vote_are_read(root: Path) -> None:
    directory = str(root / "dledger-n0")
    disk = FaultyDisk()
    assert read_term(disk, directory) == TermAndVote(0, "n0")
    assert read_checkpoint(disk, directory) == RaftLogCheckpoint(LAST, LAST, -1)


def position_of(root: Path, index: int) -> tuple[Path, int]:
    """Return the file of an entry and its first byte in that file."""
    unit = (root / "dledger-n0" / "index" / ("0" * 20)).read_bytes()[32 * index : 32 * index + 12]
    _, position = struct.unpack(">iq", unit)
    base = position - position % (32 << 10)
    return root / "dledger-n0" / "data" / f"{base:020d}", position - base


@pytest.mark.parametrize("index", [0, 60, 118, 130, LAST])
def test_a_damaged_entry_is_not_cut_off_when_others_follow(root: Path, index: int) -> None:
    """A damaged last entry, in contrast, is what a power failure leaves of Apache's broker."""
    path, at = position_of(root, index)
    (root / "dledger-n0" / "checkpoint").write_text("committedIndex=0\nendIndex=141\n")
    (root / "checkpoint").write_bytes(bytes(4096))
    data = bytearray(path.read_bytes())
    data[at + 48 + 90] ^= 1
    path.write_bytes(data)
    if index == 0:
        with pytest.raises(StoreCorrupt, match="entry 0"):
            opened(root)
        return
    store = opened(root)
    assert raft_log(store).last == index - 1
