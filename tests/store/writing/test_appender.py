"""Waiting messages are encoded together into the same bytes as one by one, and each gets a response."""

from __future__ import annotations

import errno
import gc
import random
import weakref
from functools import partial
from typing import Any

import pytest
from tests.store.kit import HOST, START_MS, check_sound, committed, everything, open_store, put, send
from tests.store.planted import snapshot

from cometmq.protocol.batch import encode_batch
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.record.one import decode_record
from cometmq.store import Commit, ManualClock, MessageStore, StoreRefused, TickMessage
from cometmq.store.base.refusal import Flag
from cometmq.store.writing import appender
from cometmq.store.writing.appender import COPIED, MAX_PENDING_MESSAGES, Body, SizeLimits, Traits

PLAIN = Traits()
HOST_V6 = bytes(15) + b"\1\0\0\xc3\x50"


def enqueue(
    store: MessageStore, sender: Any, body: Body, topic: str = "T", queue_id: int = 0, **more: Any
) -> None:
    values = {"properties": b"", "born_host": HOST, "keys": None, "traits": PLAIN, **more}
    queue = store.appender.queue_of(topic, queue_id)
    store.appender.enqueue(TickMessage(sender, queue, body, born_timestamp_ms=START_MS, **values))


def placed(commit: Commit) -> list[tuple[Any, int, int]]:
    return [(message.sender, message.physical_offset, message.queue_offset) for message in commit.placed]


def senders(commit: Commit) -> list[Any]:
    return [message.sender for message in commit.placed]


def refused_senders(commit: Commit) -> list[Any]:
    return [refused.message.sender for refused in commit.refused]


# Kinds of messages: plain, prepared, committed, rolled back, delayed, with other flags and hosts.
TRAITS: list[Traits] = [
    PLAIN,
    Traits(flag=9, reconsume_times=3, tags_code=77),
    Traits(sys_flag=0x4),
    Traits(sys_flag=0x8, tags_code=5),
    Traits(sys_flag=0xC),
    Traits(delay_ms=10_000),
    Traits(sys_flag=0x10, store_host=HOST_V6),
]


@pytest.mark.representative("0")
@pytest.mark.thorough("more seeds")
@pytest.mark.parametrize("seed", range(12))
def test_runs_leave_the_bytes_of_single_appends(tmp_path, seed):
    chance = random.Random(seed)
    clocks = ManualClock(START_MS), ManualClock(START_MS)
    alone, together = (
        open_store(tmp_path / name, clock=clock, max_message_size=40_000)
        for name, clock in zip(("alone", "together"), clocks, strict=True)
    )
    refusals = 0
    for _ in range(60):
        expected: list[Any] = []
        for sender in range(chance.choice((1, 3, 40))):
            topic, queue_id = chance.choice("TU"), chance.randrange(3)
            body = chance.randbytes(chance.choice((0, 5, 300, 1_500, COPIED, COPIED + 1, 30_000, 40_001)))
            if chance.random() < 0.05:
                data = encode_batch([(0, body[:100], b"UNIQ_KEY\x01%d" % n) for n in range(3)])
                for store in (alone, together):
                    batch = {"born_timestamp_ms": START_MS, "born_host": HOST}
                    store.appender.append_batch(topic, queue_id, data, b"", **batch)
                continue
            text = b"KEYS\x01k%d\x02" % chance.randrange(9)
            host = chance.choice((HOST, HOST, HOST_V6))
            traits = chance.choice([PLAIN] * 9 + TRAITS)
            prepared = chance.choice((0, 0, 4711))
            view = bytearray(body)
            enqueue(
                together, sender, view, topic, queue_id, properties=text, born_host=host, traits=traits,
                prepared_position=prepared,
            )  # fmt: skip
            if len(body) > COPIED:
                view[:] = bytes(len(view))  # the receiver may reuse its buffer
            try:
                appended = put(
                    alone, body, topic, queue_id, text, born_host=host, flag=traits.flag,
                    sys_flag=traits.sys_flag, reconsume_times=traits.reconsume_times,
                    prepared_transaction_offset=prepared, tags_code=traits.tags_code,
                    store_host=traits.store_host, delay_ms=traits.delay_ms,
                )  # fmt: skip
                expected.append((sender, appended.physical_offset, appended.queue_offset))
            except StoreRefused:
                expected.append(sender)
        committed(alone.commit())
        commit = committed(together.commit())
        refused = refused_senders(commit)
        assert placed(commit) == [each for each in expected if each not in refused]
        assert refused == [each for each in expected if isinstance(each, int)]
        refusals += len(refused)
        for clock in clocks:
            clock.advance(0.0015)
    alone.close()
    together.close()
    assert refusals
    assert snapshot(tmp_path / "alone") == snapshot(tmp_path / "together")


