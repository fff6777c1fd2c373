"""Deliberate changes of minimum offsets: purges, and the retention of single topics."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import (
    START_MS,
    delete_topic,
    everything,
    in_place,
    numbered,
    open_store,
    put,
    run_topic_retention,
    send,
    send_all,
)

from cometmq.store import GetStatus, ManualClock, MessageStore
from cometmq.store.background.topic_retention import TopicLimit

MINUTE = 60_000


def minutely(root: Path, count: int = 10, body: bytes = b"hello") -> tuple[MessageStore, ManualClock]:
    """Store one message per minute in T and one in U."""
    clock = ManualClock(START_MS)
    store = open_store(root, clock=clock)
    for _ in range(count):
        put(store, body, "T")
        send(store, body, "U")
        clock.advance(60)
    return store, clock


def test_an_age_moves_the_queues_of_its_topic_only(tmp_path: Path) -> None:
    store, _ = minutely(tmp_path)
    store.topic_retention.set_limits({"T": TopicLimit(age_ms=3 * MINUTE)})

    assert run_topic_retention(store) == 7
    assert (store.min_offset("T", 0), store.min_offset("U", 0)) == (7, 0)
    answer = store.get_messages("T", 0, 2, 32)
    assert (answer.status, answer.next_begin_offset) == (GetStatus.OFFSET_TOO_SMALL, 7)
    assert len(everything(store)) == 3


def test_everything_may_grow_too_old(tmp_path: Path) -> None:
    store, clock = minutely(tmp_path)
    store.topic_retention.set_limits({"T": TopicLimit(age_ms=MINUTE)})
    clock.advance(60)

    run_topic_retention(store)

    assert store.min_offset("T", 0) == store.max_offset("T", 0) == 10
    assert send(store, topic="T").queue_offset == 10
    assert everything(store) == [b"hello"]


@pytest.mark.parametrize("stored_meanwhile", [False, True])
@pytest.mark.parametrize("jump_s", [10 * 60, 365 * 86_400])
def test_a_clock_that_jumps_forward_for_a_while_hides_nothing(
    tmp_path: Path, jump_s: int, stored_meanwhile: bool
) -> None:
    store, clock = minutely(tmp_path)
    store.topic_retention.set_limits({"T": TopicLimit(age_ms=15 * MINUTE)})
    clock.now_ms += jump_s * 1000
    if stored_meanwhile:
        send(store, topic="T")
    assert run_topic_retention(store) == 0
    clock.advance(10)
    assert run_topic_retention(store) == 0
    clock.now_ms -= jump_s * 1000
    store.close()

    store = open_store(tmp_path, clock=clock)
    assert (store.min_offset("T", 0), len(everything(store))) == (0, 10 + stored_meanwhile)


def test_a_start_with_a_clock_far_ahead_hides_nothing_for_an_hour(tmp_path: Path) -> None:
    store, clock = minutely(tmp_path)
    store.close()
    clock.now_ms += 365 * 86_400_000
    store = open_store(tmp_path, clock=clock)
    store.topic_retention.set_limits({"T": TopicLimit(age_ms=100 * MINUTE)})
    for _ in range(59):
        assert run_topic_retention(store) == 0
        clock.advance(60)
    clock.advance(60)
    assert run_topic_retention(store) == 10  # the new time is trusted by now


def test_messages_stored_while_the_clock_was_behind_do_not_take_older_ones_along(tmp_path: Path) -> None:
    store, clock = minutely(tmp_path, 4)
    clock.now_ms -= 86_400_000
    send_all(store, [b"hello"] * 8, topic="T")
    clock.now_ms += 86_400_000
    store.topic_retention.set_limits({"T": TopicLimit(age_ms=2 * MINUTE)})
    run_topic_retention(store)
    assert store.min_offset("T", 0) == 2


@pytest.mark.parametrize(("kept", "minimum"), [(10, 0), (9, 1), (1, 9), (0.5, 10)])
def test_bytes_keep_the_newest_that_fit(tmp_path: Path, kept: float, minimum: int) -> None:
    store, _ = minutely(tmp_path)
    size = send(store, topic="Size-T").size - len("Size-T") + 1
    store.topic_retention.set_limits({"T": TopicLimit(bytes_per_queue=int(kept * size))})

    run_topic_retention(store)

    assert store.min_offset("T", 0) == minimum


def test_bytes_are_counted_on_from_where_the_last_pass_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cometmq.store.background.topic_retention._UNITS_PER_READ", 7)
    monkeypatch.setattr("cometmq.store.background.topic_retention._UNITS_PER_CYCLE", 20)
    store = open_store(tmp_path)
    sizes = [send(store, bytes(number % 13)).size for number in range(150)]
    limit = sum(sizes[-30:])
    store.topic_retention.set_limits({"T": TopicLimit(bytes_per_queue=limit)})

    passes = 0
    while store.min_offset("T", 0) < 120 and passes < 20:
        run_topic_retention(store)
        passes += 1
        assert store.min_offset("T", 0) <= 120
    assert passes >= 5
    sizes.append(send(store, bytes(500)).size)
    run_topic_retention(store)

    first = store.min_offset("T", 0)
    assert sum(sizes[first:]) <= limit < sum(sizes[first - 1 :])


def test_bytes_of_a_deleted_topic_do_not_count_for_one_of_its_name(store: MessageStore) -> None:
    store.topic_retention.set_limits({"T": TopicLimit(bytes_per_queue=30_000)})
    send_all(store, [bytes(2500)] * 10)
    run_topic_retention(store)
    delete_topic(store, "T")
    send_all(store, [bytes(100)] * 50)
    assert run_topic_retention(store) == 0
    assert store.min_offset("T", 0) == 0


def test_a_purge_outlives_restarts_and_the_rebuild_of_queues(tmp_path: Path) -> None:
    store, clock = minutely(tmp_path)
    assert in_place(store.topic_retention.plan_purge("T")) == [(0, 0, 10, 10)]
    assert in_place(store.topic_retention.plan_purge("T", before_ms=START_MS + 4 * MINUTE)) == [(0, 0, 4, 10)]
    assert in_place(store.topic_retention.plan_purge("T", queue_id=3)) == []

    in_place(store.topic_retention.raise_min_offsets("T", {0: 4}))
    assert len(everything(store)) == 6
    store.close()
    store = open_store(tmp_path, clock=clock)
    assert store.min_offset("T", 0) == 4
    store.crash()
    shutil.rmtree(tmp_path / "consumequeue")
    store = open_store(tmp_path, clock=clock)

    assert (store.min_offset("T", 0), store.max_offset("T", 0)) == (4, 10)
    assert len(everything(store)) == 6
    assert store.min_offset("U", 0) == 0


def test_a_deleted_topic_takes_its_purge_along(tmp_path: Path) -> None:
    store, clock = minutely(tmp_path)
    in_place(store.topic_retention.raise_min_offsets("T", {0: 10}))
    delete_topic(store, "T")
    assert send(store, b"new").queue_offset == 0
    store.close()

    store = open_store(tmp_path, clock=clock)
    assert everything(store) == [b"new"]


def test_the_backup_of_the_floors_does_not_hide_a_topic_made_again(tmp_path: Path) -> None:
    store, clock = minutely(tmp_path)
    in_place(store.topic_retention.raise_min_offsets("T", {0: 10}))
    delete_topic(store, "T")
    send_all(store, numbered(12))
    store.close()
    (tmp_path / "config" / "queueMinOffsets.json").write_bytes(b"\xff")
    store = open_store(tmp_path, clock=clock)
    assert everything(store) == numbered(12)


def test_a_purge_does_not_hide_what_follows_lost_messages(tmp_path: Path) -> None:
    """A power failure has lost the queue's newest messages, and their offsets are assigned again."""
    store, clock = minutely(tmp_path, 5)
    store.close()
    short = tmp_path.with_name("short")
    shutil.copytree(tmp_path, short)
    store = open_store(tmp_path, clock=clock)
    send(store)
    in_place(store.topic_retention.raise_min_offsets("T", {0: 6}))
    store.close()
    shutil.copy(tmp_path / "config" / "queueMinOffsets.json", short / "config")

    for _ in range(2):
        store = open_store(short, clock=clock)
        assert send(store, b"new").queue_offset in (5, 6)
        store.close()

    store = open_store(short, clock=clock)
    assert everything(store) == [b"new", b"new"]


