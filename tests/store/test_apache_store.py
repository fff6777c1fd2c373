"""A store that Apache's 4.9.7 broker wrote: opened, read, and rebuilt from its log byte for byte."""

from __future__ import annotations

import json
import shutil
import struct
import tarfile
from pathlib import Path

import pytest
from tests.interop.store_input import TINY_SLOTS
from tests.store.kit import by_key, everything, open_configured

from cometmq.protocol.record.one import iter_records
from cometmq.store import StoreConfig
from cometmq.store.base.checkpoint import Checkpoint
from cometmq.store.base.disk import Disk
from cometmq.store.derived.index_file import HEADER

RECORDED = Path(__file__).parent.parent / "data" / "store-4.9.7.tar.gz"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Extract the recorded store, with every file at its full length."""
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    for name, length in json.loads((tmp_path / "lengths.json").read_text()).items():
        with open(tmp_path / name, "r+b") as file:
            file.truncate(length)
    (tmp_path / "lengths.json").unlink()
    return tmp_path


def configured(root: Path) -> StoreConfig:
    """Return a configuration with the file sizes found on the disk."""
    (log,) = (root / "commitlog").iterdir()
    queue = next((root / "consumequeue").glob("*/*/*"))
    slots, capacity = index_shape(next((root / "index").iterdir()))
    return StoreConfig(
        store_path_root_dir=str(root),
        mapped_file_size_commit_log=log.stat().st_size,
        mapped_file_size_consume_queue=queue.stat().st_size,
        max_hash_slot_num=slots,
        max_index_num=capacity,
    )


def index_shape(path: Path) -> tuple[int, int]:
    return TINY_SLOTS, (path.stat().st_size - HEADER.size - 4 * TINY_SLOTS) // 20


def queue_files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in (root / "consumequeue").glob("*/*/*")}


def test_every_message_is_served(root: Path) -> None:
    log = next((root / "commitlog").iterdir()).read_bytes()
    store = open_configured(configured(root))
    assert store.recovered.clean
    assert store.recovered.notes == []
    expected: dict[tuple[str, int], list[bytes]] = {}
    for record in iter_records(log[: store.log.end]):
        expected.setdefault((record.topic, record.queue_id), []).append(bytes(record.body))
    found = {(q.topic, q.queue_id): everything(store, q.topic, q.queue_id) for q in store.queues}
    store.close()
    assert len(expected) > 5
    assert found == expected


def test_opening_and_closing_changes_nothing(root: Path) -> None:
    config = configured(root)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    open_configured(config).close()
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != "lock"}
    del after[root / "config" / "consumeQueueEnds.json"]  # only CometMQ's broker writes this file
    assert after == {path: data for path, data in before.items() if path.name != "lock"}


@pytest.mark.parametrize("stop", ["clean", "unclean"])
def test_queues_and_index_built_from_the_log_equal_apaches_byte_for_byte(root: Path, stop: str) -> None:
    config = configured(root)
    queues, index = queue_files(root), next((root / "index").iterdir()).read_bytes()
    shutil.rmtree(root / "consumequeue")
    shutil.rmtree(root / "index")
    if stop == "unclean":
        (root / "abort").touch()
    open_configured(config).close()
    assert queue_files(root) == queues
    (rebuilt,) = (root / "index").iterdir()
    assert HEADER.unpack_from(rebuilt.read_bytes()) == HEADER.unpack_from(index)
    assert rebuilt.read_bytes() == index


def test_every_key_in_it_is_found(root: Path) -> None:
    log = next((root / "commitlog").iterdir()).read_bytes()
    store = open_configured(configured(root))
    asked = 0
    for record in iter_records(log[: store.log.end]):
        at = record.physical_offset
        for key in [record.properties.get("UNIQ_KEY", ""), *record.properties.get("KEYS", "").split(" ")]:
            if key:
                found = by_key(store, record.topic, key, 64, 0, 1 << 60)
                assert log[at : at + record.store_size] in found
                asked += 1
    store.close()
    assert asked > 200


def test_its_checkpoint_is_read_and_written_back_unchanged(root: Path) -> None:
    data = (root / "checkpoint").read_bytes()
    checkpoint = Checkpoint(Disk(), str(root / "checkpoint"))
    assert (checkpoint.physic_ms, checkpoint.logics_ms, checkpoint.index_ms) == struct.unpack_from(
        ">qqq", data
    )
    assert checkpoint.logics_ms > 1_600_000_000_000
    assert checkpoint.encode() == data
