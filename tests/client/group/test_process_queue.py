"""The committed offset never passes an unfinished message, in whatever order batches finish."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.client.group.process_queue import FlowLimits, ProcessQueue
from cometmq.message import MessageExt, MessageQueue

QUEUE = MessageQueue("T", "a", 0)


def messages(*offsets: int, body: bytes = b"body") -> list[MessageExt]:
    return [make(offset, body) for offset in offsets]


def make(offset: int, body: bytes) -> MessageExt:
    return MessageExt(topic="T", body=body, queue_offset=offset, physical_offset=offset * 100)


def held(*offsets: int, batch_size: int = 1) -> tuple[ProcessQueue, list]:  # type: ignore[type-arg]
    queue = ProcessQueue(QUEUE, 0, 0.0)
    return queue, queue.put(messages(*offsets), batch_size)


def test_nothing_held_has_nothing_to_commit() -> None:
    queue, batches = held()
    assert batches == []
    assert queue.commit_offset() is None


def test_pulled_messages_are_cut_into_batches() -> None:
    queue, batches = held(5, 6, 7, 9, 10, batch_size=2)
    assert [[m.queue_offset for m in b.messages] for b in batches] == [[5, 6], [7, 9], [10]]
    assert (queue.count, queue.body_bytes, queue.span) == (5, 20, 5)


def test_commit_waits_for_the_oldest() -> None:
    queue, (first, second, third) = held(5, 6, 8)
    assert queue.finish(third) == 5
    assert queue.finish(first) == 6
    assert queue.finish(second) == 9
    assert (queue.count, queue.body_bytes, queue.span) == (0, 0, 0)


def test_finishing_twice_counts_once() -> None:
    queue, (first, _) = held(5, 6)
    queue.finish(first)
    assert queue.finish(first) == 6
    assert queue.count == 1


def test_kept_messages_hold_the_offset_back() -> None:
    queue, (first, second) = held(5, 6, 7, 8, batch_size=2)
    queue.keep(first, first.messages[1:])
    assert queue.finish(second) == 6
    assert queue.count == 1
    assert queue.finish(first) == 9


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=20), st.integers(1, 4))
def test_no_order_passes_an_unfinished_offset(data: st.DataObject, gaps: list[int], size: int) -> None:
    offsets, at = [], 0
    for gap in gaps:
        at += gap
        offsets.append(at)
    queue = ProcessQueue(QUEUE, 0, 0.0)
    pending = []
    cut = data.draw(st.integers(0, len(offsets)))
    for part in (offsets[:cut], offsets[cut:]):
        pending += queue.put(messages(*part), size)
    for batch in data.draw(st.permutations(pending)):
        commit = queue.finish(batch)
        pending.remove(batch)
        open_offsets = [m.queue_offset for b in pending for m in b.messages]
        assert commit == (min(open_offsets) if open_offsets else offsets[-1] + 1)
        assert queue.count == len(open_offsets)
    assert queue.body_bytes == 0


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        (FlowLimits(max_count=2), "messages"),
        (FlowLimits(max_count=3, max_span=9), "span"),
        (FlowLimits(max_count=3, max_span=10), None),
        (FlowLimits(max_count=3, max_mib=1), None),
    ],
)
def test_flow_control_says_why(limits: FlowLimits, word: str | None) -> None:
    queue, _ = held(10, 15, 20)
    reason = queue.over_limit(limits)
    assert reason is None if word is None else word in (reason or "")


def test_flow_control_by_size_counts_whole_mebibytes() -> None:
    queue = ProcessQueue(QUEUE, 0, 0.0)
    queue.put(messages(1, 2, body=b"x" * (1024 * 1024 - 1)), 1)
    assert queue.over_limit(FlowLimits(max_mib=1)) is None
    queue.put(messages(3, body=b"xx"), 1)
    assert "MiB" in (queue.over_limit(FlowLimits(max_mib=1)) or "")


def test_only_the_oldest_batch_can_be_overdue() -> None:
    queue, (first, second) = held(1, 2)
    second.started_at = 5.0
    assert queue.oldest_started_before(100.0) is None
    first.started_at = 50.0
    assert queue.oldest_started_before(50.0) is None
    assert queue.oldest_started_before(50.1) is first
