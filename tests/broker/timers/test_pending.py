"""Waiting messages under random times, clock steps, recalls, moves and crashes.

No message is early, lost or delivered twice.
"""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cometmq.broker.timers.following import Known
from cometmq.broker.timers.pending import Pending, Times
from cometmq.broker.timers.wheel import NEVER
from cometmq.protocol.timers import TimerCode, out_ms_of
from cometmq.store import UNIT_DTYPE, TimerTable

WALL, MONOTONIC = 1_700_000_000_000, 5_000_000
SIZE = 10  # size of every record in bytes
NONE = np.empty(0, np.int64)


@dataclass
class Record:
    """A log record: a timer message, a recall, a moved copy, or a delivered message."""

    key: int
    code: TimerCode | None = None
    link: int = 0
    ahead_ms: int = 0


@dataclass
class Sent:
    """A sent message with its earliest delivery time on the wall clock or on the monotonic clock."""

    wall_ms: int | None
    monotonic_ms: int | None
    recalled: bool = False
    times: int = 0


@dataclass
class Broker:
    """A model of a broker: a log, the queue of the timer topic, and the operations on them."""

    wall: int = WALL
    monotonic: int = MONOTONIC
    log: list[Record] = field(default_factory=lambda: [Record(-1)])  # position 0 is unused
    queue: list[int] = field(default_factory=list)
    gone_before: int = 0
    mark: TimerTable = field(default_factory=TimerTable)
    pending: Pending = field(default_factory=Pending)
    sent: dict[int, Sent] = field(default_factory=dict)
    carried: dict[int, int] = field(default_factory=dict)

    def times(self) -> Times:
        return Times(self.wall, self.monotonic)

    def append(self, record: Record) -> int:
        record.ahead_ms = self.monotonic - self.wall
        position = len(self.log) * SIZE
        self.log.append(record)
        if record.code is not None:
            self.queue.append(position)
        return position

    def send(self, delay_ms: int, *, delayed: bool) -> None:
        key, deliver = len(self.sent), self.wall + delay_ms
        self.append(Record(key, TimerCode(out_ms_of(deliver), delayed, False)))
        self.sent[key] = Sent(None if delayed else deliver, self.monotonic + delay_ms if delayed else None)
        self.follow()

    def recall(self, number: int) -> None:
        if not self.sent:
            return
        key = number % len(self.sent)
        code = next(each.code for each in self.log if each.key == key and each.code)
        if self.sent[key].times or code.out_ms + 1 <= self.wall:
            return
        self.append(Record(key, code._replace(delayed=False, recall=True)))
        self.sent[key].recalled = True
        self.follow()

    def follow(self, known: Known | None = None) -> None:
        first = self.pending.followed
        positions = self.queue[first:]
        records = [self.log[position // SIZE] for position in positions]
        numbers = [(position, SIZE, self.log[position // SIZE].code.pack()) for position in positions]
        units = np.array(numbers, UNIT_DTYPE)
        rows = range(len(units))
        if known is not None:
            to_do, linked = known.split(first, units)
            for row in np.flatnonzero(linked).tolist():
                self.pending.note_done(positions[row], records[row].code.out_ms)
            rows = np.flatnonzero(to_do).tolist()
        for row in rows:
            position, record = positions[row], records[row]
            if position < self.gone_before:
                continue
            if record.code.recall:
                self.pending.recall(position, record.code.out_ms, b"%d" % record.key)
            elif (due := self.carried.pop(position, None)) is not None:
                self.pending.add_due(position, due, record.code.out_ms)
            else:
                ahead = record.ahead_ms if known is None else self.monotonic - self.wall
                self.pending.add(position, record.code, ahead)
        self.pending.followed, self.pending.followed_position = len(self.queue), max(self.queue, default=-1)

    def deliver(self, most: int, *, dies: bool) -> int:
        due = self.pending.due(self.times(), most)
        self.pending.forget_recalls(self.times())
        for waiting in due:
            record = self.log[waiting.position // SIZE]
            if not self.pending.is_recalled(record.code.out_ms, b"T", b"%d" % record.key):
                self.append(Record(record.key, link=waiting.position))
                self.came(self.sent[record.key])
        if dies:
            self.crash()
        elif due:
            self.pending.done(len(due))
        return len(due)

    def came(self, sent: Sent) -> None:
        sent.times += 1
        assert not sent.recalled
        assert sent.times == 1
        if sent.wall_ms is not None:
            assert self.wall >= sent.wall_ms
        elif sent.monotonic_ms is not None:
            assert self.monotonic >= sent.monotonic_ms

    def move(self, share: int, *, dies: int, saves: bool) -> None:
        before = self.gone_before + (len(self.log) * SIZE - self.gone_before) * share // 100
        while batch := self.pending.before(before, 3):
            if dies and len(batch) < 3:
                self.crash()
                return
            copy = -1
            for position, due in batch:
                record = self.log[position // SIZE]
                copy = self.append(Record(record.key, record.code, link=position))
                if due is not None:
                    self.carried[copy] = due
            if dies == 2:
                self.crash()
                return
            self.pending.moved(len(batch), copy)
            if saves:
                self.save()
            self.follow()
        self.gone_before = max(self.gone_before, before - before % SIZE)
        if dies:
            self.crash()

    def save(self) -> None:
        mark = self.pending.mark(len(self.log) * SIZE)
        self.mark = mark if mark is not None else self.mark

    def crash(self) -> None:
        """Restart after kill -9: only the log and the last checkpoint remain."""
        self.pending, self.carried = Pending(), {}
        self.pending.begin(self.mark)
        first = max(self.mark.log_position, self.gone_before) // SIZE
        links = [record.link for record in self.log[first:] if record.link]
        self.follow(Known(self.mark, np.array(sorted(links), np.int64), NONE, (0, 0)))
        for sent in self.sent.values():  # the clocks' changes in between are unknown
            if sent.monotonic_ms is not None and not sent.times:
                sent.monotonic_ms = None


DELAYS = st.integers(1, 200_000)
SHARE = st.integers(0, 100)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), DELAYS, st.booleans()),
        st.tuples(st.just("time"), st.integers(0, 100_000)),
        st.tuples(st.just("step"), st.integers(-200_000, 200_000)),
        st.tuples(st.just("deliver"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("recall"), st.integers(0, 100)),
        st.tuples(st.just("move"), SHARE, st.integers(0, 2), st.booleans()),
        st.tuples(st.just("save")),
        st.tuples(st.just("crash")),
    ),
    max_size=50,
)


@settings(max_examples=400)
@given(OPERATIONS)
@example([("send", 1, False), ("recall", 0), ("move", 40, 0, True), ("crash",)])  # checkpoint before the copy
def test_nothing_is_early_nothing_is_lost_and_each_comes_once(operations):
    broker = Broker()
    for name, *values in operations:
        if name == "send":
            broker.send(values[0], delayed=values[1])
        elif name == "time":
            broker.wall += values[0]
            broker.monotonic += values[0]
        elif name == "step":
            broker.wall += values[0]
        elif name == "deliver":
            broker.deliver(values[0], dies=values[1])
        elif name == "recall":
            broker.recall(values[0])
        elif name == "move":
            broker.move(values[0], dies=values[1], saves=values[2])
        elif name == "save":
            broker.save()
        else:
            broker.crash()
    broker.wall += 3_600_000
    broker.monotonic += 3_600_000
    while broker.deliver(3, dies=False):
        broker.save()
    assert [sent.times for sent in broker.sent.values()] == [
        0 if sent.recalled else 1 for sent in broker.sent.values()
    ]
    assert broker.pending.wait_ms(broker.times()) > 10**9
    broker.save()
    broker.crash()
    assert not broker.deliver(1, dies=False)


class TestMark:
    def test_the_log_is_read_from_before_what_came_out_of_turn(self):
        broker = Broker()
        broker.send(60_000, delayed=True)
        broker.send(90_000, delayed=False)
        broker.wall += 3_600_000  # makes the second message due first
        assert broker.deliver(1, dies=False) == 1
        mark = broker.pending.mark(100)
        assert mark == TimerTable(
            queue_offset=2, delivered_ms=WALL + 59_000 - 1, first_position=SIZE, log_position=0
        )
        broker.monotonic += 100_000
        assert broker.deliver(1, dies=False) == 1
        assert broker.pending.mark(200).log_position == 200

    def test_what_came_out_of_turn_takes_little_memory(self, monkeypatch):
        """One early message keeps waiting, as after a clock step, while many later ones are delivered."""
        monkeypatch.setattr("cometmq.broker.timers.pending._MAX_DONE", 1_000)
        pending = Pending()
        pending.add(0, TimerCode(WALL, delayed=True, recall=False), 0)
        tracemalloc.start()
        for number in range(1, 20_000):
            pending.note_done(number * SIZE, WALL + number)
        assert pending.mark(10**9).log_position == 0
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size < 50_000
        pending.due(Times(WALL, 2 * WALL), 1)
        pending.done(1)
        assert pending.mark(10**9).log_position == 10**9

    def test_it_begins_with_the_oldest_that_waits(self):
        broker = Broker()
        for delay in (1_000, 90_000, 5_000):
            broker.send(delay, delayed=False)
        assert broker.pending.mark(999).first_position == SIZE
        broker.wall += 10_000
        while broker.deliver(1, dies=False):
            pass
        assert broker.pending.mark(999).first_position == 2 * SIZE
        broker.wall += 90_000
        broker.deliver(1, dies=False)
        assert broker.pending.mark(999) == TimerTable(
            queue_offset=3, delivered_ms=NEVER - 1, first_position=999, log_position=999
        )


@pytest.mark.parametrize("delayed", [True, False])
def test_a_page_tells_the_wall_times_at_which_messages_will_come(delayed):
    broker = Broker()
    for delay in (30_000, 10_000, 20_000):
        broker.send(delay, delayed=delayed)
    broker.wall += 3_600_000
    page = broker.pending.page((-1, -1), 2, broker.times())
    shift = 3_600_010 if delayed else 0
    assert [each.due_ms - WALL for each in page] == [10_000 + shift, 20_000 + shift]
    (last,) = broker.pending.page(page[-1][:2], 2, broker.times())
    assert last.due_ms - WALL == 30_000 + shift


@pytest.mark.parametrize(
    ("key", "recalled"), [(b"U", True), (b"T+U", True), (b"Other+U", False), (b"T", False), (b"", False)]
)
def test_a_recall_names_the_unique_key_with_or_without_the_topic(key, recalled):
    pending = Pending()
    pending.recall(SIZE, WALL, key)
    assert pending.is_recalled(WALL, b"T", b"U") is recalled
    assert not pending.is_recalled(WALL + 1_000, b"T", b"U")


def test_recalls_are_forgotten_when_what_waits_is_due_after_them():
    broker = Broker()
    broker.send(1_000, delayed=False)
    broker.recall(0)
    broker.wall += 3_600_000
    broker.pending.forget_recalls(broker.times())
    assert broker.pending.recalls == 1  # the recalled message is still in the log
    broker.deliver(1, dies=False)
    broker.pending.forget_recalls(broker.times())
    assert broker.pending.recalls == len(broker.pending) == 0


def test_a_look_among_a_million_recalls_does_not_stop_the_loop_for_long():
    """The recalls belong to two minutes in turn, and recalls added after the first look-up are found, too."""
    pending, many = Pending(), 500_000
    for number in range(2 * many):
        pending.recall(number, WALL + number % 2 * 60_000, b"%d" % number)
    began = time.process_time()
    for number in range(20):
        assert pending.is_recalled(WALL + number % 2 * 60_000, b"T", b"%d" % number)
        assert not pending.is_recalled(WALL + number % 2 * 60_000, b"T", b"%d" % (number + 1))
    assert time.process_time() - began < 0.25
    for number in range(2 * many, 2 * many + 70_000):
        pending.recall(number, WALL, b"%d" % number)
        assert number % 7_000 or pending.is_recalled(WALL, b"T", b"%d" % number)


@pytest.mark.parametrize("many", ["times", "delays"])
def test_a_backlog_of_one_kind_does_not_hold_up_the_other(many):
    broker = Broker()
    for _ in range(50):
        broker.send(1_000, delayed=many == "delays")
    broker.send(1_000, delayed=many == "times")
    broker.wall += 10_000
    broker.monotonic += 10_000
    for _ in range(2):
        broker.deliver(4, dies=False)
    assert broker.sent[50].times == 1
