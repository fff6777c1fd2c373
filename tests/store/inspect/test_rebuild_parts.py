"""A rebuild in parts writes the same bytes as a rebuild in a single process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.inspect.test_rebuild import add_light_queue
from tests.store.kit import delete_topic, open_store, small
from tests.store.planted import (
    UNCOVERED_PLACES,
    alter,
    build,
    damage_field,
    extract_golden,
    index_files,
    places,
    snapshot,
    unit_place,
)

from cometmq.errors import StoreError
from cometmq.store import ManualClock, StoreConfig
from cometmq.store.inspect import RebuildParts, plan_rebuild, verify
from cometmq.store.inspect.rebuild import SCRATCH, rebuild

AT_MS = 1_700_000_900_000


def made_of(root: Path) -> tuple[dict[str, bytes], list[bytes]]:
    """Return the queue files, and the index files in order (their names are creation times)."""
    queues = {name: data for name, data in snapshot(root).items() if name.startswith("consumequeue/")}
    return queues, [path.read_bytes() for path in index_files(root)]


def make(root: Path, output: Path, config: StoreConfig | None = None, parts: int = 3) -> RebuildParts:
    plan = plan_rebuild(str(root), str(output), parts, config=config)
    plan.collect_evidence()
    for base in plan.segments:
        plan.read_segment(base)
    plan.make_index(ManualClock(AT_MS))
    plan.put_in_place([plan.make_queues(part) for part in range(parts)])
    return plan


def check(root: Path, output: Path, config: StoreConfig | None = None) -> None:
    """Rebuild in parts, in one process, and in place; compare the results."""
    make(root, output, config)
    rebuild(str(root), disk=FaultyDisk(really_sync=False), clock=ManualClock(AT_MS), config=config)
    assert made_of(output) == made_of(root)
    assert not (output / SCRATCH).exists()


def test_light_message_queues(root: Path, tmp_path: Path) -> None:
    add_light_queue(root)
    before = made_of(root)
    check(root, tmp_path / "new", small(root))
    assert made_of(root) == before


@pytest.mark.parametrize("damage", ["none", "a unit", "all gone"])
def test_a_store_of_ours(root: Path, tmp_path: Path, damage: str) -> None:
    before = made_of(root)
    if damage == "a unit":
        path, at = unit_place(root, places(root)[100])
        alter(path, at, bytes(20))
    elif damage == "all gone":
        shutil.rmtree(root / "consumequeue")
        shutil.rmtree(root / "index")
    plan = make(root, tmp_path / "new", small(root))
    assert len(plan.segments) > 2
    assert made_of(tmp_path / "new") == before
    report = verify(str(tmp_path / "new"), config=plan.config, commit_log_dir=plan.commit_log_dir)
    assert (report.errors, report.records, report.units, report.index_entries) == (0, 400, 400, 1200)


def test_a_store_of_apaches(tmp_path: Path) -> None:
    extract_golden(tmp_path / "store")
    check(tmp_path / "store", tmp_path / "new")


@pytest.mark.parametrize("field", UNCOVERED_PLACES)
def test_records_whose_units_know_better(root: Path, tmp_path: Path, field: str) -> None:
    damage_field(places(root)[222], field)
    check(root, tmp_path / "new", small(root))


def test_deleted_topics_stay_deleted(root: Path, tmp_path: Path) -> None:
    store = open_store(root)
    delete_topic(store, "T")
    store.close()
    check(root, tmp_path / "new", small(root))
    assert not list((tmp_path / "new" / "consumequeue").iterdir())


def test_queues_without_what_a_lost_segment_held(root: Path, tmp_path: Path) -> None:
    segments = sorted((root / "commitlog").iterdir())
    segments[1].unlink()
    shutil.rmtree(root / "consumequeue")
    check(root, tmp_path / "new", small(root))


def test_parts_that_are_done_again_leave_the_same(root: Path, tmp_path: Path) -> None:
    output, config = tmp_path / "new", small(root)
    plan = plan_rebuild(str(root), str(output), 2, config=config)
    plan.collect_evidence()
    for base in (*plan.segments, plan.segments[0]):
        plan.read_segment(base)
    made = [plan.make_queues(part) for part in (0, 1)]
    stray = output / SCRATCH / "consumequeue" / "T" / "0" / f"{10**6:020d}"
    stray.write_bytes(b"of a task that died")
    plan.make_index(ManualClock(AT_MS))
    made = [plan.make_queues(part) for part in (0, 1)]
    plan.make_index(ManualClock(AT_MS))
    plan.put_in_place(made)
    assert made_of(output) == made_of(root)
    make(root, output, config)  # overwrites an earlier rebuild
    assert made_of(output) == made_of(root)


def test_what_cannot_be_rebuilt_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="choose a directory outside"):
        plan_rebuild(str(root), str(root / "new"), 2, config=small(root))
    plan = plan_rebuild(str(root), str(tmp_path / "new"), 2, config=small(root))
    store = open_store(root)
    try:
        with pytest.raises(StoreError, match="a broker is using"):
            plan_rebuild(str(root), str(tmp_path / "new"), 2, config=small(root))
        with pytest.raises(StoreError, match="a broker is using"):
            plan.put_in_place([])
    finally:
        store.close()


def test_an_empty_store(tmp_path: Path) -> None:
    build(tmp_path / "store", 0)
    check(tmp_path / "store", tmp_path / "new", small(tmp_path / "store"))
