"""Paths of a store's directories and files: below its root, or as set in the configuration."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.inspect.test_rebuild import AT_MS, index_bytes, queue_bytes
from tests.store.kit import by_key, everything, open_store, put, small

from cometmq.errors import ConfigError, StoreError
from cometmq.store import ManualClock
from cometmq.store.base.config import FIELD_OF_KEY, LOCATIONS, StoreConfig
from cometmq.store.base.disk import Disk
from cometmq.store.base.guards import StoreLock
from cometmq.store.inspect.rebuild import SCRATCH, rebuild
from cometmq.store.inspect.rebuild_parts import plan_rebuild
from cometmq.store.inspect.stats import store_stats
from cometmq.store.inspect.verify import verify


def elsewhere(path: Path) -> dict[str, str]:
    return {
        "store_path_consume_queue": str(path / "q" / "queues"), "store_path_index": str(path / "i" / "index"),
        "store_checkpoint": str(path / "c" / "point"), "abort_file": str(path / "a" / "running"),
    }  # fmt: skip


def moved(root: Path, path: Path) -> dict[str, str]:
    """Move the directories and files of a store to the paths of `elsewhere`."""
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
        assert not Path(f"{places[key]}.{SCRATCH}").exists()
        shutil.copytree(places[key], tmp_path / "seen" / name)
    assert (queue_bytes(tmp_path / "seen"), index_bytes(tmp_path / "seen")) == (queues, index)
    parts = plan_rebuild(str(root), str(tmp_path / "new"), 1)
    parts.collect_evidence()
    for base in parts.segments:
        parts.read_segment(base)
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


OVERLAPS: list[tuple[str, dict[str, str]]] = [
    ("abortFile", {"abort_file": "{root}/lock"}),
    ("abortFile", {"abort_file": "{root}/../store/./checkpoint"}),
    ("abortFile", {"abort_file": "{link}/config/topics.json"}),
    ("abortFile", {"abort_file": "{root}/commitlog/00000000000000000000"}),
    ("abortFile", {"abort_file": "{root}/broker.conf"}),
    ("abortFile", {"abort_file": "{disk}/one", "store_checkpoint": "{disk}/one"}),
    ("storeCheckpoint", {"store_checkpoint": "{root}/abort", "abort_file": "{disk}/abort"}),
    ("storeCheckpoint", {"store_checkpoint": "{disk}/q/x", "store_path_consume_queue": "{disk}/q"}),
    ("storePathIndex", {"store_path_index": "{disk}/d/", "store_path_consume_queue": "{disk}/d"}),
    ("storePathIndex", {"store_path_index": "{root}/commitlog/index"}),
    ("storePathConsumeQueue", {"store_path_consume_queue": "{link}"}),
    ("storePathConsumeQueue", {"store_path_consume_queue": "{disk}/.."}),
    ("storePathCommitLog", {"store_path_commit_log": "{disk}/a,{disk}/a/b"}),
    ("storePathCommitLog", {"store_path_commit_log": "{root}/consumequeue"}),
    ("readOnlyCommitLogStorePaths", {
        "store_path_commit_log": "{disk}/a,{disk}/b", "read_only_commit_log_store_paths": "{disk}/a/"
    }),
]  # fmt: skip


@pytest.mark.parametrize(("key", "settings"), OVERLAPS)
def test_no_path_of_a_store_lies_in_another_one(tmp_path: Path, key: str, settings: dict[str, str]) -> None:
    root, disk, link = tmp_path / "store", tmp_path / "disk", tmp_path / "link"
    disk.mkdir()
    link.symlink_to(root)
    changes = {name: value.format(root=root, disk=disk, link=link) for name, value in settings.items()}
    open_store(root).close()
    before = sorted(root.rglob("*"))
    with pytest.raises(ConfigError, match=r"a path (apart from|that does not contain) ") as refused:
        open_store(root, **changes)
    assert refused.value.key == key
    assert sorted(root.rglob("*")) == before


def test_a_rebuild_puts_no_index_in_place_of_the_log(root: Path) -> None:
    with pytest.raises(ConfigError, match="storePathIndex"):
        rebuild(str(root), config=small(root, store_path_index=str(root / "commitlog")))
    assert len(everything(open_store(root))) == 134


def test_the_usual_places_may_be_named(tmp_path: Path) -> None:
    root = tmp_path / "store"
    usual = {FIELD_OF_KEY[key]: f"{root}/./{name}" for key, name in LOCATIONS.items()}
    store = open_store(root, **usual, store_path_commit_log=f"{root}/commitlog/a,{tmp_path}/b")
    put(store)
    store.close()
    logs = {
        "store_path_commit_log": f"{tmp_path}/c,{tmp_path}/b",
        "read_only_commit_log_store_paths": f"{tmp_path}/b,{root}/commitlog/a",
    }
    assert len(everything(open_store(root, **usual, **logs))) == 1


@pytest.mark.parametrize("field", ["store_path_consume_queue", "store_path_index", "store_path_commit_log"])
def test_two_stores_do_not_share_a_directory(tmp_path: Path, field: str) -> None:
    shared = tmp_path / "shared"
    first = open_store(tmp_path / "first", **{field: str(shared)})
    with pytest.raises(StoreError, match="another store is using this directory"):
        open_store(tmp_path / "second", **{field: str(shared)})
    with pytest.raises(StoreError, match=f"{shared}: a broker is using this store"):
        rebuild(str(tmp_path / "second"), config=small(tmp_path / "second", **{field: str(shared)}))
    first.close()
    open_store(tmp_path / "second", **{field: str(shared)})


@pytest.mark.parametrize(
    ("field", "within"),
    [
        ("abort_file", "lock"),
        ("store_checkpoint", "checkpoint"),
        ("store_path_index", "consumequeue"),
        ("store_path_commit_log", "commitlog/more"),
    ],
)
def test_no_path_lies_in_a_store_that_is_in_use(tmp_path: Path, field: str, within: str) -> None:
    other = tmp_path / "other"
    open_store(other)
    with pytest.raises(ConfigError, match=f"a path outside {other}, which another store is using"):
        open_store(tmp_path / "store", **{field: str(other / within)})


@pytest.mark.parametrize("key", ["abortFile", "storeCheckpoint"])
@pytest.mark.parametrize("running", [True, False])
def test_two_stores_do_not_share_a_file(tmp_path: Path, key: str, running: bool) -> None:
    """If two stores shared a file, a clean stop of one store would remove the trace of the other's crash."""
    first, second, setting = (
        tmp_path / "first",
        tmp_path / "second",
        {FIELD_OF_KEY[key]: f"{tmp_path}/shared"},
    )
    store = open_store(first, **setting)
    if not running:
        store.crash()
    with pytest.raises(ConfigError, match=f"belongs to {first} .*shared.owner") as refused:
        open_store(second, **setting)
    assert refused.value.key == key
    with pytest.raises(ConfigError, match=f"belongs to {first}"):
        rebuild(str(second), config=small(second, **setting))
    store.crash()
    assert not open_store(first, **setting).recovered.clean
    store.crash()


