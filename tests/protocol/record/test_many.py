"""Decoding a group of records with numpy gives the same results as decoding them one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.protocol.record.layout import MIN_SIZE
from cometmq.protocol.record.many import MIN_GROUP_RECORDS, RecordGroup, valid_group
from cometmq.protocol.record.one import Facts, encode_record, record_facts

BASE = 7 << 20
HOST_V4, HOST_V6 = bytes(8), bytes(20)
TOPICS = ("T", "Топик", "L" * 300, "%RETRY%group")


def records(chance: random.Random, count: int) -> list[bytes]:
    """Build consecutive records of all shapes, beginning at log position BASE."""
    found: list[bytes] = []
    at = BASE
    for number in range(count):
        born, store = (chance.choice((HOST_V4, HOST_V4, HOST_V6)) for _ in range(2))
        properties = (
            b"" if chance.random() < 0.2 else b"UNIQ_KEY\x01%032X\x02TAGS\x01t%d" % (number, number % 3)
        )
        if chance.random() < 0.02:
            properties += b"\x02odd\x01a\0b"
        found.append(
            encode_record(
                topic=chance.choice(TOPICS),
                body=chance.randbytes(chance.choice((0, 1, 50, 700))),
                properties=properties,
                queue_id=number % 5,
                queue_offset=number,
                physical_offset=at,
                flag=number,
                sys_flag=chance.choice((0, 1, 4, 8)),
                born_timestamp_ms=1_700_000_000_000 + number,
                born_host=born,
                store_timestamp_ms=1_700_000_100_000 + number,
                store_host=store,
            )
        )
        at += len(found[-1])
    return found


def one_by_one(data: bytes, *, check_crc: bool = True) -> list[Facts]:
    found: list[Facts] = []
    at = 0
    while at + MIN_SIZE <= len(data):
        facts = record_facts(memoryview(data), at, BASE + at, check_crc=check_crc)
        if facts is None:
            break
        found.append(facts)
        at += facts.size
    return found


def together(data: bytes, *, most: int = 4096, check_crc: bool = True) -> list[Facts]:
    group = valid_group(data, 0, BASE, most, check_crc=check_crc)
    return [] if group is None else list(group.facts())


def doubted(facts: Facts) -> bool:
    return b"\0" in facts.properties


@given(st.integers(0, 1 << 32), st.integers(0, 3), st.booleans())
def test_damaged_or_not(seed: int, flips: int, check_crc: bool) -> None:
    chance = random.Random(seed)
    data = bytearray(b"".join(records(chance, MIN_GROUP_RECORDS + 20)))
    for _ in range(flips):
        # Most fields are near the magic number; a flip in a body would have no effect.
        at = chance.choice([m for m in range(len(data)) if data[m : m + 3] == b"\xda\xa3\x20"] or [0])
        data[min(len(data) - 1, at + chance.randrange(-4, 140))] ^= 1 << chance.randrange(8)
    del data[len(data) - chance.choice((0, 0, 1, 50)) :]
    expected = one_by_one(bytes(data), check_crc=check_crc)
    found = together(bytes(data), check_crc=check_crc)
    assert found == expected[: len(found)]
    if len(found) < len(expected) and found:
        assert doubted(expected[len(found)])
    elif not found and expected:
        assert doubted(expected[0]) or len(expected) < MIN_GROUP_RECORDS


def test_every_shape_occurs() -> None:
    found = together(b"".join(records(random.Random(1), 60)))
    assert {facts.sys_flag & 0x30 for facts in found} == {0, 0x10, 0x20, 0x30}
    assert {facts.topic for facts in found} == set(TOPICS)


def test_not_more_than_asked_for() -> None:
    data = b"".join(records(random.Random(3), 100))
    assert together(data, most=40) == one_by_one(data)[:40]


def test_few_records_are_left_to_others() -> None:
    data = b"".join(records(random.Random(3), MIN_GROUP_RECORDS - 1))
    assert valid_group(data, 0, BASE, 4096) is None


@pytest.mark.parametrize("rows", [[0], [3, 1, 30]])
def test_rows_of_a_run(rows: list[int]) -> None:
    data = b"".join(records(random.Random(5), 40))
    group = valid_group(data, 0, BASE, 4096)
    assert group is not None
    every = one_by_one(data)
    assert list(group.facts(np.array(rows))) == [every[row] for row in rows]
    assert group.end == BASE + len(data)


def test_a_run_of_records_that_were_looked_at_one_by_one() -> None:
    data = b"".join(records(random.Random(9), 9))
    every = one_by_one(data)
    group = RecordGroup.of(every)
    assert list(group.facts()) == every
    assert group.end == BASE + len(data)