def test_a_purge_that_cannot_be_kept_changes_nothing(
    tmp_path: Path, disk: FaultyDisk, store: MessageStore
) -> None:
    send(store)
    send(store)

    (tmp_path / "config" / "queueMinOffsets.json.tmp").mkdir(parents=True)
    with pytest.raises(OSError):
        in_place(store.topic_retention.raise_min_offsets("T", {0: 1}))
    assert store.min_offset("T", 0) == 0
    (tmp_path / "config" / "queueMinOffsets.json.tmp").rmdir()
    in_place(store.topic_retention.raise_min_offsets("T", {0: 1}))
    assert len(everything(store)) == 1


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"minOffsets":{"T":{"x":1,"0":"y"},"U":7}}'])
def test_a_damaged_table_does_not_keep_the_store_from_starting(tmp_path: Path, text: bytes) -> None:
    store, clock = minutely(tmp_path)
    store.close()
    (tmp_path / "config" / "queueMinOffsets.json").write_bytes(text)

    store = open_store(tmp_path, clock=clock)
    assert len(everything(store)) == 10


def test_flush_modes_change_while_the_store_runs(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    answers: list[bool] = []
    store.configure(store.config.replace(flush_disk_type="SYNC_FLUSH"))
    first = put(store)
    store.commit()
    store.flusher.wait_for(first.physical_offset + first.size, answers.append)
    store.configure(store.config.replace(flush_disk_type="ASYNC_FLUSH", mapped_file_size_commit_log=1 << 30))
    send(store)

    assert answers == [True]
    assert len(everything(store)) == 2
    assert store.config.mapped_file_size_commit_log == 64 << 10


@pytest.mark.parametrize("way", ["purge", "retention"])
def test_a_topic_made_anew_meanwhile_keeps_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    store, clock = minutely(tmp_path)
    run = store.executor.run

    async def run_later(work: Callable[..., object], *given: object) -> object:
        monkeypatch.undo()
        delete_topic(store, "T")
        send(store, b"new")
        return await run(work, *given)

    monkeypatch.setattr(store.executor, "run", run_later)
    if way == "purge":
        in_place(store.topic_retention.raise_min_offsets("T", {0: 8}))
    else:
        store.topic_retention.set_limits({"T": TopicLimit(age_ms=MINUTE)})
        run_topic_retention(store)
    assert everything(store) == [b"new"]
    store.close()
    store = open_store(tmp_path, clock=clock)
    assert everything(store) == [b"new"]
