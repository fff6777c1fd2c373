"""Messages that are gathered and encoded in runs: the same bytes as one by one, and nobody is forgotten."""

from __future__ import annotations

import errno
import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.store.kit import HOST, START_MS, committed, everything, open_store, put, send, small

from cometmq.protocol.batch import encode_batch
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.record.one import decode_record
from cometmq.store import ManualClock, MessageStore, StoreRefused
from cometmq.store.base.flags import Flag
from cometmq.store.inspect.verify import verify
from cometmq.store.writing import appender
from cometmq.store.writing.appender import COPIED, MOST_GATHERED, Body, Incoming, Traits
from cometmq.testing.faulty_disk import FaultyDisk

PLAIN: Traits = (0, 0, 0, 0, 0, None, None)
HOST_V6 = bytes(15) + b"\1\0\0\xc3\x50"


def incoming(
    store: MessageStore, ticket: Any, body: Body, topic: str = "T", queue_id: int = 0, **more: Any
) -> Incoming:
    values = {"properties": b"", "born_host": HOST, "keys": None, "traits": PLAIN, **more}
    return (
        ticket, store.appender.queue_of(topic, queue_id), body, values["properties"], START_MS,
        values["born_host"], values["keys"], values["traits"],
    )  # fmt: skip


def gather(store: MessageStore, ticket: Any, body: Body, *place: Any, **more: Any) -> None:
    store.appender.gather(incoming(store, ticket, body, *place, **more))


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# What runs hold beside plain messages: prepared, committed, rolled back, delayed, with other flags and hosts.
TRAITS: list[Traits] = [
    PLAIN,
    (9, 0, 3, 0, 77, None, None),
    (0, 0x4, 0, 0, 0, None, None),
    (0, 0x8, 0, 4711, 5, None, None),
    (0, 0xC, 0, 4711, 0, None, None),
    (0, 0, 0, 0, 0, None, 10_000),
    (0, 0x10, 0, 0, 0, HOST_V6, None),
]


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
        for ticket in range(chance.choice((1, 3, 40))):
            topic, queue_id = chance.choice("TU"), chance.randrange(3)
            body = chance.randbytes(chance.choice((0, 5, 300, 1_500, COPIED, COPIED + 1, 30_000, 40_001)))
            if chance.random() < 0.05:
                data = encode_batch([(0, body[:100], b"UNIQ_KEY\x01%d" % n) for n in range(3)])
                for store in (alone, together):
                    batch = {"born_timestamp_ms": START_MS, "born_host": HOST}
                    store.batches.append(topic, queue_id, data, b"", **batch)
                continue
            text = b"KEYS\x01k%d\x02" % chance.randrange(9)
            host = chance.choice((HOST, HOST, HOST_V6))
            traits = chance.choice([PLAIN] * 9 + TRAITS)
            view = bytearray(body)
            gather(together, ticket, view, topic, queue_id, properties=text, born_host=host, traits=traits)
            if len(body) > COPIED:
                view[:] = bytes(len(view))  # it is the receiver's again
            flag, sys_flag, times, prepared, code, store_host, delay_ms = traits
            try:
                appended = put(
                    alone, body, topic, queue_id, text, born_host=host, flag=flag, sys_flag=sys_flag,
                    reconsume_times=times, prepared_transaction_offset=prepared, tags_code=code,
                    store_host=store_host, delay_ms=delay_ms,
                )  # fmt: skip
                expected.append((ticket, appended.physical_offset, appended.queue_offset))
            except StoreRefused:
                expected.append(ticket)
        committed(alone.commit())
        commit = committed(together.commit())
        refused = dict(commit.refused)
        assert commit.placed == [each for each in expected if each not in refused]
        assert list(refused) == [each for each in expected if isinstance(each, int)]
        refusals += len(refused)
        for clock in clocks:
            clock.advance(0.0015)
    alone.close()
    together.close()
    assert refusals
    assert files_of(tmp_path / "alone") == files_of(tmp_path / "together")


