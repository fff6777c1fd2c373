"""Slices of log files: each record once, whatever bodies contain and whatever is damaged."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline.store_files import HEAD, StoreFiles, positions

from cometmq.errors import StoreCorrupt
from cometmq.pipeline.base.errors import BadStoreRecordError
from cometmq.pipeline.base.options import StoreOptions
from cometmq.pipeline.stored.plan import plan_slices
from cometmq.protocol.record.one import encode_record

SKIP = {"on_bad_record": "skip"}


def forged(files: StoreFiles, topic: str, bodies: list[tuple[str, int, int]], head: int = HEAD) -> bytes:
    """Build a body for the next record that contains whole records with their future log positions."""
    fakes = [
        encode_record(name, b"forged", b"TAGS\x01fake", queue_offset=offset, queue_id=queue)
        for name, queue, offset in bodies
    ]
    size = len(encode_record(topic, b"".join(fakes))) + head - HEAD
    at = files.place_for(size) + head
    made = []
    for name, queue, offset in bodies:
        place = at + sum(map(len, made))
        made.append(
            encode_record(
                name, b"forged", b"TAGS\x01fake", queue_offset=offset, queue_id=queue, physical_offset=place
            )
        )
    return b"".join(made)


HOSTILE = st.lists(st.tuples(st.sampled_from("TU"), st.integers(0, 1), st.integers(-1, 40)), max_size=12)
RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["T", "U", "long" * 50]),
        st.integers(0, 1),
        st.one_of(st.binary(max_size=300), HOSTILE),
        st.sampled_from([0, 0, 4, 8]),
        st.sampled_from([8, 8, 20]),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(RECORDS, st.integers(100, 9000), st.integers(1, 5000), st.booleans())
def test_every_record_once_whatever_bodies_hold(
    records: list[tuple[str, int, bytes | list[tuple[str, int, int]], int, int]],
    slice_bytes: int,
    batch_bytes: int,
    queues: bool,
) -> None:
    files = StoreFiles()
    for topic, queue_id, body, sys_flag, host in records:
        data = body if isinstance(body, bytes) else forged(files, topic, body, HEAD + host - 8)
        files.add(data, topic, queue_id, sys_flag=sys_flag, born_host=bytes(host))
    with tempfile.TemporaryDirectory() as root:
        files.write(Path(root), queues=queues)
        assert positions(root, slice_bytes=slice_bytes, batch_bytes=batch_bytes) == files.places


def many(count: int = 40) -> StoreFiles:
    files = StoreFiles()
    for number in range(count):
        files.add(b"%d" % number * (number % 50), "TU"[number % 2], number % 3, properties=b"TAGS\x01a")
    return files


def test_slices_begin_within_files(tmp_path: Path) -> None:
    files = many()
    parts = plan_slices(StoreOptions((str(files.write(tmp_path)),), slice_bytes=500))
    assert len(parts) > 8
    assert {part.start for part in parts} <= set(files.places)
    assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
    assert parts[-1].stop == files.end_of(-1)


def test_a_log_without_queues_is_read_file_by_file(tmp_path: Path) -> None:
    files = many()
    (files.write(tmp_path, queues=False) / "commitlog").rename(tmp_path / "copied")
    assert positions(tmp_path / "copied", slice_bytes=500) == files.places


def misled(topic: str) -> StoreFiles:
    """Build a store with a queue of the topic that refers to a forged record in the second record's body."""
    files = StoreFiles()
    files.add(b"x" * 600)
    inside = files.add(forged(files, "T", [(topic, 0, 1)] * 8)) + HEAD
    files.add()
    size = struct.unpack_from(">i", files.log, inside)[0]
    units = files.queues.setdefault((topic, 0), [bytes(20)] * 2)
    units[1] = struct.pack(">qiq", inside, size, 0)
    return files


def test_a_queue_that_names_a_place_within_a_record_is_an_error(tmp_path: Path) -> None:
    files = misled("T")
    root = files.write(tmp_path)
    with pytest.raises(StoreCorrupt, match="sliceBytes"):
        positions(root, slice_bytes=600, **SKIP)
    assert positions(root, slice_bytes=5000) == files.places


def test_a_topic_is_no_path(tmp_path: Path) -> None:
    files = misled("../elsewhere")
    root = files.write(tmp_path)
    assert (root / "elsewhere" / "0").is_dir()
    assert positions(root, slice_bytes=600) == files.places


