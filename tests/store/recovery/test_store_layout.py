"""Where a store's directories and files are: below its root, or where its settings put them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.store.inspect.test_rebuild import AT_MS, index_bytes, queue_bytes
from tests.store.kit import by_key, everything, open_store, put, small

from cometmq.errors import ConfigError
from cometmq.store import ManualClock
from cometmq.store.base.config import FIELD_OF_KEY, LOCATIONS
from cometmq.store.inspect.rebuild import SCRATCH, rebuild
from cometmq.store.inspect.rebuild_parts import plan_rebuild
from cometmq.store.inspect.stats import store_stats
from cometmq.store.inspect.verify import verify
from cometmq.testing.faulty_disk import FaultyDisk


def elsewhere(path: Path) -> dict[str, str]:
    return {
        "store_path_consume_queue": str(path / "q" / "queues"), "store_path_index": str(path / "i" / "index"),
        "store_checkpoint": str(path / "c" / "point"), "abort_file": str(path / "a" / "running"),
    }  # fmt: skip


def moved(root: Path, path: Path) -> dict[str, str]:
    """Move the directories and files of a store to the places of `elsewhere`."""
    places = elsewhere(path)
    for target, name in zip(places.values(), LOCATIONS.values(), strict=True):
        Path(target).parent.mkdir(parents=True)
        if (root / name).exists():
            (root / name).rename(target)
    return places


def test_a_store_is_written_and_found_where_its_settings_put_it(tmp_path: Path) -> None:
    root, places = tmp_path / "store", elsewhere(tmp_path / "disk")
    store = open_store(root, **places)
    messages = [put(store, b"%d" % number) for number in range(20)]
    store.commit()
    assert Path(places["abort_file"]).exists()
    store.crash()
    store = open_store(root, **places)
    assert not store.recovered.clean
    assert len(everything(store)) == len(messages)
    store.close()
    assert not Path(places["abort_file"]).exists()
    assert sorted(each.name for each in root.iterdir()) == ["commitlog", "config", "lock"]
    assert open_store(root, **places).recovered.clean


def test_the_tools_follow_the_settings_of_the_store(root: Path, tmp_path: Path) -> None:
    queues, index = queue_bytes(root), index_bytes(root)
    places = moved(root, tmp_path / "disk")
    config = small(root, **places)
    (root / "broker.conf").write_text("".join(f"{k}={v}\n" for k, v in config.to_properties().items()))
    report = verify(str(root))
    assert (report.findings, report.clean) == ([], True)
    assert store_stats(str(root)).messages == 400
    made = rebuild(str(root), disk=FaultyDisk(), clock=ManualClock(AT_MS))
    assert (made.units, made.index_entries, made.findings) == (400, 1200, [])
    for name, key in (("consumequeue", "store_path_consume_queue"), ("index", "store_path_index")):
        assert not (root / name).exists()
        assert not (Path(places[key]).parent / SCRATCH).exists()
        shutil.copytree(places[key], tmp_path / "seen" / name)
    assert (queue_bytes(tmp_path / "seen"), index_bytes(tmp_path / "seen")) == (queues, index)
    parts = plan_rebuild(str(root), str(tmp_path / "new"), 1)
    parts.look()
    for base in parts.segments:
        parts.take_segment(base)
    parts.make_index()
    parts.put_in_place([parts.make_queues(0)])
    assert queue_bytes(tmp_path / "new") == queues
    assert verify(parts.output, commit_log_dir=parts.commit_log_dir).sound
    Path(places["abort_file"]).touch()
    assert not verify(str(root)).clean


def test_a_copy_of_a_store_is_read_where_it_lies_now(root: Path) -> None:
    config = small(root, **elsewhere(root / "nowhere"))
    assert verify(str(root), config=config).findings == []


@pytest.mark.parametrize(("key", "name"), LOCATIONS.items())
def test_a_store_made_without_the_setting_is_not_begun_anew(
    root: Path, tmp_path: Path, key: str, name: str
) -> None:
    (root / "abort").touch()
    field = FIELD_OF_KEY[key]
    there = tmp_path / "there"
    with pytest.raises(ConfigError, match=f"{key}.*{root / name}"):
        open_store(root, **{field: str(there)})
    (root / name).rename(there)
    store = open_store(root, **{field: str(there)})
    assert (len(by_key(store, "T", "k7")), len(everything(store))) == (1, 134)