def test_each_hears_of_its_own_message_in_order(tmp_path):
    store = open_store(tmp_path)
    for number in range(10):
        gather(store, f"sender {number}", b"%d" % number, "T", number % 3)
    gather(store, None, b"oneway")
    put(store, b"at once", queue_id=2)
    gather(store, "last", b"last", "T", 2)
    commit = committed(store.commit())
    assert [ticket for ticket, *_ in commit.placed] == [*(f"sender {n}" for n in range(10)), "last"]
    log = bytes(store.log.read(0, store.log.end) or b"")
    for (_, position, offset), body, queue_id in zip(
        commit.placed, [*(b"%d" % n for n in range(10)), b"last"], [*(n % 3 for n in range(10)), 2],
        strict=True,
    ):  # fmt: skip
        record = decode_record(log, position)
        assert (record.body, record.queue_id, record.queue_offset) == (body, queue_id, offset)
    assert everything(store) == [b"0", b"3", b"6", b"9", b"oneway"]
    assert everything(store, queue_id=2) == [b"2", b"5", b"8", b"at once", b"last"]
    assert committed(store.commit()).placed == []
    store.close()


def test_a_run_without_anybody_waiting_is_seen(tmp_path):
    store = open_store(tmp_path)
    assert not store.appender.waiting()
    gather(store, None, b"x")
    assert store.appender.waiting()
    store.appender.settle()
    assert store.appender.waiting()
    committed(store.commit())
    assert not store.appender.waiting()
    store.flags.raise_flag(Flag.DISK_FULL, "the disk is full")
    gather(store, None, b"x")
    store.appender.settle()
    assert store.appender.waiting()
    store.crash()


def test_no_more_than_so_many_are_gathered(tmp_path):
    store = open_store(tmp_path)
    for number in range(MOST_GATHERED):
        assert len(store.appender.gathered) == number
        gather(store, number, b"x")
    assert not store.appender.gathered
    gather(store, "one more", b"x")
    assert [ticket for ticket, *_ in store.commit().placed] == [*range(MOST_GATHERED), "one more"]
    store.close()


def test_what_comes_to_a_shut_store_is_refused_with_the_reason(tmp_path):
    store = open_store(tmp_path)
    gather(store, "before", b"x")
    store.appender.settle()
    gather(store, "behind", b"y")
    gather(store, None, b"oneway")
    store.flags.raise_flag(Flag.DISK_FULL, "the disk is full")
    commit = committed(store.commit())
    assert [ticket for ticket, *_ in commit.placed] == ["before"]
    assert [ticket for ticket, _ in commit.refused] == ["behind", None]
    assert "the disk is full" in commit.refused[0][1].remark
    store.flags.clear(Flag.DISK_FULL)
    send(store, b"z")
    assert everything(store) == [b"x", b"z"]
    store.close()


def test_what_was_gathered_before_a_stop_is_stored(tmp_path):
    store = open_store(tmp_path)
    gather(store, "sender", b"x")
    store.close()
    store = open_store(tmp_path)
    assert everything(store) == [b"x"]
    store.close()


def test_a_segment_that_cannot_be_made_refuses_what_does_not_fit(tmp_path):
    disk = FaultyDisk(really_sync=False)
    store = open_store(tmp_path, disk)
    send(store, bytes(50_000))
    disk.fail("reserve", error=errno.ENOSPC, times=99)
    for number in range(12):
        gather(store, number, b"%d" % number + bytes(2_000))
    gather(store, "small", b"small")  # fits what is left of the segment
    commit = committed(store.commit())
    assert [ticket for ticket, *_ in commit.placed] == [*range(7), "small"]
    assert [ticket for ticket, _ in commit.refused] == [*range(7, 12)]
    assert {refusal.response_code for _, refusal in commit.refused} == {ResponseCode.SYSTEM_ERROR}
    disk.heal()
    gather(store, "again", bytes(2_000))
    assert committed(store.commit()).placed == [("again", 64 << 10, 9)]
    store.close()
    assert verify(str(tmp_path), config=small(tmp_path)).findings == []