@pytest.mark.parametrize("key", ["abortFile", "storeCheckpoint"])
def test_a_store_that_was_moved_gives_its_file_to_its_new_path(tmp_path: Path, key: str) -> None:
    setting = {FIELD_OF_KEY[key]: f"{tmp_path}/shared"}
    open_store(tmp_path / "first", **setting).crash()
    (tmp_path / "first").rename(tmp_path / "second")
    store = open_store(tmp_path / "second", **setting)
    assert not store.recovered.clean
    store.close()
    open_store(tmp_path / "first", store_path_root_dir=str(tmp_path / "first")).close()
    with pytest.raises(ConfigError, match=f"belongs to {tmp_path}/second"):
        open_store(tmp_path / "first", **setting)


@pytest.mark.parametrize("key", ["abortFile", "storeCheckpoint"])
def test_a_file_does_not_lie_in_another_store_whichever_starts_first(tmp_path: Path, key: str) -> None:
    other = tmp_path / "other"
    setting = {FIELD_OF_KEY[key]: str(other / LOCATIONS[key])}
    open_store(tmp_path / "store", **setting).crash()
    with pytest.raises(ConfigError, match=f"belongs to {tmp_path}/store"):
        open_store(other)
    (other / f"{LOCATIONS[key]}.owner").unlink()
    open_store(other).crash()
    with pytest.raises(ConfigError, match=f"a path outside {other}, which belongs to another store"):
        open_store(tmp_path / "store", **setting)


@pytest.mark.parametrize("key", ["abortFile", "storeCheckpoint"])
def test_a_file_does_not_lie_in_a_store_around_the_own_one(tmp_path: Path, key: str) -> None:
    open_store(tmp_path).close()
    with pytest.raises(ConfigError, match=f"a path outside {tmp_path}, which belongs to another store"):
        open_store(tmp_path / "own", **{FIELD_OF_KEY[key]: str(tmp_path / "file")})


def test_a_damaged_record_of_an_owner_keeps_no_store_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "shared.owner").write_bytes(bytes(64))
    open_store(tmp_path / "own", abort_file=f"{tmp_path}/shared").close()
    assert (tmp_path / "shared.owner").read_text() == str(tmp_path / "own")


