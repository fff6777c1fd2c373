"""Hostile content in a store: links, pipes, devices, endless files and forged records.

No tool and no broker follows it out of the store, waits for it, or fills the disk because of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store.kit import delete_topic, everything, in_place, open_store, send, send_all, small

from cometmq.errors import StoreError
from cometmq.store import MessageStore
from cometmq.store.inspect.rebuild import rebuild
from cometmq.store.inspect.record_finder import RecordFinder
from cometmq.store.inspect.stats import store_stats
from cometmq.store.inspect.verify import verify

QUEUE = "consumequeue/T/0"
FIRST = f"{0:020d}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a stopped store of 20 messages with keys."""
    directory = tmp_path_factory.mktemp("built")
    store = open_store(directory)
    for number in range(20):
        send(store, b"%d" % number, properties=b"KEYS\x01k%d" % number)
    store.close()
    return directory


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    """Copy the built store."""
    return Path(shutil.copytree(built, tmp_path / "store"))


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory outside every store, which must not change."""
    directory = tmp_path / "outside"
    (directory / "0").mkdir(parents=True)
    files = [directory / "mine", directory / FIRST, directory / "0" / FIRST]
    for file in files:
        file.write_bytes(b"mine")
    yield directory
    assert [file.read_bytes() for file in files] == [b"mine"] * 3
    assert sorted(path.name for path in directory.iterdir()) == sorted(["mine", FIRST, "0"])
    assert os.listdir(directory / "0") == [FIRST]


def dump(root: str) -> object:
    with RecordFinder(root, config=small(root)) as find:
        find.by_key("k3", None)
        return [*find.of_log(), *find.of_queue("T", 0)]


def opened(root: str) -> object:
    store = open_store(root)
    try:
        return everything(store)
    finally:
        store.close()


READERS: dict[str, Callable[[str], object]] = {
    "verify": lambda root: verify(root, config=small(root)),
    "dump": dump,
    "stats": lambda root: store_stats(root, config=small(root)),
}
ALL = {**READERS, "rebuild": lambda root: rebuild(root, config=small(root)), "broker": opened}


def put_instead(path: Path, kind: str, target: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "endless":
        with path.open("wb") as file:
            file.truncate(8 << 40)
            file.seek(0)
            file.write(bytes(8) + b"\0\0\0\x64" + bytes(8))
            file.seek((8 << 40) - 20)
            file.write(b"\1" * 20)


PLACES = (
    f"commitlog/{FIRST}",
    f"{QUEUE}/{FIRST}",
    f"index/{20231114221320000}",
    "checkpoint",
    "config/topics.json",
)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("place", [*PLACES, "consumequeue/T/0", "consumequeue/T", "consumequeue_ext/T/0"])
@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_nothing_is_followed_waited_for_or_changed_outside(
    root: Path, outside: Path, kind: str, place: str, name: str
) -> None:
    target = outside if "." not in place and not place.endswith(FIRST) else outside / "mine"
    put_instead(root / place, kind, target)
    try:
        ALL[name](str(root))
    except (StoreError, OSError) as refusal:
        problem = str(refusal)
    else:
        problem = str(root)
    assert str(root) in problem  # an error names the path


@pytest.mark.parametrize("place", [f"commitlog/{FIRST}", f"{QUEUE}/{FIRST}", "index/20231114221320000"])
@pytest.mark.parametrize("name", READERS)
def test_a_file_longer_than_any_is_not_walked_through(root: Path, place: str, name: str) -> None:
    put_instead(root / place, "endless", root)
    try:
        READERS[name](str(root))
    except StoreError:
        assert name == "dump"  # the queue no longer exists
    if name == "verify":
        kinds = {finding.kind for finding in verify(str(root), config=small(root)).findings}
        assert "too-long" in kinds


def test_a_long_sparse_file_is_read_up_to_the_length_of_its_neighbours(root: Path) -> None:
    file = root / QUEUE / f"{2000:020d}"
    with file.open("wb") as stream:
        stream.truncate(1 << 30)
        stream.seek((1 << 30) - 20)
        stream.write(b"\1" * 20)
    assert store_stats(str(root), config=small(root)).messages == 20
    (finding,) = [each for each in verify(str(root), config=small(root)).findings if each.path == str(file)]
    assert finding.kind == "queue-length"


def test_settings_that_are_no_text_of_a_person_are_not_read(root: Path) -> None:
    with (root / "broker.conf").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match=r"broker\.conf: the settings have more than"):
        verify(str(root))


def test_a_made_up_name_does_not_make_a_queue_endless(root: Path) -> None:
    shutil.copy(root / QUEUE / FIRST, root / QUEUE / f"{2000 * 10**14:020d}")
    assert store_stats(str(root), config=small(root)).messages == 40
    report = verify(str(root), config=small(root))
    assert {finding.kind for finding in report.findings} >= {"queue-file-missing"}


def test_verify_calls_it_by_name(root: Path, outside: Path) -> None:
    places = [root / place for place in (f"{QUEUE}/{FIRST}", "consumequeue/U", "config/x.json", "checkpoint")]
    for place in places:
        put_instead(place, "link", outside)
    findings = verify(str(root), config=small(root)).findings
    named = {each.path for each in findings if each.severity == "error" and "link" in each.problem}
    assert named == set(map(str, places))


@pytest.mark.parametrize("place", ["rebuild.tmp", "consumequeue", "index"])
def test_a_rebuild_replaces_no_link(root: Path, outside: Path, place: str) -> None:
    put_instead(root / place, "link", outside)
    with pytest.raises(StoreError, match="a symbolic link") as refused:
        rebuild(str(root), config=small(root))
    assert str(root / place) in str(refused.value)


def test_a_rebuild_that_was_killed_leaves_nothing_that_the_next_follows(root: Path, outside: Path) -> None:
    (root / "rebuild.tmp/index.old").mkdir(parents=True)
    (root / "rebuild.tmp/index.old/x").symlink_to(outside)
    (root / "rebuild.tmp/consumequeue").symlink_to(outside)
    assert rebuild(str(root), config=small(root)).units == 20
    assert not (root / "rebuild.tmp").exists()


@pytest.mark.parametrize("whole", [True, False])
def test_a_store_or_its_parts_on_another_disk_go_on(root: Path, tmp_path: Path, whole: bool) -> None:
    moved = [root] if whole else [root / name for name in ("commitlog", "consumequeue", "index", "config")]
    for number, directory in enumerate(moved):
        shutil.move(directory, tmp_path / f"disk{number}")
        directory.symlink_to(tmp_path / f"disk{number}")
    store = open_store(root)
    send(store, b"20")
    assert len(everything(store)) == 21
    delete_topic(store, "T")
    store.close()
    assert verify(str(root), config=small(root)).sound
    assert all(directory.is_symlink() for directory in moved)


@pytest.mark.parametrize("trash", [".deleted", ".deleted/gone-0", ".deleted/gone-0/0"])
def test_emptying_the_trash_empties_nothing_else(root: Path, outside: Path, trash: str) -> None:
    store = open_store(root)
    place = root / "consumequeue" / trash
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(outside)
    store.queues.empty_trash()


@pytest.mark.parametrize("topic", ["../../outside", "..", ".", "", "../config", ".deleted"])
def test_the_deletion_of_a_topic_that_names_no_directory_moves_none(
    root: Path, outside: Path, topic: str
) -> None:
    assert outside.is_dir()
    store = open_store(root)
    assert delete_topic(store, topic) == 0
    assert len(everything(store)) == 20
    store.close()
    assert (root / "config").is_dir()


@pytest.mark.parametrize("place", ["consumequeue/New", "consumequeue/New/0"])
def test_a_new_queue_does_not_begin_behind_a_link(root: Path, outside: Path, place: str) -> None:
    store = open_store(root)
    put_instead(root / place, "link", outside)
    send(store, topic="New")
    with pytest.raises(OSError, match="link"):
        store.queues.write_dirty()


def test_the_ext_files_of_a_deleted_topic_are_those_of_the_store(root: Path, outside: Path) -> None:
    (root / "consumequeue_ext/T").mkdir(parents=True)
    (root / "consumequeue_ext/T/0").symlink_to(outside)
    store = open_store(root)
    delete_topic(store, "T")
    in_place(store.retention.derived_cycle())


def test_the_lock_is_not_written_through_a_link(root: Path, outside: Path) -> None:
    put_instead(root / "lock", "link", outside / "mine")
    with pytest.raises(OSError, match="link"):
        open_store(root)


# -- forged records


def rewrite(root: Path, change: Callable[[int, bytearray], None], *, topic: bytes) -> None:
    """Change every record of the log in place, outside its checksum; delete queues, index and checkpoint."""
    path = root / "commitlog" / FIRST
    data = bytearray(path.read_bytes())
    at = number = 0
    while size := int.from_bytes(data[at : at + 4], "big"):
        record = data[at : at + size]
        change(number, record)
        data[at : at + size] = record.replace(b"TopicTopicTopic", topic)
        at, number = at + size, number + 1
    path.write_bytes(data)
    for part in ("consumequeue", "index"):
        shutil.rmtree(root / part)
    (root / "abort").touch()
    for name in ("checkpoint", "config/consumeQueueEnds.json"):
        (root / name).unlink()


def three(root: Path) -> None:
    store = open_store(root)
    send_all(store, [b"hello"] * 3, topic="TopicTopicTopic")
    store.close()


def unchanged(_number: int, _record: bytearray) -> None:
    pass


def far_apart(number: int, record: bytearray) -> None:
    record[20:28] = (number * 1_000_000).to_bytes(8, "big")


def rebuilt_units(root: Path) -> tuple[int, int]:
    report = rebuild(str(root), config=small(root))
    return report.units, report.not_served


def recovered_units(root: Path) -> tuple[int, int]:
    store: MessageStore = open_store(root)
    units = sum(queue.max_offset - queue.min_offset for queue in store.queues)
    notes = len(store.recovered.notes)
    store.crash()
    return units, notes


@pytest.mark.parametrize("walk", [rebuilt_units, recovered_units])
def test_offsets_far_apart_are_damage_and_no_room_for_fillers(
    tmp_path: Path, walk: Callable[[Path], tuple[int, int]]
) -> None:
    three(tmp_path)
    rewrite(tmp_path, far_apart, topic=b"TopicTopicTopic")
    assert walk(tmp_path) == (1, 2)


@pytest.mark.parametrize("walk", [rebuilt_units, recovered_units])
@pytest.mark.parametrize(
    "topic", [b"../../../outsid", b"/tmp/absolute/x", b"x/../../outside", b"T/0/../../../x/"]
)
def test_a_record_makes_no_directory_outside(
    tmp_path: Path, topic: bytes, walk: Callable[[Path], tuple[int, int]]
) -> None:
    root = tmp_path / "a/b/store"
    three(root)
    rewrite(root, unchanged, topic=topic)
    before = sorted(path for path in tmp_path.rglob("*") if root not in path.parents)
    assert walk(root) == (0, 3)
    assert sorted(path for path in tmp_path.rglob("*") if root not in path.parents) == before
    assert [path.name for path in (root / "consumequeue").iterdir()] == []
    assert not Path("/tmp/absolute").exists()
    assert "topic-name" in {finding.kind for finding in verify(str(root), config=small(root)).findings}
    with RecordFinder(str(root), config=small(root)) as find:
        assert len(list(find.of_log())) == 3  # `dump` still shows them
