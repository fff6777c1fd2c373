"""Files of Apache's broker 4.9.7 are parsed correctly, and writing the content again gives the same bytes."""

from __future__ import annotations

import json
import struct
import tarfile
from pathlib import Path

import pytest
from tests.golden.record_store import TARGET
from tests.interop.store_input import TINY_SLOTS
from tests.interop.stores import Store, read_store
from tests.protocol.record.encoding import encode_message

from cometmq.errors import RecordError
from cometmq.protocol.properties.values import decode_properties, index_hash, java_hash
from cometmq.protocol.record.layout import COMPRESSED
from cometmq.protocol.record.one import decode_record, iter_records


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Extract the recorded store, with every file at its full length."""
    root = tmp_path_factory.mktemp("store-4.9.7")
    with tarfile.open(TARGET) as archive:
        archive.extractall(root, filter="data")
    for name, length in json.loads((root / "lengths.json").read_text()).items():
        with open(root / name, "r+b") as file:
            file.truncate(length)
    (root / "lengths.json").unlink()
    return root


@pytest.fixture(scope="module")
def store(directory: Path) -> Store:
    return read_store(directory, slots=TINY_SLOTS)


@pytest.fixture(scope="module")
def log(directory: Path) -> bytes:
    (path,) = (directory / "commitlog").iterdir()
    return path.read_bytes()


def test_records_are_read_field_by_field(store: Store, log: bytes) -> None:
    assert len(store.records) > 200
    for each in store.records:
        got = decode_record(log, each.position, check_crc=True)
        assert (got.topic, got.queue_id, got.queue_offset) == (each.topic, each.queue_id, each.queue_offset)
        assert (got.physical_offset, got.store_size) == (each.position, each.size)
        assert (got.flag, got.sys_flag, got.body_crc) == (each.flag, each.sys_flag, each.crc)
        assert (got.born_timestamp_ms, got.store_timestamp_ms) == (each.born, each.stored)
        assert (got.reconsume_times, got.prepared_transaction_offset) == (each.reconsumed, each.prepared)
        assert got.properties == decode_properties("\x02".join(each.properties).encode())
        assert got.born_host.startswith("127.0.0.1:")
        if not got.sys_flag & COMPRESSED:
            assert bytes(got.body) == each.body


def test_records_are_written_back_byte_for_byte(store: Store, log: bytes) -> None:
    for each in store.records:
        was = log[each.position : each.position + each.size]
        if each.sys_flag & COMPRESSED:
            continue  # decoding has decompressed the body
        assert encode_message(decode_record(was)) == was


def test_a_walk_over_the_file_finds_every_record_and_ends(store: Store, log: bytes) -> None:
    end = store.records[-1].position + store.records[-1].size
    assert [each.physical_offset for each in iter_records(log[:end])] == [
        each.position for each in store.records
    ]
    with pytest.raises(RecordError):
        decode_record(log, end)


def test_a_record_cut_short_anywhere_is_refused(store: Store, log: bytes) -> None:
    each = store.records[3]
    was = log[each.position : each.position + each.size]
    for end in range(len(was)):
        with pytest.raises(RecordError):
            decode_record(was[:end])


def test_queue_entries_are_where_the_records_say(store: Store) -> None:
    seen = 0
    by_position = {each.position: each for each in store.records}
    for name, units in store.queues.items():
        topic, _, queue = name.rpartition("/")
        for place, (position, size, tags_code) in enumerate(units):
            each = by_position[position]
            assert (each.topic, each.queue_id, each.queue_offset, each.size) == (
                topic,
                int(queue),
                place,
                size,
            )
            tags = decode_properties("\x02".join(each.properties).encode()).get("TAGS")
            if topic != "SCHEDULE_TOPIC_XXXX":
                assert tags_code == (java_hash(tags) if tags else 0)
            seen += 1
    assert seen == len(store.records)


def test_index_entries_hash_as_ours_do(store: Store) -> None:
    wanted = []
    for each in store.records:
        fields = decode_properties("\x02".join(each.properties).encode())
        keys = [fields.get("UNIQ_KEY", ""), *fields.get("KEYS", "").split(" ")]
        wanted += [(index_hash(f"{each.topic}#{key}"), each.position) for key in keys if key]
    assert [(key, position) for index in store.indexes for key, position, _, _ in index.entries] == wanted


def test_the_checkpoint_points_into_the_log(directory: Path, store: Store) -> None:
    raw = (directory / "checkpoint").read_bytes()
    assert len(raw) == 4096
    physic, logic = struct.unpack_from(">qq", raw)
    assert logic == store.records[-1].stored
    assert physic <= logic
