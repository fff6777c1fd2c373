"""The scan of the log that finds records which later records have replaced."""

from __future__ import annotations

import errno

import pytest
from tests.store.kit import open_store, put

from cometmq.protocol.properties.values import stored_tags_code
from cometmq.store import Disk, link_to, links, lost_units
from cometmq.store.derived.consume_queue import FILLER, UNIT_DTYPE


async def found(store, start=0):
    pieces = [piece async for piece in links(store.log, store.disk, store.executor, start)]
    return [position for piece in pieces for position in piece.tolist()]


def put_links(store, count, size=300):
    """Store records in several segments, every third with a link; return their positions."""
    positions = []
    for number in range(count):
        message = store.appender.append(
            "T", 0, b"x" * size, b"", born_timestamp_ms=1, born_host=bytes(8 if number % 2 else 20),
            prepared_transaction_offset=link_to(number) if number % 3 == 0 else 0,
        )  # fmt: skip
        store.commit()
        positions.append(message.physical_offset)
    return positions


async def test_links_of_several_segments_from_any_record_on(tmp_path):
    store = open_store(tmp_path, mapped_file_size_commit_log=8192)
    positions = put_links(store, 90)
    assert len(store.log.segments) > 3
    assert await found(store) == list(range(0, 90, 3))
    assert await found(store, positions[40]) == list(range(42, 90, 3))
    assert await found(store, store.log.end) == []


@pytest.mark.parametrize("size", [10, 5 << 20])
async def test_long_records(tmp_path, size):
    store = open_store(tmp_path, mapped_file_size_commit_log=16 << 20, max_message_size=6 << 20)
    put_links(store, 4, size)
    assert await found(store) == [0, 3]


async def test_damage_hides_what_it_hit(tmp_path):
    store = open_store(tmp_path, mapped_file_size_commit_log=65536)
    positions = put_links(store, 60)
    await store.stop()
    path = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[positions[30] : positions[30] + 100] = bytes(100)
    path.write_bytes(data)
    store = open_store(tmp_path, mapped_file_size_commit_log=65536)
    assert await found(store) == [number for number in range(0, 60, 3) if number != 30]


class BadSector(Disk):
    """A disk on which one byte of the log cannot be read."""

    bad = -1

    def pread(self, fd, length, offset):
        if offset <= self.bad < offset + length:
            raise OSError(errno.EIO, "bad sector")
        return super().pread(fd, length, offset)


@pytest.mark.parametrize("within", [2, 200])
async def test_what_the_device_cannot_read_hides_only_itself(tmp_path, within):
    disk = BadSector()
    store = open_store(tmp_path, mapped_file_size_commit_log=65536, disk=disk)
    positions = put_links(store, 60)
    disk.bad = positions[30] + within
    seen = await found(store)
    disk.bad = -1
    lost = set(range(0, 60, 3)) - set(seen)
    assert 30 in lost
    near = range(positions[30] - 4_096, positions[30] + 4_096)
    assert all(positions[number] in near for number in lost)


# -- Units of a queue, rebuilt from the records


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize(("first", "count"), [(0, 90), (40, 20), (89, 1)])
async def test_they_are_what_they_were_and_fillers_stand_for_lost_records(tmp_path, damaged, first, count):
    store = open_store(tmp_path, mapped_file_size_commit_log=8192)
    positions = []
    for number in range(90):
        properties = b"TAGS\x01%d" % number
        code = stored_tags_code(properties)
        positions.append(put(store, b"x" * 100, "T", 0, properties, tags_code=code).physical_offset)
        for other in (("T", 1), ("U", 0)):
            put(store, b"y" * 100, *other, properties)
        store.commit()
    assert len(store.log.segments) > 3
    queue = store.queues.find_queue("T", 0)
    wanted = bytearray(queue.read(first, count))
    if damaged:
        base = positions[50] - positions[50] % 8192
        path = tmp_path / "commitlog" / f"{base:020d}"
        data = bytearray(path.read_bytes())
        data[positions[50] - base + 4 : positions[50] - base + 54] = bytes(50)
        path.write_bytes(data)
        if first <= 50 < first + count:
            wanted[20 * (50 - first) : 20 * (51 - first)] = FILLER
    found = await lost_units(
        store.log, store.disk, store.executor, queue, first, count, start=positions[max(0, first - 1)],
        code_of=stored_tags_code,
    )  # fmt: skip
    assert found == wanted
    assert len(found) == count * UNIT_DTYPE.itemsize
