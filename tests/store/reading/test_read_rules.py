"""Results of single pulls compared with a unit-by-unit model of Apache's rules.

See docs/reference/storage.md, Reading.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.store.kit import (
    bodies,
    committed,
    drop_first_segment,
    open_configured,
    open_store,
    put,
    put_all,
    restarted,
    small,
)

from cometmq.store import GetStatus, MessageStore
from cometmq.store.base.config import StoreConfig

UNITS_PER_FILE = 50
SCAN = 40  # units per filtered scan: maxFilterMessageSize of 800 bytes


class Unit(NamedTuple):
    """A message: its record's position and size, the hash of its tag, and its body."""

    position: int
    size: int
    tag: int
    body: bytes


class Pull(NamedTuple):
    """A pull request. `offset` is relative to the queue's beginning and may be out of range."""

    offset: int
    max_count: int
    tags: frozenset[int] | None
    max_bytes: int | None


class Rules(NamedTuple):
    """Limits in bytes and messages as in StoreConfig. `memory`: size of the machine's memory in bytes."""

    count_memory: int
    bytes_memory: int
    count_disk: int
    bytes_disk: int
    memory: int
    ratio: int


def expected(
    units: list[Unit], low: int, end: int, pull: Pull, rules: Rules, cached_from: int
) -> tuple[str, list[bytes], int, bool]:
    """Return (status, bodies, next begin offset, whether the slave is suggested).

    Units from offset `cached_from` on are in memory. A read that begins in a file ends where memory begins.
    """
    high = len(units)
    if high == 0:
        return "NO_MESSAGE_IN_QUEUE", [], 0, False
    if pull.offset < low:
        return "OFFSET_TOO_SMALL", [], low, False
    if pull.offset == high:
        return "OFFSET_OVERFLOW_ONE", [], pull.offset, False
    if pull.offset > high:
        return "OFFSET_OVERFLOW_BADLY", [], high, False
    window = rules.memory * rules.ratio // 100
    stop = high
    if pull.offset < cached_from:
        boundary = (pull.offset // UNITS_PER_FILE + 1) * UNITS_PER_FILE
        stop = boundary if boundary < cached_from else high
    # CometMQ's own rule: a pull for more messages than the settings allow does not examine more units.
    most_units = min(pull.max_count, max(rules.count_memory, rules.count_disk))
    stop = min(stop, pull.offset + (most_units if pull.tags is None else max(SCAN, most_units)))
    found: list[bytes] = []
    total = scanned = 0
    last = 0
    for unit in units[pull.offset : stop]:
        last = unit.position
        on_disk = end - unit.position > window
        most_bytes = rules.bytes_disk if on_disk else rules.bytes_memory
        if pull.max_bytes is not None:
            most_bytes = min(most_bytes, pull.max_bytes)
        most = rules.count_disk if on_disk else rules.count_memory
        full = len(found) >= pull.max_count or total + unit.size > most_bytes or len(found) >= most
        if found and full:
            break
        scanned += 1
        if pull.tags is not None and unit.tag not in pull.tags:
            continue
        found.append(unit.body)
        total += unit.size
    status = "FOUND" if found else "NO_MATCHED_MESSAGE"
    return status, found, pull.offset + scanned, end - last > window


rules = st.builds(
    Rules,
    st.integers(1, 40),
    st.integers(1, 6000),
    st.integers(1, 12),
    st.integers(1, 3000),
    st.sampled_from((0, 10_000, 40_000, 1 << 40)),
    st.integers(0, 100),
)
pulls = st.builds(
    Pull,
    st.integers(-2, 145),
    st.integers(1, 45),
    st.one_of(st.none(), st.frozensets(st.integers(0, 3), min_size=1, max_size=3)),
    st.one_of(st.none(), st.integers(1, 5000)),
)


def filled(
    root: str, sizes: list[int], config: StoreConfig, *, restarted: bool
) -> tuple[MessageStore, list[Unit]]:
    store = open_configured(config)
    units = []
    for number, size in enumerate(sizes):
        body = b"%d:" % number + bytes(size)
        put(store, bytes(size), "Neighbour")
        place = put(store, body, tags_code=number * number % 4)
        units.append(Unit(place.physical_offset, place.size, number * number % 4, body))
    committed(store.commit())
    if restarted:
        store.close()
        store = open_configured(config)
    return store, units


@pytest.mark.slow("stores with many files, built 60 times")
@pytest.mark.representative
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from((0, 50, 300, 900)), max_size=140),
    rules=rules,
    asked=st.lists(pulls, min_size=1, max_size=12),
    restarted=st.booleans(),
    expired=st.booleans(),
)
@example(  # the message limit ends the read before a unit on disk
    sizes=[0, 0],
    rules=Rules(1, 1, 1, 1, 10_000, 1),
    asked=[Pull(0, 2, None, None)],
    restarted=False,
    expired=False,
)
@example(  # a distance equal to the window's size still counts as in memory
    sizes=[100] * 20,
    rules=Rules(32, 1 << 20, 2, 1 << 20, 100 * 400, 10),
    asked=[Pull(offset, 32, None, None) for offset in range(20)],
    restarted=False,
    expired=False,
)
def test_every_pull_follows_the_rules(
    sizes: list[int], rules: Rules, asked: list[Pull], restarted: bool, expired: bool
) -> None:
    with tempfile.TemporaryDirectory() as root:
        config = small(
            root,
            mapped_file_size_commit_log=16 << 10,
            mapped_file_size_consume_queue=20 * UNITS_PER_FILE,
            max_filter_message_size=SCAN * 20,
            max_transfer_count_on_message_in_memory=rules.count_memory,
            max_transfer_bytes_on_message_in_memory=rules.bytes_memory,
            max_transfer_count_on_message_in_disk=rules.count_disk,
            max_transfer_bytes_on_message_in_disk=rules.bytes_disk,
            access_message_in_memory_max_ratio=rules.ratio,
        )
        store, units = filled(root, sizes, config, restarted=restarted)
        store.reader.memory_bytes = rules.memory
        if expired and len(store.log.segments) > 1:
            drop_first_segment(store)
        low, end = store.min_offset("T", 0), store.log.end
        queue = store.queues.find_queue("T", 0)
        cached_from = 0 if queue is None else queue.window_start
        for pull in asked:
            answer = store.reader.get(
                queue, pull.offset, pull.max_count, tags=pull.tags, max_bytes=pull.max_bytes
            )
            status, found, following, slave = expected(units, low, end, pull, rules, cached_from)
            assert (answer.status.name, bodies(answer), answer.next_begin_offset, answer.suggest_slave) == (
                status, found, following, slave,
            ), pull  # fmt: skip
            assert (answer.min_offset, answer.max_offset) == (low, len(units))
        store.close()


