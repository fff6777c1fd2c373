"""Files deleted under a running store, and more queues than the limit of open files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store.kit import (
    bodies,
    by_key,
    committed,
    everything,
    finds,
    open_store,
    put,
    restarted,
    run_retention,
    send,
)

from cometmq.store import GetStatus, MessageStore, StoreRefused


def running(root: Path) -> MessageStore:
    """Open 300 messages of 1 KiB in five segments and three queue files, nothing in memory or open."""
    store = open_store(root)
    for number in range(300):
        put(store, b"%03d" % number + bytes(1000), properties=b"KEYS\x01k%d" % number)
    committed(store.commit())
    store.close()
    return open_store(root)


def numbers(found: list[bytes]) -> list[int]:
    return [int(body[:3]) for body in found]


def test_a_segment_deleted_under_a_running_store_costs_its_messages_only(tmp_path: Path) -> None:
    store = running(tmp_path)
    (tmp_path / "commitlog" / f"{65536:020d}").unlink()
    left = numbers(everything(store))
    assert left[:58] == list(range(58))
    assert left[-1] == 299
    assert 230 < len(left) < 250
    assert by_key(store, "T", "k100") == []
    assert send(store, b"300").queue_offset == 300
    store = restarted(store)
    assert numbers(everything(store)) == [*left, 300]


def test_the_newest_segment_deleted_stops_the_sends_with_the_reason(tmp_path: Path) -> None:
    store = running(tmp_path)
    newest = max((tmp_path / "commitlog").iterdir())
    newest.unlink()
    run_retention(store)
    with pytest.raises(StoreRefused, match=f"{newest.name} has been deleted") as refused:
        put(store)
    assert refused.value.response_code == 14
    assert numbers(everything(store)) == list(range(295))
    store.close()
    store = open_store(tmp_path)  # a restart works, without the messages of that file
    assert numbers(everything(store)) == list(range(295))
    assert send(store).queue_offset == 300  # no offset is assigned twice


def test_a_queue_file_deleted_under_a_running_store_comes_back_with_the_next_start(tmp_path: Path) -> None:
    store = running(tmp_path)
    path = tmp_path / "consumequeue" / "T" / "0" / f"{2000:020d}"
    store.files.drop(str(path))
    path.unlink()
    answer = store.get_messages("T", 0, 120, 32)
    assert (answer.status, answer.next_begin_offset) == (GetStatus.OFFSET_FOUND_NULL, 200)
    assert numbers(bodies(store.get_messages("T", 0, 250, 1))) == [250]
    assert send(store, b"300").queue_offset == 300
    store = restarted(store)
    assert numbers(everything(store)) == list(range(301))


@pytest.mark.parametrize("what", ["index", "consumequeue"])
def test_directories_deleted_under_a_running_store_come_back_with_the_next_start(
    tmp_path: Path, what: str
) -> None:
    store = running(tmp_path)
    shutil.rmtree(tmp_path / what)
    for number in range(300, 320):
        put(store, b"%d" % number + bytes(1000), properties=b"KEYS\x01k%d" % number)
        committed(store.commit())
    store.get_messages("T", 0, 0, 32)
    by_key(store, "T", "k3")
    store = restarted(store)
    assert numbers(everything(store)) == list(range(320))
    finds(store, (0, 150, 299, 319))


FEW_DESCRIPTORS = """
import os, resource, sys
from tests.store.kit import committed, drop_first_segment, everything, open_store, put

limit = 650
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
most = 0

def look():
    global most
    most = max(most, len(os.listdir("/proc/self/fd")))

def fill(store, first):
    for number in range(first, first + 2000):
        topic, keys = f"topic{number % 1000 // 4}", b"KEYS\\x01k%d" % number
        put(store, b"%d" % number, topic, number % 4, properties=keys)
        if number % 100 == 99:
            committed(store.commit())
            store.queues.write_dirty()
            look()

store = open_store(sys.argv[1])
fill(store, 0)
store.crash()
store = open_store(sys.argv[1])
fill(store, 2000)
for queue in list(store.queues):
    assert len(everything(store, queue.topic, queue.queue_id)) == 4, queue.path
    look()
store.close()
store = open_store(sys.argv[1])
while len(store.log.segments) > 1:
    drop_first_segment(store)
    look()
assert len(store.queues) == 1000
for queue in list(store.queues):
    found = everything(store, queue.topic, queue.queue_id)
    assert len(found) == queue.max_offset - queue.min_offset < 4
    look()
store.close()
mapped = [line for line in open("/proc/self/maps") if sys.argv[1] in line]
assert not mapped, mapped
assert most < limit, most
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_more_queues_than_files_may_be_open(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS, str(tmp_path / "store")],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
