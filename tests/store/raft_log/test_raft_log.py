"""The log of a raft member, as a leader writes it and followers append it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tests.store.kit import committed, delete_topic, numbered, put, put_batch
from tests.store.raft_log.members import add, again, agree, elect, hand_over, leader, member, raft_log, seen

from cometmq.errors import StoreError
from cometmq.protocol.batch import encode_batch
from cometmq.store import MessageStore
from cometmq.store.raft_log.member_files import read_checkpoint
from cometmq.store.raft_log.raft_log import RaftLogMismatch
from cometmq.store.writing import queue_order


def item(body: bytes) -> bytes:
    """Build a message of a batch."""
    return encode_batch([(0, body, b"")])


HEAD = struct.Struct(">iiqqqiiii")


def data_files(store: MessageStore) -> dict[str, bytes]:
    directory = Path(store.config.root) / f"dledger-{store.config.d_leger_self_id}" / "data"
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def heads(store: MessageStore) -> list[tuple[int, ...]]:
    """Read (magic, size, index, term, position, record size) of each entry from the files."""
    found = []
    for name, data in data_files(store).items():
        at = 0
        while at + HEAD.size <= len(data):
            magic, size, index, term, position, *zeros, length = HEAD.unpack_from(data, at)
            if magic != 1:
                assert magic == 0 or struct.unpack_from(">ii", data, at) == (-1, len(data) - at)
                break
            assert zeros == [0, 0, 0]
            assert position == int(name) + at
            assert struct.unpack_from(">q", data, at + HEAD.size + 28) == (position + HEAD.size,)
            found.append((magic, size, index, term, position, length))
            at += size
    return found


def test_each_record_is_an_entry(tmp_path: Path) -> None:
    store = leader(tmp_path, 3)
    add(store, b"one", b"two")
    put_batch(store, item(b"three") + item(b"four"))
    committed(store.commit())
    found = heads(store)
    assert [(index, term) for _, _, index, term, _, _ in found] == [(0, 3), (1, 3), (2, 3), (3, 3), (4, 3)]
    assert all(size == length + 48 for _, size, _, _, _, length in found)
    assert [raft_log(store).location_of(each[2]) for each in found] == [
        (position, size, term) for _, size, _, term, position, _ in found
    ]


def test_readers_see_what_is_committed_and_nothing_else(tmp_path: Path) -> None:
    store = leader(tmp_path)
    add(store, *numbered(3))
    put_batch(store, item(b"3") + item(b"4") + item(b"5"))
    put(store, b"6")
    committed(store.commit())
    told: list[int] = []
    store.dispatcher.on_visible = lambda count, _arrivals: told.append(count)
    for index in range(1, 8):
        assert seen(store) == numbered(index - 1)
        raft_log(store).commit_to(index)
    assert seen(store) == numbered(7)
    assert sum(told) == 7


def test_a_follower_has_the_same_files(tmp_path: Path) -> None:
    one = leader(tmp_path / "1")
    two = member(tmp_path / "2", name="n1")
    for number in range(300):
        add(one, b"%d:" % number + bytes(700), topic="TU"[number % 2], queue_id=number % 3)
        if number % 7 == 0:
            put_batch(one, b"".join(item(b"%d" % number) for _ in range(5)))
            committed(one.commit())
    hand_over(one, two, 5000)
    assert seen(two) == []
    agree(one)
    agree(two)
    assert len(data_files(one)) > 3
    assert data_files(one) == data_files(two)
    for topic in "TU":
        for queue_id in range(3):
            assert seen(one, topic, queue_id) == seen(two, topic, queue_id) != []


def test_a_follower_becomes_leader_and_its_queues_go_on(tmp_path: Path) -> None:
    one, two = leader(tmp_path / "1"), member(tmp_path / "2", name="n1")
    add(one, *numbered(5))
    hand_over(one, two)
    agree(two)
    elect(two, 2)
    add(two, b"5")
    agree(two)
    assert seen(two) == numbered(6)
    assert raft_log(two).term_of(5) == 1
    assert raft_log(two).term_of(raft_log(two).last) == 2


@pytest.mark.parametrize("clean", [True, False])
def test_after_a_restart_the_rest_is_still_to_be_committed(tmp_path: Path, clean: bool) -> None:
    store = leader(tmp_path)
    add(store, *numbered(4))
    agree(store)
    raft_log(store).save()
    add(store, b"4", b"5")
    store = again(store, clean=clean)
    log = raft_log(store)
    assert (log.first, log.last, log.committed) == (0, 6, 4)
    assert seen(store) == numbered(4)
    log.commit_to(5)
    assert seen(store) == numbered(5)
    log.commit_to(6)
    assert seen(store) == numbered(6)
    elect(store, 2)
    add(store, b"6")
    agree(store)
    assert seen(again(store)) == numbered(7)


def test_a_leader_must_have_all_committed_before_it_takes_messages(tmp_path: Path) -> None:
    store = member(tmp_path)
    log = raft_log(store)
    log.lead(1)
    log.append_own(b"{}")
    committed(store.commit())
    with pytest.raises(StoreError, match="are committed up to -1 only"):
        log.take_messages()
    put_result = store.appender
    assert put_result.why_closed
    log.commit_to(0)
    log.take_messages()
    assert not store.appender.why_closed
    log.follow()
    assert "leader" in store.appender.why_closed


# -- what a follower refuses -----------------------------------------------------------------------


def entry_bytes(store: MessageStore, first: int, stop: int) -> bytes:
    log = raft_log(store)
    return bytes(log.read(log.range(first, stop, 1 << 20)))


def damaged(data: bytes) -> bytes:
    return data[:300] + bytes([data[300] ^ 1]) + data[301:]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[1:], "damaged"),
        (lambda data: data[:-1], "damaged"),
        (lambda data: data[:20], "no entry"),
        (damaged, "damaged"),
        (lambda data: data[:8] + bytes(7) + b"\x07" + data[16:], "damaged|consecutive"),
    ],
)
def test_entries_that_are_damaged_are_refused(tmp_path: Path, change, problem: str) -> None:  # type: ignore[no-untyped-def]
    one, two = leader(tmp_path / "1"), member(tmp_path / "2", name="n1")
    add(one, *(bytes([65 + number]) * 100 for number in range(3)))
    data = entry_bytes(one, 0, 4)
    with pytest.raises(RaftLogMismatch, match=problem):
        raft_log(two).append(change(data))
    assert raft_log(two).append(data) == 3
    committed(two.commit())
    assert raft_log(two).last == 3


def test_entries_must_go_on_from_the_log(tmp_path: Path) -> None:
    one, two = leader(tmp_path / "1", 2), member(tmp_path / "2", name="n1")
    add(one, *numbered(5))
    hand_over(one, two, stop=3)
    for first in (0, 2, 4):
        with pytest.raises(RaftLogMismatch) as caught:
            raft_log(two).append(entry_bytes(one, first, 6))
        assert (caught.value.expected, caught.value.got) == (3, first)
    other = leader(tmp_path / "3", 1)
    add(other, *numbered(5))
    with pytest.raises(RaftLogMismatch, match="term"):
        raft_log(two).append(entry_bytes(other, 3, 5))


def test_a_term_never_changes_within_a_range(tmp_path: Path) -> None:
    store = leader(tmp_path, 1)
    add(store, *numbered(3))
    agree(store)
    elect(store, 2)
    log = raft_log(store)
    assert log.fit(0, log.last + 1) == 4
    assert log.range(0, 5, 100).stop == 1
    with pytest.raises(StoreError, match="entry 5 does not exist"):
        log.range(5, 6, 100)


def test_an_empty_member_begins_where_its_leader_does(tmp_path: Path) -> None:
    one, two = leader(tmp_path / "1"), member(tmp_path / "2", name="n1")
    for number in range(100):
        add(one, b"%d:" % number + bytes(2000))
    agree(one)
    one.log.forget_first()
    first = raft_log(one).first
    assert first > 20
    raft_log(two).append(entry_bytes(one, first, first + 3))
    committed(two.commit())
    assert (raft_log(two).first, raft_log(two).last) == (first, first + 2)
    hand_over(one, two)
    agree(two)
    assert seen(two)[-1] == seen(one)[-1]
    two = again(two)
    assert (raft_log(two).first, raft_log(two).last) == (first, 100)


# -- truncation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("index", [4, 5, 40, 63, 64, 100])
def test_a_cut_log_goes_on_from_there(tmp_path: Path, index: int, clean: bool) -> None:
    one, two = leader(tmp_path / "1"), member(tmp_path / "2", name="n1")
    for number in range(100):
        add(one, b"%d:" % number + bytes(2000))
    hand_over(one, two)
    raft_log(two).commit_to(3)
    raft_log(two).cut(index)
    two = again(two, clean=clean) if index % 2 else two
    log = raft_log(two)
    assert log.last == index - 1
    three = leader(tmp_path / "3", 1)
    hand_over(one, three, stop=index)
    agree(three)
    elect(three, 2)
    for number in range(50):
        add(three, b"new %d:" % number + bytes(1500))
    hand_over(three, two)
    agree(three)
    agree(two)
    assert data_files(two) == data_files(three)
    raft_log(two).save()
    two = again(two, clean=clean)
    assert seen(two)[: index - 1] == [b"%d:" % number + bytes(2000) for number in range(index - 1)]
    assert seen(two) == seen(three)


def test_what_a_topic_gets_in_the_place_of_a_cut_is_not_of_the_deleted_one(tmp_path: Path) -> None:
    store = leader(tmp_path)
    add(store, b"old")
    agree(store)
    add(store, *numbered(20))
    delete_topic(store, "T")
    raft_log(store).follow()
    raft_log(store).cut(2)
    elect(store, 2)
    add(store, b"new")
    agree(store)
    store = again(store, clean=False)
    agree(store)
    assert seen(store) == [b"new"]
    store.close()


def test_what_is_committed_is_never_cut(tmp_path: Path) -> None:
    store = leader(tmp_path)
    add(store, *numbered(5))
    raft_log(store).commit_to(3)
    for index in (0, 3):
        with pytest.raises(StoreError, match="entry 3 is committed"):
            raft_log(store).cut(index)
    raft_log(store).cut(4)
    assert raft_log(store).last == 3
    assert seen(store) == numbered(3)


async def test_a_cut_waits_for_the_sync_under_way(tmp_path: Path) -> None:
    store = member(tmp_path, flush_disk_type="SYNC_FLUSH")
    store.start()
    elect(store, 1)
    synced: list[int] = []
    raft_log(store).on_synced = synced.append
    add(store, *numbered(50))
    await raft_log(store).truncate(20)
    assert raft_log(store).last == 19
    assert store.flusher.flushed <= store.log.end
    assert max(synced, default=0) <= 50
    add(store, b"more")
    await raft_log(store).truncate(21)
    assert raft_log(store).persisted == 20
    await store.stop()


async def test_how_far_the_log_is_gets_noted_in_the_background(tmp_path: Path) -> None:
    store = member(tmp_path)
    store.start()
    elect(store, 1)
    add(store, *numbered(5))
    store.flusher.request()
    await raft_log(store).save_in_thread(store.executor)
    assert read_checkpoint(store.disk, store.config.raft_log_dir).end == 5
    await store.stop()


async def test_a_log_that_begins_anew_opens_again_after_a_kill(tmp_path):
    """The reset log may still be empty, and the checkpoint may have been written since."""
    store = leader(tmp_path)
    add(store, b"one", b"two")
    agree(store)
    store.flusher.flush_now()
    await raft_log(store).reset(5_000)
    assert (raft_log(store).first, raft_log(store).last) == (5_000, 4_999)
    raft_log(store).save()
    store = again(store, clean=False)
    assert raft_log(store).last == raft_log(store).first - 1
    store.close()


async def test_a_log_that_begins_anew_may_be_far_behind(tmp_path, monkeypatch):
    """The gap before the queue's next message is larger than the largest gap allowed for lost messages."""
    monkeypatch.setattr(queue_order, "MAX_GAP_UNITS", 5)
    source, target = leader(tmp_path / "a"), member(tmp_path / "b", name="n1")
    add(source, *(b"%d" % number + bytes(3000) for number in range(60)))
    agree(source)
    hand_over(source, target, stop=5)
    raft_log(target).commit_to(4)
    target.queues.write_dirty()
    places = raft_log(source).location_of
    first = next(index for index in range(60) if places(index).position >= source.log.segment_size)
    await raft_log(target).reset(first)
    hand_over(source, target)
    raft_log(target).commit_to(raft_log(source).last)
    assert seen(target) == seen(source)[first - 1 :]
    target = again(target)
    assert seen(target) == seen(source)[first - 1 :]
    target.close()