def test_a_slave_without_the_offset_check_corrects_nothing(tmp_path: Path, store: MessageStore) -> None:
    put_all(store, [b"hello"] * 250)
    store = restarted(store, broker_role="SLAVE")
    queue = store.queues.get_or_make("T", 0)
    queue.min_offset = 5
    for offset, status in (
        (3, GetStatus.OFFSET_TOO_SMALL),
        (250, GetStatus.OFFSET_OVERFLOW_ONE),
        (999, GetStatus.OFFSET_OVERFLOW_BADLY),
    ):
        answer = store.get_messages("T", 0, offset, 32)
        assert (answer.status, answer.next_begin_offset) == (status, offset)
    store.files.delete(f"{queue.path}/{2000:020d}")
    answer = store.get_messages("T", 0, 120, 32)
    assert (answer.status, answer.next_begin_offset) == (GetStatus.OFFSET_FOUND_NULL, 120)
    store.configure(store.config.replace(offset_check_in_slave=True))
    answer = store.get_messages("T", 0, 120, 32)
    assert (answer.status, answer.next_begin_offset) == (GetStatus.OFFSET_FOUND_NULL, 200)


def test_an_expired_first_record_is_no_damage(tmp_path: Path, store: MessageStore) -> None:
    """This state exists between the deletion of the segment and the update of the minimum offset."""
    put_all(store, [bytes(40_000)] * 3)
    store = restarted(store)
    drop_first_segment(store, derived=False)
    refused: list[int] = []
    store.reader.refused = lambda position, _where: refused.append(position)
    assert store.get_messages("T", 0, 0, 1).status is GetStatus.MESSAGE_WAS_REMOVING
    assert refused == []


def test_the_limits_count_to_the_byte(tmp_path: Path) -> None:
    store = open_store(tmp_path, access_message_in_memory_max_ratio=100)
    places = [put(store, bytes(200)) for _ in range(10)]
    committed(store.commit())
    size, queue = places[0].size, store.queues.get_or_make("T", 0)

    def pull(offset: int, most: int = 32) -> tuple[int, bool]:
        answer = store.reader.get(queue, offset, most)
        return answer.count, answer.suggest_slave

    store.reader.memory_bytes = store.log.end - places[6].physical_offset
    store.reader.configure(store.config.replace(max_transfer_count_on_message_in_disk=1))
    assert pull(6, 1) == (1, False)  # a distance equal to the window's size counts as in memory
    assert pull(5, 1) == (1, True)
    assert pull(5, 3) == (3, False)
    assert pull(4, 3) == (1, True)

    for slack, count in ((-1, 1), (0, 2)):
        limits = {"max_transfer_bytes_on_message_in_disk": 2 * size + slack}
        store.reader.configure(store.config.replace(**limits))
        assert pull(0)[0] == count
        limits = {"max_transfer_bytes_on_message_in_memory": 2 * size + slack}
        store.reader.configure(store.config.replace(**limits))
        assert pull(6)[0] == count
