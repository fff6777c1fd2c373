"""Planning of reads from stores: stores, files and slices, and the end of the log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.pipeline.store_files import START_MS, StoreFiles, positions, rows
from tests.store.kit import numbered, put_all, quick
from tests.store.raft_log.members import add, agree, leader, raft_log

from cometmq.errors import ConfigError, StoreCorrupt
from cometmq.pipeline.base.errors import BadStoreRecordError, LogLossError
from cometmq.pipeline.base.options import StoreOptions
from cometmq.pipeline.stored.plan import broker_name, plan_slices, store_directories
from cometmq.pipeline.stored.source import read_slice
from cometmq.protocol.record.arrow import arrow_schema

HOUR_MS = 3_600_000


def many(count: int = 200, step_ms: int = 0) -> StoreFiles:
    files = StoreFiles()
    for number in range(count):
        files.add(b"%d" % number, store_timestamp_ms=START_MS + number * step_ms)
    return files


def file_of(root: Path, number: int) -> Path:
    return sorted((root / "commitlog").iterdir())[number]


def test_files_reserved_for_later_are_no_end(tmp_path: Path) -> None:
    files = many()
    root = files.write(tmp_path)
    base = -len(files.log) // 4096 * -4096
    for number in range(2):
        (root / "commitlog" / f"{base + number * 4096:020d}").write_bytes(bytes(4096))
    (root / "commitlog" / f"{base + 8192:020d}").write_bytes(b"")
    (root / "commitlog" / "notes.txt").write_text("not a log file")
    assert positions(root) == files.places


def test_queues_elsewhere_are_those_of_the_store(tmp_path: Path) -> None:
    queues = tmp_path / "queues"
    store = quick(tmp_path / "store", store_path_consume_queue=str(queues))
    put_all(store, numbered(500))
    store.close()
    given = StoreOptions((str(tmp_path / "store"),), slice_bytes=10_000)
    assert {part.file.queues for part in plan_slices(given)} == {None}
    (tmp_path / "store" / "broker.conf").write_text(f"storePathConsumeQueue={queues}\n")
    parts = plan_slices(given)
    assert {part.file.queues for part in parts} == {str(queues)}
    assert len(parts) > 1
    # The store is a copy beside its original.
    (tmp_path / "store" / "broker.conf").write_text(
        f"storePathConsumeQueue={queues}\nstorePathRootDir={tmp_path}\n"
    )
    assert {part.file.queues for part in plan_slices(given)} == {None}


def test_an_empty_store_has_no_slices(tmp_path: Path) -> None:
    assert rows(StoreFiles().write(tmp_path / "zeros")) == []
    (tmp_path / "bare" / "commitlog").mkdir(parents=True)
    assert rows(tmp_path / "bare") == []


def test_a_log_that_is_written_ends_where_it_ended_when_the_read_was_planned(tmp_path: Path) -> None:
    store = quick(tmp_path)
    put_all(store, numbered(500), properties=b"TAGS\x01a")
    given = StoreOptions((str(tmp_path),), slice_bytes=10_000)
    parts = plan_slices(given)
    put_all(store, numbered(500, 2000))
    found = [
        row["body"]
        for part in parts
        for batch in read_slice(part, arrow_schema(["body"]), given)
        for row in batch.to_pylist()
    ]
    again = [row["body"] for row in rows(tmp_path, ["body"], slice_bytes=10_000)]
    store.close()
    assert found == numbered(500)
    assert again == numbered(2000)


@pytest.mark.parametrize("kept", [True, False])
def test_files_deleted_since_the_plan_are_lost(
    tmp_path: Path, kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files = many()
    given = StoreOptions((str(files.write(tmp_path)),), fail_on_data_loss=kept)
    first = plan_slices(given)[0]
    file_of(tmp_path, 0).unlink()
    if kept:
        with pytest.raises(LogLossError, match="failOnDataLoss=false"):
            list(read_slice(first, arrow_schema(), given))
    else:
        assert list(read_slice(first, arrow_schema(), given)) == []
        assert "log positions 0 to 4096" in caplog.text
    assert positions(tmp_path) == [place for place in files.places if place >= 4096]  # deleted by retention


def test_a_file_that_is_missing_in_the_middle_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = many()
    file_of(files.write(tmp_path), 1).unlink()
    with pytest.raises(LogLossError) as caught:
        positions(tmp_path)
    assert (caught.value.start, caught.value.stop) == (4096, 8192)
    assert positions(tmp_path, fail_on_data_loss=False) == [
        place for place in files.places if not 4096 <= place < 8192
    ]
    assert "log positions 4096 to 8192" in caplog.text


def test_slices_of_other_times_are_not_read(tmp_path: Path) -> None:
    root = str(many(step_ms=HOUR_MS).write(tmp_path))
    everything = plan_slices(StoreOptions((root,), slice_bytes=1000))
    for starting, ending in ((50, 60), (0, 1), (199, None), (None, 0), (None, 7), (300, None)):
        times = {
            "starting_ms": None if starting is None else START_MS + starting * HOUR_MS,
            "ending_ms": None if ending is None else START_MS + ending * HOUR_MS,
        }
        given = StoreOptions((root,), slice_bytes=1000, **times)
        assert len(plan_slices(given)) < min(8, len(everything))
        expected = numbered(starting or 0, max(0, min(200, 200 if ending is None else ending)))
        assert [row["body"] for row in rows(root, ["body"], slice_bytes=1000, **times)] == expected


def test_a_clock_that_was_set_back_by_minutes_hides_nothing(tmp_path: Path) -> None:
    files = StoreFiles()
    for number in range(200):
        files.add(store_timestamp_ms=START_MS + (number * 1000 if number < 100 else 0))
    root = files.write(tmp_path)
    found = positions(root, slice_bytes=500, starting_ms=START_MS + 90_000)
    assert found == files.places[90:100]
    assert positions(root, slice_bytes=500, ending_ms=START_MS + 1) == files.places[:1] + files.places[100:]


def test_stores_by_pattern_and_by_name_each_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        many(3).write(tmp_path / "stores" / name)
    (tmp_path / "stores" / "no store").mkdir()
    stores = tmp_path / "stores"
    (tmp_path / "link").symlink_to(stores / "c")
    assert store_directories([f"{stores}/[ab]", f"{stores}/b/", f"file://{tmp_path}/link"]) == [
        f"{stores}/a", f"{stores}/b", f"{tmp_path}/link",
    ]  # fmt: skip
    assert len(store_directories([f"{stores}/*"])) == 3
    for missing in (f"{stores}/no*", f"{stores}/d", "/dev/null"):
        with pytest.raises(ConfigError, match="a store"):
            store_directories([f"{stores}/a", missing])


def test_a_link_in_place_of_a_log_file_is_not_followed(tmp_path: Path) -> None:
    root = many().write(tmp_path / "store")
    file = file_of(root, 0)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=f"a symbolic link, which no store follows.*{file.name}"):
        positions(root)


def test_a_file_longer_than_a_log_file_can_be_is_named(tmp_path: Path) -> None:
    file = file_of(many().write(tmp_path), 0)
    os.truncate(file, 8 << 40)
    with pytest.raises(StoreCorrupt, match=f"{file.name}.*a log file at most"):
        positions(tmp_path)


@pytest.mark.parametrize("place", ["broker.conf", f"consumequeue/T/0/{0:020d}"])
def test_a_pipe_in_a_store_keeps_nobody_waiting(tmp_path: Path, place: str) -> None:
    files = many()
    root = files.write(tmp_path)
    pipe = root / place
    pipe.parent.mkdir(parents=True, exist_ok=True)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    assert positions(root, slice_bytes=1000) == files.places


def test_the_name_of_a_broker(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    root.mkdir()
    assert broker_name(str(root)) == "copy"
    (root / "broker.conf").write_text("listenPort=1\nbrokerName=broker-x\n")
    assert broker_name(str(root)) == "broker-x"
    for hostile in (b"brokerName=\\u12", b"\xff\xfe", b""):
        (root / "broker.conf").write_bytes(hostile)
        assert broker_name(str(root)) == "copy"


@pytest.mark.parametrize("committed", [100, 150, 201])
def test_of_a_raft_member_what_is_committed_is_read(tmp_path: Path, committed: int) -> None:
    """The committed part ends in any segment, slices begin within segments, and some records are long."""
    store = leader(tmp_path)
    bodies = [b"%d:" % number + bytes(number * 97 % 3000) for number in range(200)]
    add(store, *bodies, bytes(40_000), properties=b"TAGS\x01a")
    raft_log(store).commit_to(committed)
    store.close()
    for slice_bytes in (10_000, 1 << 20):
        found = rows(tmp_path, ["topic", "body"], slice_bytes=slice_bytes, batch_bytes=5000)
        assert [row["topic"] for row in found] == ["rmq_sys_raft"] + ["T"] * committed
        assert [row["body"] for row in found[1:201]] == bodies[:committed]
    with pytest.raises(ConfigError, match="dledger"):
        plan_slices(StoreOptions((str(tmp_path / "dledger-n0" / "data"),)))


def test_damage_in_a_raft_members_log_is_named(tmp_path: Path) -> None:
    store = leader(tmp_path)
    add(store, *numbered(100))
    agree(store)
    path = Path(store.log.path_of(0))
    store.close()
    places = positions(tmp_path)
    with open(path, "r+b") as file:
        file.seek(places[50] - 48)
        file.write(b"\xff" * 8)
    found = rows(tmp_path, ["physical_offset"], on_bad_record="skip")
    assert [row["physical_offset"] for row in found] == places[:50] + places[51:]
    with pytest.raises(BadStoreRecordError):
        rows(tmp_path, ["physical_offset"])