def test_a_failed_write_gives_every_offset_back(tmp_path):
    disk = FaultyDisk(really_sync=False)
    store = open_store(tmp_path, disk)
    send(store, b"first")
    disk.fail("pwrite", match="commitlog")
    for number in range(3):
        gather(store, number, b"lost", "T", number % 2)
    commit = store.commit()
    assert commit.error is not None
    assert [ticket for ticket, *_ in commit.placed] == [0, 1, 2]
    for number in range(3):
        gather(store, number, b"kept", "T", number % 2)
    assert committed(store.commit()).refused == []
    assert everything(store) == [b"first", b"kept", b"kept"]
    store.close()
    assert verify(str(tmp_path), config=small(tmp_path)).findings == []


def test_an_error_nobody_expects_refuses_what_is_not_in_the_buffer(tmp_path, monkeypatch, caplog):
    store = open_store(tmp_path)
    for number in range(3):
        gather(store, f"before {number}", b"%d" % number)
    store.appender.settle()
    real = appender.crc32
    monkeypatch.setattr(appender, "crc32", lambda body: real(body) if body != b"poison" else 1 / 0)
    for number in range(40):  # more than a segment, so that some are in the buffer before the error
        gather(store, f"sender {number}", b"%d" % number + bytes(2_000))
    gather(store, "poison", b"poison")
    gather(store, "behind", b"behind")
    commit = committed(store.commit())
    kept = [ticket for ticket, *_ in commit.placed]
    assert kept == [*(f"before {n}" for n in range(3)), *(f"sender {n}" for n in range(len(kept) - 3))]
    assert 20 < len(kept) < 43
    assert [ticket for ticket, _ in commit.refused] == [
        *(f"sender {n}" for n in range(len(kept) - 3, 40)), "poison", "behind",
    ]  # fmt: skip
    assert commit.refused[0][1].remark == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in caplog.text
    send(store, b"later")
    found = everything(store)
    assert found[:3] == [b"0", b"1", b"2"]
    assert [body[:-2_000] for body in found[3:-1]] == [b"%d" % number for number in range(len(kept) - 3)]
    assert found[-1] == b"later"
    store.close()
    assert verify(str(tmp_path), config=small(tmp_path)).findings == []


def test_an_interrupt_leaves_whole_records_alone(tmp_path, monkeypatch):
    store = open_store(tmp_path)

    def interrupted(_body: Body) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(appender, "crc32", interrupted)
        gather(store, "sender", b"x")
        with pytest.raises(KeyboardInterrupt):
            store.appender.settle()
    assert [ticket for ticket, _ in committed(store.commit()).refused] == ["sender"]
    send(store, b"y")
    assert everything(store) == [b"y"]
    store.close()
    assert verify(str(tmp_path), config=small(tmp_path)).findings == []


def test_refusals_keep_no_bodies_alive(tmp_path):
    """Without the help of the garbage collector: it may come late."""
    store = open_store(tmp_path)

    class Watched(bytearray):
        pass

    watched: list[weakref.ref[Watched]] = []
    gc.disable()
    try:
        for full in (False, True):
            for size in (100, 200, 300, store.appender.largest_body + 1):
                body = Watched(size)
                watched.append(weakref.ref(body))
                gather(store, size, body)
                del body
            if full:
                store.flags.raise_flag(Flag.DISK_FULL, "the disk is full")
            assert store.commit().refused
        assert [each() for each in watched if each()] == []
    finally:
        gc.enable()
    store.crash()


async def test_a_topic_that_is_deleted_in_the_same_tick_takes_its_messages_along(tmp_path):
    store = open_store(tmp_path)
    store.start()
    send(store, b"old")
    gather(store, "deleted", b"x")
    gather(store, "elsewhere", b"y", "Other")
    assert await store.deletion.delete(["T"]) == 1
    gather(store, "new", b"z")
    commit = committed(store.commit())
    assert [(ticket, offset) for ticket, _, offset in commit.placed] == [
        ("deleted", 1), ("elsewhere", 0), ("new", 0),
    ]  # fmt: skip
    assert everything(store) == [b"z"]
    assert everything(store, "Other") == [b"y"]
    await store.stop()
    assert verify(str(tmp_path), config=small(tmp_path)).findings == []
