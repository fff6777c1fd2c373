"""Units of a queue, made anew from the records."""

from __future__ import annotations

import pytest
from tests.store.kit import open_store, put

from cometmq.protocol.properties.values import stored_tags_code
from cometmq.store import lost_units
from cometmq.store.derived.consume_queue import FILLER, UNIT_DTYPE


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
    queue = store.queues.find("T", 0)
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
        store.log, store.disk, store.off_loop, queue, first, count, start=positions[max(0, first - 1)],
        code_of=stored_tags_code,
    )  # fmt: skip
    assert found == wanted
    assert len(found) == count * UNIT_DTYPE.itemsize
