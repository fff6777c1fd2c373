"""Files that CometMQ creates are private to its user, whatever the umask; existing files keep their mode."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.kit import open_store, send, small

from cometmq.cli.running import RunFile
from cometmq.client.group.offset_files import FileOffsets
from cometmq.message import MessageQueue
from cometmq.namesrv.kv import write_file
from cometmq.private import lock_file, make_private_directory
from cometmq.standalone import Standalone
from cometmq.store import JsonTable
from cometmq.store.inspect.rebuild import rebuild


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Set a umask that restricts nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(root: Path) -> set[tuple[bool, int]]:
    """Return (whether it is a directory, mode) of `root` and everything below it."""
    return {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in (root, *root.rglob("*"))}


PRIVATE = {(True, 0o700), (False, 0o600)}


async def test_servers_and_their_stores(tmp_path: Path) -> None:
    async with Standalone(tmp_path / "new" / "data", namesrv_port=0, broker_port=0) as servers:
        write_file(str(tmp_path / "new/data/namesrv/kvConfig.json"), b"{}")
        assert servers.broker is not None
        send(servers.broker.parts.store, properties=b"KEYS\x01k")
    names = {path.name for path in (tmp_path / "new").rglob("*")}
    assert names >= {"broker.conf", "commitlog", "T", "index", "checkpoint", "topics.json", "kvConfig.json"}
    assert modes(tmp_path / "new") == PRIVATE


def test_a_rebuilt_store(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    send(store, properties=b"KEYS\x01k")
    store.close()
    rebuild(str(tmp_path / "store"), config=small(tmp_path / "store"))
    assert modes(tmp_path / "store") == PRIVATE


def test_run_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMETMQ_RUN_DIR", str(tmp_path / "run/deeper"))
    with RunFile("broker"):
        assert modes(tmp_path / "run") == PRIVATE


async def test_offsets_of_clients(tmp_path: Path) -> None:
    offsets = FileOffsets(str(tmp_path / "offsets" / "client" / "group" / "offsets.json"))
    await offsets.write({MessageQueue("T", "b", 0): 1})
    await offsets.write({MessageQueue("T", "b", 0): 2})
    assert modes(tmp_path / "offsets") == PRIVATE


def test_what_is_there_keeps_its_mode(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir(mode=0o755)
    for name in ("topics.json", "kvConfig.json"):
        (config / name).write_text("{}")
        (config / name).chmod(0o640)
    JsonTable(str(config / "topics.json")).save({"topicConfigTable": {}})
    write_file(str(config / "kvConfig.json"), b"{} ")
    make_private_directory(str(config))
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in (config, *config.glob("*.json"))} == {
        "config": 0o755,
        "topics.json": 0o640,
        "kvConfig.json": 0o640,
    }


@pytest.mark.parametrize("made", ["file", "dangling"])
def test_a_directory_that_is_none_is_an_error(tmp_path: Path, made: str) -> None:
    place = tmp_path / made
    if made == "file":
        place.touch()
    else:
        place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        make_private_directory(str(place))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("child_unlocks", [False, True])
def test_a_lock_ends_with_its_owner_and_not_with_a_child(tmp_path: Path, child_unlocks: bool) -> None:
    path = str(tmp_path / "lock")
    unlock = lock_file(path)
    (go_on, end), (ready, begun) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        if child_unlocks:
            unlock()
        os.close(end)
        os.write(begun, b"x")
        os.read(go_on, 1)
        os._exit(0)
    assert os.read(ready, 1) == b"x"
    with pytest.raises(BlockingIOError):
        lock_file(path)
    unlock()
    lock_file(path)()
    os.close(end)
    os.waitpid(child, 0)
    for descriptor in (go_on, ready, begun):
        os.close(descriptor)
