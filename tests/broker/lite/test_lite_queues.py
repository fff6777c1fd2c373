"""The database of lite topics, by itself."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from cometmq.broker.lite import lite_queues
from cometmq.broker.lite.lite_queues import LiteQueues
from cometmq.protocol.lite import lmq_name

A, B = lmq_name("P", "a"), lmq_name("P", "b")


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., LiteQueues]:
    def opened(log_end: int = 1 << 40) -> LiteQueues:
        queues = LiteQueues(str(tmp_path / "config" / "liteTopics.db"), lambda: None)
        queues.open(log_end)
        return queues

    return opened


def test_what_a_crash_has_removed_from_the_log_is_removed(opened: Callable[..., LiteQueues]) -> None:
    queues = opened()
    for offset, position in enumerate((100, 200, 300)):
        assert queues.add(A, offset, position, 1)
    assert queues.add(B, 0, 250, 1)
    assert queues.commit("G", A, 0, 3)
    queues.close()
    queues = opened(log_end=250)
    assert (queues.end(A), queues.query("G", A, 0), queues.units(A, 0, 9, 0)) == (2, 2, [(0, 100), (1, 200)])
    assert (queues.end(B), queues.units(B, 0, 9, 0)) == (0, [])
    assert queues.reserve(A) == 2
    queues.close()


def test_offsets_are_reserved_in_order_and_never_twice(opened: Callable[..., LiteQueues]) -> None:
    queues = opened()
    assert [queues.reserve(A) for _ in range(3)] == [0, 1, 2]
    assert queues.end(A) == 0
    assert not queues.commit("G", A, 0, 1)  # No message is visible
    assert queues.add(A, 2, 300, 1)  # The first two were refused by the store
    assert (queues.end(A), queues.reserve(A), queues.units(A, 0, 9, 0)) == (3, 3, [(2, 300)])
    assert not queues.remove(A)  # A message is being stored
    assert queues.add(A, 3, 400, 5)
    assert not queues.add(A, 3, 400, 5)
    assert not queues.remove(A, before_ms=5)
    assert queues.remove(A, before_ms=6)
    assert (queues.count, queues.end(A), queues.units(A, 0, 9, 0)) == (0, 0, [])
    queues.close()


def test_topics_and_offsets_in_memory_are_bounded(
    opened: Callable[..., LiteQueues], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lite_queues, "MAX_CACHED", 10)
    queues = opened()
    names = [lmq_name("P", str(number)) for number in range(100)]
    for number, name in enumerate(names):
        queues.reserve(name)
        queues.add(name, 0, number, 1)
        queues.commit("G", name, 0, 1)
    assert len(queues._topics) <= 20  # noqa: SLF001
    assert len(queues._offsets) <= 20  # noqa: SLF001
    assert {queues.end(name) for name in names} == {queues.query("G", name, 0) for name in names} == {1}
    assert queues.count == 100
    queues.close()


def test_a_checkpoint_moves_the_changes_to_the_database_file(
    opened: Callable[..., LiteQueues], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lite_queues, "CHECKPOINT_BYTES", 1)
    queues = opened()
    queues.add(A, 0, 1, 1)
    assert queues.flush()
    queues.checkpoint()
    before = Path(queues.path + "-wal").stat().st_size
    queues.add(A, 1, 2, 1)
    queues.flush()
    assert Path(queues.path + "-wal").stat().st_size <= before
    queues.close()


def test_the_database_of_a_later_version_is_replaced(opened: Callable[..., LiteQueues]) -> None:
    queues = opened()
    queues.add(A, 0, 1, 1)
    queues.close()
    with sqlite3.connect(queues.path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    queues = opened()
    assert queues.count == 0
    queues.close()


@pytest.mark.parametrize(
    "order",
    [(0, 1, 2, 3, 4, 5), (3, 4, 5, 0, 1, 2), (5, 4, 3, 2, 1, 0), (0, 3, 1, 4, 2, 5), (4, 0, 3, 1, 5, 2)],
    ids=str,
)
def test_messages_of_the_later_life_of_a_lite_topic_replace_the_others(
    opened: Callable[..., LiteQueues], order: tuple[int, ...]
) -> None:
    """A replica finds both in the log, in the order of the parent's queues."""
    queues = opened()
    found = [(0, 100), (1, 200), (2, 300), (0, 1000), (1, 1100), (2, 1200)]
    for number in order:
        if queues.add(A, *found[number], 1) and number == 2:
            queues.commit("G", A, 0, 3)
    assert queues.units(A, 0, 9, 0) == found[3:]
    assert (queues.end(A), queues.count) == (3, 1)
    assert queues.query("G", A, 0) <= 0  # The offset belonged to the earlier life
    assert queues.reserve(A) == 3
    queues.close()


def test_changed_offsets_are_listed_in_the_order_of_the_changes(opened: Callable[..., LiteQueues]) -> None:
    queues = opened()
    for name in (A, B):
        queues.add(name, 0, 1, 1)
        queues.commit("G", name, 0, 1)
    queues.commit("H", A, 0, 1)
    queues.commit("G", A, 0, 0)
    queues.flush()
    changes = queues.changed_offsets(0, 9)
    assert [each[1:] for each in changes] == [(B, "G", 1), (A, "H", 1), (A, "G", 0)]
    assert queues.changed_offsets(changes[0][0], 1) == changes[1:2]
    queues.close()
