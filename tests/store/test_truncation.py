"""A truncated log looks as if the later records had never existed, even if the truncation is interrupted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.kit.crash_images import CrashPoint
from tests.kit.recording_disk import RecordingDisk
from tests.store.kit import check_sound, everything, open_store, quick, small
from tests.store.pair import feed, fill, same
from tests.store.planted import places

from cometmq.errors import StoreError
from cometmq.store import TIMERS, JsonTable, MessageStore, truncate_log

SIZES = [300, 9000, 20, 15_000, 0, 700, 22_000, 50, 8000, 40] * 4  # bytes: four and a half segments


@pytest.fixture
def master(tmp_path: Path) -> MessageStore:
    return quick(tmp_path / "master")


def test_a_slave_that_is_cut_anywhere_takes_the_rest_again(tmp_path: Path, master: MessageStore) -> None:
    ends = fill(master, SIZES)
    for number, end in enumerate([0, *ends, *master.log.segments[1:]]):
        root = tmp_path / f"slave{number}"
        slave = quick(root)
        feed(slave, master)
        slave.close()
        report = truncate_log(str(root), end, config=small(root))
        assert (report.end, report.bytes, report.done) == (master.log.end, master.log.end - end, True)
        slave = quick(root)
        assert (slave.log.end, slave.recovered.clean, slave.recovered.notes) == (end, True, [])
        if number % 8 == 0:
            feed(slave, master)
            same(slave, quick(master.config.root) if number else master)
        else:
            check_sound(slave)


def test_the_report_names_what_goes(tmp_path: Path, root: Path) -> None:
    before = open_store(root)
    counts = [before.max_offset("T", queue_id) for queue_id in range(3)]
    end, last = before.log.end, before.log.segments[-1]
    before.close()
    hit = next(place for place in places(root) if place.position >= 2 * 65536)
    report = truncate_log(str(root), hit.position, dry_run=True)
    assert (report.position, report.end, report.bytes, report.done) == (
        hit.position, end, end - hit.position, False,
    )  # fmt: skip
    assert open_store(root).log.end == end
    lost = {queue.queue_id: (queue.first_offset, queue.messages) for queue in report.queues}
    assert sum(messages for _, messages in lost.values()) == report.records
    assert {queue_id: sum(pair) for queue_id, pair in lost.items()} == dict(enumerate(counts))
    assert report.segments[-1].endswith(f"{last:020d}")


@pytest.mark.parametrize(
    ("position", "problem"),
    [(1, "no record ends at 1; the nearest ends are 0 or"), (1 << 40, "outside the log, which ranges from")],
)
def test_a_position_that_is_no_end_of_a_record_changes_nothing(
    root: Path, position: int, problem: str
) -> None:
    with pytest.raises(StoreError, match=problem):
        truncate_log(str(root), position)
    check_sound(open_store(root))


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    store = quick(tmp_path)
    fill(store, [10])
    with pytest.raises(StoreError, match="a broker is using this store"):
        truncate_log(str(tmp_path), 0)


def test_no_table_hides_what_comes_again(tmp_path: Path, master: MessageStore) -> None:
    ends = fill(master, SIZES)
    slave = quick(tmp_path / "slave")
    feed(slave, master)
    slave.min_offsets.set_offsets("T", {0: slave.max_offset("T", 0)})
    slave.deleted.add(["U"], slave.log.end, 0)
    slave.close()
    timers = tmp_path / "slave" / "config" / TIMERS
    for _ in range(2):
        JsonTable(str(timers)).save({"queueOffset": 7, "deliveredMs": 1 << 50})
    truncate_log(str(tmp_path / "slave"), ends[2], config=small(tmp_path / "slave"))
    assert list(timers.parent.glob(f"{TIMERS}*")) == []
    slave = quick(tmp_path / "slave")
    feed(slave, master)
    assert everything(slave, "T", 0) == everything(master, "T", 0)[2:]
    assert everything(slave, "U", 1) == everything(master, "U", 1)[1:]


@pytest.mark.parametrize("seed", range(4))
def test_power_that_fails_during_a_cut_leaves_the_log_before_it_or_after(seed: int) -> None:
    chance = random.Random(seed)
    config = small("/store")
    disk = RecordingDisk()
    store = MessageStore.open(config, disk)
    ends = fill(store, SIZES)
    store.close()
    wanted = chance.choice([0, *ends])
    expected = {end: kept(ends, end) for end in (ends[-1], wanted)}
    disk = RecordingDisk(disk.image())
    truncate_log("/store", wanted, disk=disk, config=config)
    point = CrashPoint(disk)
    found = set()
    for at in range(len(disk.history) + 1):
        point.advance(at)
        for number in range(3):
            label, image = point.sampled_image(number, str(seed))
            again = RecordingDisk(image)
            for _ in range(2):
                store = MessageStore.open(config, again)
                end = store.log.end
                found.add(end)
                assert end in expected, label
                served = sum(queue.max_offset for queue in store.queues)
                assert (served, store.recovered.damage) == (expected[end], []), label
                store.crash()
    assert found == set(expected)


def kept(ends: list[int], log_end: int) -> int:
    """Return the number of queue units for the records of `fill` that end at or before `log_end`."""
    return sum(number % 6 not in (3, 5) for number, end in enumerate(ends) if end <= log_end)
