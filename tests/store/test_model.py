"""The store compared with a model of plain lists.

Operations: sends, failures, clean stops, kills, deletions and retention.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.kit.faulty_disk import FaultyDisk
from tests.store import kit
from tests.store.kit import (
    START_MS,
    bodies,
    by_key,
    committed,
    offset_by_time,
    open_store,
    put,
    put_batch,
    run_retention,
)

from cometmq.protocol.batch import encode_batch
from cometmq.protocol.record.one import decode_record
from cometmq.store import GetStatus, ManualClock, MessageStore

TOPICS = ("A", "%RETRY%B")
topics = st.sampled_from(TOPICS)
queue_ids = st.integers(0, 2)
sizes = st.one_of(st.integers(0, 300), st.integers(3000, 9000), st.just(20_000))


class Queue:
    """Bodies and store times of a queue, beginning with offset `first`."""

    def __init__(self) -> None:
        self.first = 0
        self.messages: list[tuple[bytes, int]] = []

    @property
    def end(self) -> int:
        return self.first + len(self.messages)


class StoreAgainstLists(RuleBasedStateMachine):
    @initialize(sync=st.booleans())
    def start(self, sync: bool) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="cometmq-model-"))
        self.clock = ManualClock(START_MS)
        self.settings = {"flush_disk_type": "SYNC_FLUSH"} if sync else {}
        self.queues: dict[tuple[str, int], Queue] = {}
        self.keys: dict[tuple[str, str], list[bytes]] = {}
        self.number = 0
        self.pending: list[tuple[str, int, bytes, int]] = []
        self.ends: dict[tuple[str, int], int] = {}  # as of the last clean stop, which the store records
        self.disk = FaultyDisk(really_sync=False)
        self.store: MessageStore = open_store(self.root, self.disk, self.clock, **self.settings)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.crash()
            shutil.rmtree(self.root)

    def queue(self, topic: str, queue_id: int) -> Queue:
        return self.queues.setdefault((topic, queue_id), Queue())

    def next_offset(self, topic: str, queue_id: int) -> int:
        waiting = sum(1 for each in self.pending if each[:2] == (topic, queue_id))
        return self.queue(topic, queue_id).end + waiting

    # -- writing

    @rule(topic=topics, queue_id=queue_ids, size=sizes, later=st.integers(0, 50))
    def append(self, topic: str, queue_id: int, size: int, later: int) -> None:
        self.clock.now_ms += later
        self.number += 1
        body = b"%d:" % self.number + bytes(size)
        key = b"KEYS\x01k%d" % (self.number % 7)
        expected = self.next_offset(topic, queue_id)
        appended = put(self.store, body, topic, queue_id, key)
        assert appended.queue_offset == expected
        self.pending.append((topic, queue_id, body, self.clock.now_ms))

    @rule(topic=topics, queue_id=queue_ids, count=st.integers(1, 40))
    def append_batch(self, topic: str, queue_id: int, count: int) -> None:
        expected = self.next_offset(topic, queue_id)
        items = []
        for _ in range(count):
            self.number += 1
            body = b"%d:batch" % self.number
            items.append((0, body, b"KEYS\x01k%d" % (self.number % 7)))
            self.pending.append((topic, queue_id, body, self.clock.now_ms))
        appended = put_batch(self.store, encode_batch(items), topic, queue_id)
        assert (appended.queue_offset, len(appended.sizes)) == (expected, count)

    @rule()
    def commit(self) -> None:
        commit = committed(self.store.commit())
        if not self.settings:
            assert commit.visible == len(commit.arrivals) == len(self.pending)
        for topic, queue_id, body, at in self.pending:
            self.queue(topic, queue_id).messages.append((body, at))
            number = int(body.split(b":")[0])
            self.keys.setdefault((topic, f"k{number % 7}"), []).append(body)
        self.pending.clear()

    @precondition(lambda self: self.pending)
    @rule(share=st.sampled_from([0.0, 0.3, 0.9]))
    def fail_to_commit(self, share: float) -> None:
        self.disk.fail("pwrite", match="commitlog", partial=share)
        assert self.store.commit().error is not None
        self.disk.heal()
        self.pending.clear()

    @rule()
    def write_derived(self) -> None:
        self.store.queues.write_dirty()
        self.store.index.write()

    @rule()
    def make_durable(self) -> None:
        assert self.store.writer.make_durable(slots=False)

    # -- stopping

    @rule()
    def stop_and_start(self) -> None:
        self.commit()
        self.store.close()
        self.ends = {place: queue.end for place, queue in self.queues.items()}
        assert not (self.root / "abort").exists()
        self.reopen()
        assert self.store.recovered.clean

    @rule()
    def die_and_start(self) -> None:
        self.pending.clear()
        self.store.crash()
        self.reopen()
        assert not self.store.recovered.clean
        assert not self.store.recovered.damage

    @rule(what=st.sampled_from(["consumequeue", "index", "checkpoint"]))
    def die_and_lose_a_derived_file(self, what: str) -> None:
        self.pending.clear()
        self.store.crash()
        path = self.root / what
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        if what == "consumequeue":
            self.forget_empty(self.queues)
        self.reopen()

    @rule(topic=topics, queue_id=queue_ids)
    def die_and_lose_a_queue(self, topic: str, queue_id: int) -> None:
        mark = self.store.checkpoint.saved
        if mark is not None and self.store.deleted.any_since(mark.position):
            return  # the checkpoint does not show the queues' content now
        self.pending.clear()
        self.store.crash()
        shutil.rmtree(self.root / "consumequeue" / topic / str(queue_id), ignore_errors=True)
        self.forget_empty([(topic, queue_id)])
        self.reopen()

    def forget_empty(self, places: Iterable[tuple[str, int]]) -> None:
        """Remove empty queues from the model: no record in the log refers to them."""
        for place in places:
            queue = self.queue(*place)
            if not queue.messages:
                queue.first = self.ends.get(place, 0)

    def reopen(self) -> None:
        self.disk = FaultyDisk(really_sync=False)
        self.store = open_store(self.root, self.disk, self.clock, **self.settings)

    # -- deleting

    @rule(topic=topics)
    def delete_topic(self, topic: str) -> None:
        self.commit()
        kit.delete_topic(self.store, topic)
        for queue_id in range(3):
            self.queues.pop((topic, queue_id), None)
            self.ends.pop((topic, queue_id), None)

    @rule()
    def retire_log(self) -> None:
        """Delete all segments but the last once everything is durable."""
        self.commit()
        assert self.store.writer.make_durable(slots=False)
        for path in sorted((self.root / "commitlog").iterdir()):
            os.utime(path, (1, 1))
        self.store.retention.delete_now()
        while run_retention(self.store):
            pass
        self.forget_before_log_min()

    def forget_before_log_min(self) -> None:
        low = self.store.log.min_position
        for (topic, queue_id), queue in self.queues.items():
            store_queue = self.store.queues.find_queue(topic, queue_id)
            gone = 0 if store_queue is None else store_queue.min_offset - queue.first
            assert 0 <= gone <= len(queue.messages)
            for offset in range(queue.first, queue.end):
                unit = (
                    store_queue.unit(offset)
                    if store_queue is not None and offset >= queue.first + gone
                    else None
                )
                assert (unit is not None and unit[0] >= low) == (offset >= queue.first + gone)
            for body, _ in queue.messages[:gone]:
                self.keys[topic, f"k{int(body.split(b':')[0]) % 7}"].remove(body)
            del queue.messages[:gone]
            queue.first += gone

    # -- what must hold

    @invariant()
    def offsets_agree(self) -> None:
        for (topic, queue_id), queue in getattr(self, "queues", {}).items():
            assert self.store.max_offset(topic, queue_id) == queue.end
            if queue.messages:
                assert self.store.min_offset(topic, queue_id) == queue.first

    @rule(topic=topics, queue_id=queue_ids, start=st.integers(-2, 60), count=st.integers(1, 40))
    def pull(self, topic: str, queue_id: int, start: int, count: int) -> None:
        queue = self.queue(topic, queue_id)
        offset = queue.first + start
        answer = self.store.reader.get(self.store.queues.find_queue(topic, queue_id), offset, count)
        if queue.first <= offset < queue.end:
            assert answer.status is GetStatus.FOUND
            at = offset - queue.first
            expected = [body for body, _ in queue.messages[at : at + answer.count]]
            assert bodies(answer) == expected
            assert answer.next_begin_offset == offset + answer.count
            assert answer.count == min(count, 32, queue.end - offset) or sum(map(len, expected)) > 50_000
        else:
            assert (answer.status is not GetStatus.FOUND, answer.count) == (True, 0)

    @rule(topic=topics, key=st.integers(0, 6))
    def query(self, topic: str, key: int) -> None:
        expected = self.keys.get((topic, f"k{key}"), [])
        alive = {body for (at, _), queue in self.queues.items() if at == topic for body, _ in queue.messages}
        expected = [body for body in expected if body in alive][-64:]
        found = [decode_record(data).body for data in by_key(self.store, topic, f"k{key}", 64, 0, 1 << 60)]
        assert set(expected) <= set(found) or len(found) == 64

    @rule(topic=topics, queue_id=queue_ids, share=st.floats(0, 1))
    def by_time(self, topic: str, queue_id: int, share: float) -> None:
        queue = self.queue(topic, queue_id)
        if queue.messages:
            asked = int(START_MS - 10 + share * (self.clock.now_ms - START_MS + 20))
            expected = sum(1 for _, at in queue.messages if at < asked)
            assert offset_by_time(self.store, topic, queue_id, asked, "LOWER") == queue.first + expected


StoreAgainstLists.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestStoreAgainstLists = pytest.mark.slow("60 lives of a store")(
    pytest.mark.representative(StoreAgainstLists.TestCase)
)


def history() -> StoreAgainstLists:
    state = StoreAgainstLists()
    state.start(sync=False)
    return state


def test_a_queue_directory_that_is_lost_after_a_kill_comes_back_whole() -> None:
    """No record of queue A after the checkpoint shows that the queue existed."""
    state = history()
    for topic, size in (("A", 20_000), ("A", 20_000), ("A", 5118), ("%RETRY%B", 20_000)):
        state.append(later=0, queue_id=0, size=size, topic=topic)
    state.commit()
    state.die_and_start()  # writes a checkpoint
    state.die_and_lose_a_derived_file(what="consumequeue")
    state.offsets_agree()
    assert "no consume queue is left" in state.store.recovered.notes[0]
    state.stop_and_start()
    state.offsets_agree()
    state.teardown()


def test_a_queue_that_only_its_former_end_tells_of_is_no_loss_at_every_start() -> None:
    state = history()
    for topic, size in (("A", 20_000), ("%RETRY%B", 9), ("A", 20_000), ("%RETRY%B", 5005), ("A", 20_000)):
        state.append(later=0, queue_id=0, size=size, topic=topic)
    state.retire_log()  # %RETRY%B has no messages left
    state.stop_and_start()
    state.die_and_lose_a_derived_file(what="consumequeue")
    for _ in range(2):
        state.stop_and_start()  # asserts that the start is clean
        state.offsets_agree()
    state.append(later=0, queue_id=0, size=7, topic="%RETRY%B")
    state.commit()
    state.offsets_agree()
    state.stop_and_start()
    state.offsets_agree()
    state.teardown()