@pytest.mark.parametrize("queues", [True, False])
def test_a_damaged_byte_anywhere_hides_its_record_at_most(
    tmp_path: Path, queues: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files = many(12)
    root = files.write(tmp_path, queues=queues)
    path = root / "commitlog" / f"{0:020d}"
    whole = path.read_bytes()
    others = [place for number, place in enumerate(files.places) if number != 5]
    hidden = 0
    for at in range(files.places[5], files.end_of(5)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        caplog.clear()
        found = positions(root, slice_bytes=700, **SKIP)
        assert [place for place in found if place in others] == others, at
        if found != files.places:
            hidden += 1
            assert set(found) <= set(files.places)
            assert f"bad record at log position {files.places[5]} " in caplog.text
            with pytest.raises(BadStoreRecordError) as caught:
                positions(root, slice_bytes=700)
            assert (caught.value.position, caught.value.path) == (files.places[5], str(path))
    # Checked bytes are size, magic, CRC, position, three lengths, five bytes of body, and the byte with the
    # IPv6 flags. No other byte of a record has a checksum.
    assert hidden == 33


LENGTHS = {
    "size": (0, ">i"),
    "body": (84, ">i"),
    "magic": (4, ">i"),
    "sysFlag": (36, ">i"),
    "topic": (-9, ">b"),
}


@pytest.mark.parametrize("field", LENGTHS)
@pytest.mark.parametrize("value", [-(2**31), -1, 0, 1, 7, 90, 4000, 2**31 - 1])
@pytest.mark.parametrize("queues", [True, False])
def test_hostile_lengths(tmp_path: Path, field: str, value: int, queues: bool) -> None:
    files = StoreFiles()
    for number in range(9):
        files.add(b"x" * 100 * number)
    offset, kind = LENGTHS[field]
    at = (files.places[4] if offset >= 0 else files.end_of(4) + 5) + offset
    root = files.write(tmp_path, queues=queues)
    with (root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(at)
        file.write(struct.pack(kind, max(-128, min(127, value)) if kind == ">b" else value))
    expected = [place for number, place in enumerate(files.places) if number != 4]
    found = positions(root, slice_bytes=300, **SKIP)
    assert [place for place in found if place != files.places[4]] == expected


@pytest.mark.parametrize("remains", [b"", b"\0"])
def test_a_tail_torn_anywhere_ends_the_log(
    tmp_path: Path, remains: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    files = many(12)
    files.add(b"the last one", properties=b"TAGS\x01last")
    root = files.write(tmp_path)
    path = root / "commitlog" / f"{0:020d}"
    whole = path.read_bytes()
    for at in range(files.places[-1], files.end_of(-1)):
        path.write_bytes(whole[:at] + remains * (len(whole) - at))
        caplog.clear()
        assert positions(root, slice_bytes=700) == files.places[:-1]
        torn = bool(whole[files.places[-1] : at].strip(b"\0"))
        assert ("no complete record begins at log position" in caplog.text) == torn


def test_bodies_that_never_reached_the_disk_end_the_log(tmp_path: Path) -> None:
    files = many(12)
    for _ in range(3):
        files.add(b"x" * 64)
    root = files.write(tmp_path)
    with (root / "commitlog" / f"{0:020d}").open("r+b") as file:
        for place in files.places[-2:]:
            file.seek(place + HEAD)
            file.write(bytes(64))
    assert positions(root) == files.places[:-2]
    assert len(positions(root, check_crc=False)) == len(files.places)


def test_a_record_larger_than_a_block(tmp_path: Path) -> None:
    files = StoreFiles(segment=1 << 20)
    for size in (10, 300_000, 10, 70_000, 0):
        files.add(b"x" * size)
    assert positions(files.write(tmp_path), batch_bytes=100, slice_bytes=50_000) == files.places


def test_zeros_in_a_file_that_others_follow_are_damage(tmp_path: Path) -> None:
    files = many(80)
    root = files.write(tmp_path)
    number = next(n for n, place in enumerate(files.places) if place > 3000)
    last = next(n for n, place in enumerate(files.places) if place >= 4096)
    with (root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.truncate(files.places[number])
        file.truncate(4096)
    with pytest.raises(BadStoreRecordError, match="begins with zeros"):
        positions(root)
    assert positions(root, **SKIP) == files.places[:number] + files.places[last:]
