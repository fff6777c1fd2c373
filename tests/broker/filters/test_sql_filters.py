"""The cache of compiled filters, and time limits on filtering records."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.store.kit import open_store, put_all

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.filters import sql_filters
from cometmq.broker.filters.sql_filters import FilterScan, NotCompiled, SqlFilters
from cometmq.errors import CommandError, SqlError
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.properties.values import decode_properties, encode_properties
from cometmq.protocol.record.one import encode_record
from cometmq.protocol.sql import compile_sql

# Texts that contain separators, other names or their endings, bytes that are not UTF-8, and plain values.
PIECES = st.sampled_from(
    [b"", b"\1", b"\2", b"\2\1", b"a", b"aa", b"ba", b"b", b"a\1", b"\2a\1", b"a\0015", b"5", b"-5", b"1.5",
     b"x", b"true", b"\xff", b"\xe8\xae", "订".encode(), b"\0", b"y" * 70]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=4).map(b"".join)
PROPERTIES = st.one_of(
    st.lists(st.tuples(PIECES, PIECES), max_size=6).map(
        lambda pairs: b"\2".join(name + b"\1" + value for name, value in pairs)
    ),
    TEXTS,
)
OTHER = b"5\2a\0015\2"  # other data of the log beside the records
CASES = [
    compile_sql(text)
    for text in (
        "a = '5'", "a > 1", "a IS NULL", "a IS NOT NULL", "NOT a", "a CONTAINS 'a'", "a = b",
        "aa = a OR b = 'x'", "a = 5 AND ba = aa",
        "a IN ('5', 'x') OR b <> aa OR ba IS NULL", "TRUE", "a = TRUE",
        "a = '5' OR b = '5' OR aa = '5' OR ba = '5'", "a BETWEEN -5 AND 5 whatever = b",
    )
]  # fmt: skip


def checked(scan, data, at=0, size=None):
    """Return the verdict for one record."""
    return scan.find_match(data, 1000, [(1000 + at, size or len(data), 0)], 0, 1)[1]


class Compiler:
    """A compiler that counts its calls and can be delayed."""

    def __init__(self):
        self.texts = []
        self.seconds = 0.0

    def __call__(self, text, *, string_words):
        self.texts.append(text)
        time.sleep(self.seconds)
        return compile_sql(text, string_words=string_words)


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture
async def filters(compiler):
    return SqlFilters(BrokerConfig(), compiler)


async def compiled(filters, text, version=407):
    with pytest.raises(NotCompiled) as missing:
        filters.find(text, "SQL92", version)
    await filters.compile(missing.value.key, "asker")
    return filters.find(text, "SQL92", version)


async def test_an_expression_is_compiled_once_for_everybody(filters, compiler):
    found = await compiled(filters, "a > 1")
    assert found.matches({"a": "2"}.get)
    assert filters.find("a > 1", "SQL92", 317) is found
    await asyncio.gather(*(filters.compile(("b > 1", False), "asker") for _ in range(5)))
    assert compiler.texts == ["a > 1", "b > 1"]


async def test_the_words_of_5x_make_another_filter(filters):
    assert await compiled(filters, "contains = 'x'", 407)
    with pytest.raises(SqlError):
        await compiled(filters, "contains = 'x'", 453)


async def test_what_is_wrong_is_remembered_too(filters, compiler):
    with pytest.raises(SqlError, match="column 5"):
        await compiled(filters, "a > > 1")
    with pytest.raises(SqlError, match="column 5"):
        filters.find("a > > 1", "SQL92", 407)
    assert compiler.texts == ["a > > 1"]


async def test_the_table_is_bounded_and_keeps_what_is_used(filters, monkeypatch):
    monkeypatch.setattr(sql_filters, "MAX_CHARACTERS", 10 * 105)
    monkeypatch.setattr(sql_filters, "REST", 0.0)
    first = await compiled(filters, "a > 0")
    for number in range(1, 15):
        await compiled(filters, f"b > {number % 10}" if number < 10 else f"c > {number % 10}")
        assert filters.find("a > 0", "SQL92", 407) is first
    with pytest.raises(NotCompiled):
        filters.find("b > 1", "SQL92", 407)
    assert filters.find("c > 4", "SQL92", 407)


async def test_after_compiling_the_loop_has_a_rest(filters, compiler):
    loop = asyncio.get_running_loop()
    await compiled(filters, "a > 0")  # the first compilation imports the parser
    compiler.seconds = 0.02
    begun = loop.time()
    for number in range(3):
        await filters.compile((f"b > {number}", False), "asker")
    assert loop.time() - begun >= 3 * 0.02 + 2 * 0.08


async def test_who_asks_for_many_does_not_keep_others_waiting(filters, compiler):
    many = [asyncio.create_task(filters.compile((f"a > {number}", False), "busy")) for number in range(9)]
    await asyncio.sleep(0)
    await filters.compile(("b > 0", False), "other")
    assert compiler.texts == ["a > 0", "b > 0"]
    await asyncio.gather(*many)


async def test_when_the_broker_stops_what_waits_is_not_compiled(filters, compiler):
    compiler.seconds = 0.05
    waiting = [
        asyncio.create_task(filters.compile((f"c > {number}", False), "asker")) for number in range(100)
    ]
    await asyncio.sleep(0)
    filters.stop()
    first, *others = await asyncio.gather(*waiting, return_exceptions=True)
    assert first is None
    assert {(type(each), each.code) for each in others} == {
        (CommandError, ResponseCode.SERVICE_NOT_AVAILABLE)
    }
    assert compiler.texts == ["c > 0"]
    await filters.compile(("c > 0", False), "asker")


@given(
    st.lists(
        st.tuples(PROPERTIES, TEXTS, st.sampled_from([1, 127, 128]), st.booleans()), min_size=1, max_size=4
    ),
    st.sampled_from(CASES),
    st.booleans(),
)
@example([(b"b\1x", b"\2a\0015", 1, False)], CASES[0], False)
@example([(b"b\1x\2a\0015", b"", 1, False)], CASES[0], False)
@example([(b"a\1x\2b\1x", b"", 1, False)], CASES[6], False)
@example([(b"xa\0015\2a\1\2", b"", 1, False)], CASES[0], False)
def test_a_scan_of_bytes_has_the_verdicts_of_parsed_properties(records, sql, mutable):
    hosts = {False: bytes(8), True: bytes(20)}
    encoded = [
        encode_record("T" * length, body, text, born_host=hosts[is_v6])
        for text, body, length, is_v6 in records
    ]
    data = OTHER + b"".join(encoded) + OTHER
    for _ in range(2):  # evaluated, then from the table
        scan = FilterScan(sql, 1e9)
        at = len(OTHER)
        for (text, *_), record in zip(records, encoded, strict=True):
            passes = checked(scan, bytearray(data) if mutable else data, at, len(record))
            assert passes is sql.matches(decode_properties(text).get)
            at += len(record)


@pytest.mark.parametrize("expression", ["a = '5'", "a = '5' AND b IS NULL"])
def test_values_that_differ_in_every_message_do_not_grow_the_table(expression, monkeypatch):
    monkeypatch.setattr(sql_filters, "MAX_VERDICTS", 10)
    sql = compile_sql(expression)
    sizes = []
    for number in [*range(200), 10**100]:
        record = encode_record("T", b"", b"a\1%d" % number)
        scan = FilterScan(sql, 1e9)
        assert checked(scan, record) is (number == 5)
        sizes.append(len(scan.verdicts))
    assert 1 <= max(sizes) <= 10


@pytest.mark.parametrize(("repeats", "uses"), [(1, [False, False, True]), (5, [True, True, True])])
def test_a_table_that_saves_few_evaluations_pauses(repeats, uses, monkeypatch):
    monkeypatch.setattr(sql_filters, "MAX_VERDICTS", 10)
    monkeypatch.setattr(sql_filters, "PAUSED_SCANS", 2)
    scan = FilterScan(compile_sql("a = '5' AND b IS NULL"), 1e9)
    for number in range(11 * repeats):
        checked(scan, encode_record("T", b"", b"a\1%d" % (number // repeats)))
    assert [scan.verdicts.begin_scan() for _ in range(3)] == uses


class TestLook:
    @pytest.fixture
    def stored(self, tmp_path):
        def stored(**properties):
            store = open_store(tmp_path)
            put_all(store, [b"hello"], properties=encode_properties(properties))
            return store.log.read(0, store.log.end)

        return stored

    @pytest.fixture
    def record(self, stored):
        return stored(a="5")

    def test_records_are_tried_until_the_time_is_over(self, record):
        now = iter([0.0, 0.4, 0.8, 1.2])
        scan = FilterScan(compile_sql("a = 5"), 1.0, lambda: next(now))
        assert [checked(scan, record) for _ in range(5)] == [True, True, True, None, None]

    def test_the_first_is_tried_however_little_time_there_is(self, record):
        scan = FilterScan(compile_sql("a = 6"), 0.0)
        assert [checked(scan, record), checked(scan, record)] == [
            False,
            None,
        ]

    @pytest.mark.parametrize("names", [0, 1, 2, 4])
    def test_a_damaged_record_passes_so_that_its_reader_sees_it(self, record, names):
        scan = FilterScan(
            compile_sql(" AND ".join(["FALSE", *[f"p{each} = 1" for each in range(names)]])), 1.0
        )
        assert not checked(scan, record)
        size = len(record)
        damaged = [bytes(size), record[:84] + b"\0\1\0\0" + record[88:]]
        assert [checked(scan, bytes(each)) for each in damaged] == [True, True]
        assert checked(scan, bytes(record) + b"x", size=size + 1) is True

    @pytest.mark.parametrize("names", [1, 3, 4, 20])
    def test_any_number_of_properties_is_found(self, stored, names):
        values = {f"p{number}": str(number) for number in range(names)}
        record = stored(**values)
        wanted = " AND ".join(f"{name} = {value}" for name, value in values.items())
        for expression, passes in (
            (wanted, True),
            (f"{wanted} AND absent = 1", False),
            (f"{wanted} AND absent IS NULL", True),
        ):
            scan = FilterScan(compile_sql(expression), 1.0)
            assert [checked(scan, record), checked(scan, record)] == [
                passes,
                passes,
            ], expression