@pytest.mark.parametrize("moment", ["open", "try_lock"])
def test_of_two_stores_that_start_at_the_same_moment_one_gets_the_file(tmp_path: Path, moment: str) -> None:
    """The other store's whole claim takes place between two steps of this one."""
    shared, first, second = (str(tmp_path / name) for name in ("shared", "first", "second"))
    code = "import sys; from cometmq.store.base import config, disk, guards;"
    code += "root, shared = sys.argv[1:]; disk.make_directory(disk.Disk(), root);"
    code += "guards.StoreLock(disk.Disk(), config.StoreConfig(store_path_root_dir=root, abort_file=shared))"
    others: list[subprocess.CompletedProcess[str]] = []

    class OtherStarts(Disk):
        locks = 0

        def start_other(self) -> None:
            command = [sys.executable, "-c", code, first, shared]
            others.append(subprocess.run(command, check=False, text=True, capture_output=True))

        def open(self, path: str, **how: bool) -> int:
            try:
                return super().open(path, **how)
            finally:
                if moment == "open" and path == f"{shared}.owner" and not others:
                    self.start_other()

        def try_lock(self, fd: int) -> bool:
            locked = super().try_lock(fd)
            self.locks += 1
            if moment == "try_lock" and self.locks > 1:
                self.start_other()
            return locked

    os.mkdir(second)
    config = StoreConfig(store_path_root_dir=second, abort_file=shared)
    if moment == "open":
        with pytest.raises(ConfigError, match=f"belongs to {first}"):
            StoreLock(OtherStarts(), config)
        assert others[0].returncode == 0, others[0].stderr
    else:
        StoreLock(OtherStarts(), config).release()
        assert "StoreInUse: " in others[0].stderr
    assert Path(f"{shared}.owner").read_text() == (first if moment == "open" else second)


def test_a_refused_start_releases_no_lock_of_this_process(tmp_path: Path) -> None:
    setting = {"abort_file": f"{tmp_path}/shared"}
    store = open_store(tmp_path / "first", **setting)
    with pytest.raises(ConfigError, match="belongs to"):
        open_store(tmp_path / "second", **setting)
    code = "import sys; from cometmq.store.base import disk, guards;"
    code += "print(guards.lock_held(disk.Disk(), sys.argv[1]))"
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "first"], stdout=subprocess.PIPE, check=True)
    assert run.stdout == b"True\n"
    store.close()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_a_file_system_that_cannot_lock_directories_is_named_in_a_warning(
    root: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd"))
    store = open_store(root)
    assert len(everything(store)) == 134
    for name in ("commitlog", "consumequeue", "index"):
        assert f"{root / name}: the file system cannot lock directories ({os.strerror(code)})" in caplog.text
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("call", "named"), [("flock", "commitlog"), ("lockf", "lock")])
def test_a_start_that_cannot_lock_names_the_path_and_the_reason(
    root: Path, call: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = errno.EIO if call == "flock" else errno.ENOLCK

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, call, refuse)
        for attempt in (lambda: open_store(root), lambda: rebuild(str(root))):
            with pytest.raises(StoreError, match=rf"{root / named}: .*cannot.* lock.*{os.strerror(code)}"):
                attempt()
    assert len(everything(open_store(root))) == 134  # no lock was left behind


def test_a_copy_beside_its_store_leaves_the_stores_directories_alone(root: Path, tmp_path: Path) -> None:
    """The copied broker.conf contains their paths, and a broker may be using them."""
    places = moved(root, tmp_path / "disk")
    config = small(root, **places)
    (root / "broker.conf").write_text("".join(f"{k}={v}\n" for k, v in config.to_properties().items()))
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    before = sorted((path, path.stat().st_ino) for path in (tmp_path / "disk").rglob("*"))
    assert rebuild(str(copy), clock=ManualClock(AT_MS)).units == 400
    assert (copy / "consumequeue").is_dir()
    assert sorted((path, path.stat().st_ino) for path in (tmp_path / "disk").rglob("*")) == before
    assert verify(str(copy)).sound


def test_stores_with_directories_side_by_side_are_rebuilt_apart(root: Path, tmp_path: Path) -> None:
    other = tmp_path / f"other.{SCRATCH}"
    (tmp_path / SCRATCH).mkdir()
    other.mkdir()
    config = small(root, store_path_consume_queue=str(tmp_path / "queues"))
    (root / "consumequeue").rename(tmp_path / "queues")
    assert rebuild(str(root), config=config, clock=ManualClock(AT_MS)).units == 400
    assert (tmp_path / SCRATCH).exists()
    assert other.exists()