def test_each_hears_of_its_own_message_in_order(store):
    for number in range(10):
        enqueue(store, f"sender {number}", b"%d" % number, "T", number % 3)
    enqueue(store, None, b"oneway")
    put(store, b"at once", queue_id=2)
    enqueue(store, "last", b"last", "T", 2)
    commit = committed(store.commit())
    assert senders(commit) == [*(f"sender {n}" for n in range(10)), "last"]
    log = bytes(store.log.read(0, store.log.end) or b"")
    for (_, position, offset), body, queue_id in zip(
        placed(commit), [*(b"%d" % n for n in range(10)), b"last"], [*(n % 3 for n in range(10)), 2],
        strict=True,
    ):  # fmt: skip
        record = decode_record(log, position)
        assert (record.body, record.queue_id, record.queue_offset) == (body, queue_id, offset)
    assert everything(store) == [b"0", b"3", b"6", b"9", b"oneway"]
    assert everything(store, queue_id=2) == [b"2", b"5", b"8", b"at once", b"last"]
    assert committed(store.commit()).placed == []


def test_a_run_without_anybody_waiting_is_seen(store):
    assert not store.appender.waiting()
    enqueue(store, None, b"x")
    assert store.appender.waiting()
    store.appender.encode_pending()
    assert store.appender.waiting()
    committed(store.commit())
    assert not store.appender.waiting()
    store.flags.raise_flag(Flag.DISK_FULL, "the disk is full")
    enqueue(store, None, b"x")
    store.appender.encode_pending()
    assert store.appender.waiting()


def test_no_more_than_so_many_wait(store):
    for number in range(MAX_PENDING_MESSAGES):
        assert len(store.appender.pending) == number
        enqueue(store, number, b"x")
    assert not store.appender.pending
    enqueue(store, "one more", b"x")
    assert senders(store.commit()) == [*range(MAX_PENDING_MESSAGES), "one more"]


def test_what_comes_to_a_shut_store_is_refused_with_the_reason(store):
    enqueue(store, "before", b"x")
    store.appender.encode_pending()
    enqueue(store, "behind", b"y")
    enqueue(store, None, b"oneway")
    store.flags.raise_flag(Flag.DISK_FULL, "the disk is full")
    commit = committed(store.commit())
    assert senders(commit) == ["before"]
    assert refused_senders(commit) == ["behind", None]
    assert "the disk is full" in commit.refused[0][1].remark
    store.flags.clear(Flag.DISK_FULL)
    send(store, b"z")
    assert everything(store) == [b"x", b"z"]


@pytest.mark.parametrize(
    ("flags", "makes_room", "taken"),
    [
        ([Flag.DISK_FULL], True, True),
        ([Flag.DISK_FULL], False, False),
        ([Flag.NOT_WRITEABLE], True, False),
        ([Flag.DISK_FULL, Flag.NOT_WRITEABLE], True, False),
    ],
)
def test_what_makes_room_passes_a_full_disk_and_nothing_else(store, flags, makes_room, taken):
    send(store, b"first")
    for flag in flags:
        store.flags.raise_flag(flag, "why")
    append = partial(
        store.appender.append, "T", 0, b"x", b"", born_timestamp_ms=1, born_host=b"\x7f\0\0\1\0\0\0\1"
    )
    if taken:
        append(makes_room=makes_room)
    else:
        with pytest.raises(StoreRefused, match="the store accepts no messages: why"):
            append(makes_room=makes_room)
    with pytest.raises(StoreRefused):
        append()


def test_of_a_group_each_message_is_stored_or_refused_by_itself(store):
    queue = store.appender.queue_of("T", 0)
    bodies = [b"first", b"x" * 2_000, b"last"]
    group = [TickMessage(None, queue, body, b"", START_MS, HOST, None, PLAIN) for body in bodies]
    enqueue(store, "before", b"before")
    refused = store.appender.append_all(group, SizeLimits(1_000, 2_000))
    assert list(refused) == [1]
    assert "length limit 1000B" in refused[1].remark
    assert committed(store.commit()).refused == []
    assert everything(store) == [b"before", b"first", b"last"]
    assert [message.queue_offset for message in group] == [1, 0, 2]


async def test_keys_are_found_beside_messages_without_keys(store):
    for number in range(3):
        key = b"KEY%d" % number
        enqueue(store, number, b"%d" % number, properties=b"UNIQ_KEY\x01" + key, keys=key)
        enqueue(store, None, b"no key", properties=b"UNIQ_KEY\x01" + key, keys=())
    committed(store.commit())
    for number in range(3):
        (found,) = await store.lookups.by_key("T", f"KEY{number}", 9, 0, 1 << 62, 1 << 20)
        assert decode_record(found).body == b"%d" % number


def test_what_waits_at_a_stop_is_stored(tmp_path, store):
    enqueue(store, "sender", b"x")
    store.close()
    store = open_store(tmp_path)
    assert everything(store) == [b"x"]


def test_a_segment_that_cannot_be_made_refuses_what_does_not_fit(disk, store):
    send(store, bytes(50_000))
    disk.fail("reserve", error=errno.ENOSPC, times=99)
    for number in range(12):
        enqueue(store, number, b"%d" % number + bytes(2_000))
    enqueue(store, "small", b"small")  # fits into the rest of the segment
    commit = committed(store.commit())
    assert senders(commit) == [*range(7), "small"]
    assert refused_senders(commit) == [*range(7, 12)]
    assert {refusal.response_code for _, refusal in commit.refused} == {ResponseCode.SYSTEM_ERROR}
    disk.heal()
    enqueue(store, "again", bytes(2_000))
    assert placed(committed(store.commit())) == [("again", 64 << 10, 9)]
    check_sound(store)


def test_a_failed_write_gives_every_offset_back(disk, store):
    send(store, b"first")
    disk.fail("pwrite", match="commitlog")
    for number in range(3):
        enqueue(store, number, b"lost", "T", number % 2)
    commit = store.commit()
    assert commit.error is not None
    assert senders(commit) == [0, 1, 2]
    for number in range(3):
        enqueue(store, number, b"kept", "T", number % 2)
    assert committed(store.commit()).refused == []
    assert everything(store) == [b"first", b"kept", b"kept"]
    check_sound(store)


def test_an_error_nobody_expects_refuses_what_is_not_in_the_buffer(store, monkeypatch, caplog):
    for number in range(3):
        enqueue(store, f"before {number}", b"%d" % number)
    store.appender.encode_pending()
    real = appender.crc32
    monkeypatch.setattr(appender, "crc32", lambda body: real(body) if body != b"poison" else 1 / 0)
    for number in range(40):  # more than a segment, so that some are buffered before the error
        enqueue(store, f"sender {number}", b"%d" % number + bytes(2_000))
    enqueue(store, "poison", b"poison")
    enqueue(store, "behind", b"behind")
    commit = committed(store.commit())
    kept = senders(commit)
    assert kept == [*(f"before {n}" for n in range(3)), *(f"sender {n}" for n in range(len(kept) - 3))]
    assert 20 < len(kept) < 43
    assert refused_senders(commit) == [
        *(f"sender {n}" for n in range(len(kept) - 3, 40)), "poison", "behind",
    ]  # fmt: skip
    assert commit.refused[0][1].remark == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in caplog.text
    send(store, b"later")
    found = everything(store)
    assert found[:3] == [b"0", b"1", b"2"]
    assert [body[:-2_000] for body in found[3:-1]] == [b"%d" % number for number in range(len(kept) - 3)]
    assert found[-1] == b"later"
    check_sound(store)


def test_an_interrupt_leaves_whole_records_alone(store, monkeypatch):
    def interrupted(_body: Body) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(appender, "crc32", interrupted)
        enqueue(store, "sender", b"x")
        with pytest.raises(KeyboardInterrupt):
            store.appender.encode_pending()
    assert refused_senders(committed(store.commit())) == ["sender"]
    send(store, b"y")
    assert everything(store) == [b"y"]
    check_sound(store)


def test_refusals_keep_no_bodies_alive(store):
    """The bodies must be freed without the garbage collector, which may run late."""

    class Watched(bytearray):
        pass

    watched: list[weakref.ref[Watched]] = []
    gc.disable()
    try:
        for full in (False, True):
            for size in (100, 200, 300, store.appender.limits.body + 1):
                body = Watched(size)
                watched.append(weakref.ref(body))
                enqueue(store, size, body)
                del body
            if full:
                store.flags.raise_flag(Flag.DISK_FULL, "the disk is full")
            assert store.commit().refused
        assert [each() for each in watched if each()] == []
    finally:
        gc.enable()


async def test_a_topic_that_is_deleted_in_the_same_tick_takes_its_messages_along(store):
    store.start()
    send(store, b"old")
    enqueue(store, "deleted", b"x")
    enqueue(store, "elsewhere", b"y", "Other")
    assert await store.deletion.delete(["T"]) == 1
    enqueue(store, "new", b"z")
    commit = committed(store.commit())
    assert [(sender, offset) for sender, _, offset in placed(commit)] == [
        ("deleted", 1), ("elsewhere", 0), ("new", 0),
    ]  # fmt: skip
    assert everything(store) == [b"z"]
    assert everything(store, "Other") == [b"y"]
    await store.stop()
    check_sound(store)
