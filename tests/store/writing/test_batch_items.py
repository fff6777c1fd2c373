"""The fast parsers of a batch return the same values as the general ones."""

from __future__ import annotations

import shutil
from itertools import accumulate, chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.properties.strategies import PROPERTIES
from tests.store.kit import HOST, START_MS, by_key, check_sound, committed, open_store, put_batch

from cometmq.errors import BodyError
from cometmq.protocol.batch import encode_batch, iter_batch
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.properties.values import index_keys, stored_tags_code
from cometmq.protocol.record.layout import HEADS, MAGIC_V1, SYS_FLAG_AT
from cometmq.protocol.record.one import decode_record, encode_record
from cometmq.store.base.refusal import StoreRefused
from cometmq.store.writing.batch_items import (
    MAX_CACHED_MESSAGES,
    Alike,
    Common,
    Mixed,
    batch_items,
    cached_struct,
)

ITEMS = st.lists(
    st.tuples(
        st.integers(-(2**31), 2**31 - 1),
        st.binary(max_size=20),
        st.lists(st.sampled_from([b"a\x01b", b"\x02", b"\x01", b"KEYS\x01k"]), max_size=4).map(b"".join),
    ),
    max_size=5,
)


COMMON = Common(HEADS[8, 8], MAGIC_V1, 5, 77, (0, START_MS, HOST, START_MS + 1, HOST, 3, 0), b"\x05Topic")


def columns(data, extra=b""):
    """Return the flags, bodies and properties of a batch."""
    found = batch_items(data, extra)
    flags = [found.flag] * len(found.bodies) if isinstance(found, Alike) else found.flags
    return flags, found.bodies, found.properties()()


def rows(data):
    return list(zip(*columns(data), strict=True))


def joined(properties, extra):
    return properties + (b"\x02" if extra and properties and properties[-1] != 2 else b"") + extra


@given(ITEMS, st.sampled_from([b"", b"CLUSTER\x01c"]))
def test_items_of_a_batch_get_the_properties_of_the_request(items, extra):
    data = encode_batch(items)
    if not items:
        with pytest.raises(StoreRefused, match="empty"):
            batch_items(data, extra)
        return
    found = columns(memoryview(data), extra)
    for flag, body, properties, item in zip(*found, iter_batch(data), strict=True):
        assert (flag, body) == (item.flag, item.body)
        assert properties == joined(item.properties, extra)


@given(ITEMS.filter(len), st.data())
def test_a_damaged_batch_is_refused_exactly_when_the_careful_reader_refuses_it(items, draw):
    data = bytearray(encode_batch(items))
    for _ in range(draw.draw(st.integers(1, 3))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    del data[draw.draw(st.integers(0, len(data))) or len(data) :]
    problem = None
    expected = []
    try:
        expected = [tuple(item) for item in iter_batch(bytes(data))]
    except BodyError as error:
        problem = str(error)
    if problem is None:
        assert rows(data) == expected
        return
    with pytest.raises(StoreRefused) as refusal:
        batch_items(data, b"")
    assert refusal.value.remark == problem


KEY_PARTS = st.sampled_from([b"a", b"b", b"\x01", b"\x02", b" ", b"TAGS\x01", b"KEYS\x01k", b"UNIQ_KEY\x01x"])
NINE_BYTES = st.lists(KEY_PARTS, min_size=1).map(lambda parts: b"".join(parts)[:9].ljust(9, b"z"))


COMMONS = st.builds(
    lambda magic, queue_id, offset, born_host, store_host, topic: Common(
        HEADS[len(born_host), len(store_host)], magic, queue_id, offset,
        (0, START_MS, born_host, START_MS + 1, store_host, 3, 0), bytes([len(topic)]) + topic,
    ),
    st.sampled_from([MAGIC_V1]), st.integers(0, 2**31 - 1), st.integers(0, 2**62),
    st.sampled_from([HOST, HOST + b"123456789012"]), st.sampled_from([HOST, HOST + b"123456789012"]),
    st.sampled_from([b"T", b"Topic"]),
)  # fmt: skip


def records_are_those_of_the_careful_encoder(data, extra, common):
    """Check records, tag codes and keys of a batch for every parser."""
    found = batch_items(data, extra)
    sizes = found.sizes(common.head.size + len(common.topic) + 2)
    positions = list(accumulate(sizes, initial=1000))
    records = found.records(common, sizes, positions[:-1])
    _, born_ms, born_host, store_ms, store_host, reconsume_times, _ = common.behind_position
    items = list(iter_batch(bytes(data)))
    texts = [joined(item.properties, extra) for item in items]
    for number, (item, text) in enumerate(zip(items, texts, strict=True)):
        expected = encode_record(
            common.topic[1:].decode(), item.body, text, flag=item.flag, queue_id=common.queue_id,
            queue_offset=common.queue_offset + number, physical_offset=positions[number],
            born_timestamp_ms=born_ms, born_host=born_host,
            store_timestamp_ms=store_ms, store_host=store_host, reconsume_times=reconsume_times,
        )  # fmt: skip
        size = sizes[number]
        assert len(expected) == size
        got = bytearray(records[positions[number] - 1000 : positions[number] - 1000 + size])
        got[SYS_FLAG_AT : SYS_FLAG_AT + 4] = expected[SYS_FLAG_AT : SYS_FLAG_AT + 4]  # set by the caller
        assert got == expected
    assert len(records) == sum(sizes)
    assert found.longest_properties == max(map(len, texts))
    assert list(found.properties()()) == texts
    codes, keys = found.codes_and_keys()
    assert list(codes) == [stored_tags_code(text) for text in texts]
    assert keys is None or [[key] for key in keys] == [index_keys(text) for text in texts]
    return found


@given(ITEMS.filter(len), st.sampled_from([b"", b"CLUSTER\x01c"]), COMMONS)
def test_records_of_any_batch(items, extra, common):
    records_are_those_of_the_careful_encoder(encode_batch(items), extra, common)


@given(
    st.lists(st.tuples(st.binary(min_size=5, max_size=5), NINE_BYTES), min_size=1, max_size=6),
    st.integers(-5, 5), PROPERTIES, PROPERTIES,
    st.sampled_from([b"", b"CLUSTER\x01c", b"UNIQ_KEY\x01BATCH", b"KEYS\x01k", b"TAGS\x01t"]), COMMONS,
)  # fmt: skip
def test_records_of_a_batch_of_one_form(parts, flag, before, behind, extra, common):
    items = [(flag, body, before + b"\x02UNIQ_KEY\x01" + key + behind) for body, key in parts]
    records_are_those_of_the_careful_encoder(encode_batch(items), extra, common)


ALIKE = [
    (3, b"body%d" % number, b"A\x01b\x02UNIQ_KEY\x01%04d\x02WAIT\x01true" % number) for number in range(9)
]


def changed(number, flag=3, body=b"body9", text=b"A\x01b\x02UNIQ_KEY\x010009\x02WAIT\x01true"):
    return [*ALIKE[:number], (flag, body, text), *ALIKE[number + 1 :]]


@pytest.mark.parametrize("extra", [b"", b"CLUSTER\x01c"])
def test_messages_that_differ_in_body_and_unique_key_alone_go_the_short_way(extra):
    data = encode_batch(ALIKE)
    assert isinstance(records_are_those_of_the_careful_encoder(data, extra, COMMON), Alike)
    assert isinstance(records_are_those_of_the_careful_encoder(encode_batch(ALIKE[:1]), extra, COMMON), Alike)


def test_the_structs_of_very_large_batches_are_not_kept():
    items = [(3, b"body", b"UNIQ_KEY\x01%04d" % number) for number in range(MAX_CACHED_MESSAGES + 1)]
    cached_struct.cache_clear()
    for batch, kept in ((items, 0), (items[:-1], 2)):
        assert isinstance(records_are_those_of_the_careful_encoder(encode_batch(batch), b"", COMMON), Alike)
        assert cached_struct.cache_info().currsize == kept


@pytest.mark.parametrize("number", [0, 4, 8])
@pytest.mark.parametrize(
    "change",
    [
        {"flag": 4},
        {"body": b"body"},
        {"body": b"body99"},
        {"text": b""},
        {"text": b"A\x01c\x02UNIQ_KEY\x010009\x02WAIT\x01true"},
        {"text": b"A\x01b\x02UNIQ_KEY\x010009\x02WAIT\x01trui"},
        {"text": b"A\x01b\x02UNIQ_KEY\x0100\x029\x02WAIT\x01true"},
        {"text": b"A\x01b\x02UNIQ_KEY\x0100009\x02WAIT\x01tru"},
        {"text": b"A\x01b\x02UNIQ_KEY\x01009\x02WAIT\x01true", "body": b"body99"},
        {"text": b"A\x01b\x02UNIQ_KEY\x010009\x02KEYS\x01true"},
        {"text": b"A\x01b\x02UNIQ_KEZ\x010009\x02WAIT\x01true"},
    ],
)
def test_any_other_difference_takes_the_long_way(number, change):
    data = encode_batch(changed(number, **change))
    assert isinstance(records_are_those_of_the_careful_encoder(data, b"CLUSTER\x01c", COMMON), Mixed)


def test_a_unique_key_of_the_request_takes_the_long_way():
    assert isinstance(batch_items(encode_batch(ALIKE), b"UNIQ_KEY\x01BATCH"), Mixed)


@pytest.mark.parametrize("end", ["running", "stopped", "killed"])
def test_items_with_a_second_unique_key_are_found_by_the_id_that_clients_see(tmp_path, store, end):
    """4.9 appends the request's properties to those of each item, and clients of 5.x put an id into both."""
    items = [(0, b"%d" % number, b"UNIQ_KEY\x01ITEM%d\x02TAGS\x01t" % number) for number in range(3)]
    put_batch(store, encode_batch(items), properties=b"UNIQ_KEY\x01BATCH")
    committed(store.commit())
    if end == "stopped":
        store.close()
    elif end == "killed":
        store.crash()
        shutil.rmtree(tmp_path / "index", ignore_errors=True)
    if end != "running":
        store = open_store(tmp_path)
    found = by_key(store, "T", "BATCH", 32, 0, START_MS + 1)
    assert [decode_record(record).body for record in found] == [b"0", b"1", b"2"]
    assert decode_record(found[0]).properties["UNIQ_KEY"] == "BATCH"
    assert by_key(store, "T", "ITEM0", 32, 0, START_MS + 1) == []
    check_sound(store)


def test_messages_of_batches_with_keys_of_any_length_are_found(store):
    groups = [["a1", "a2"], ["bb1", "bb2"], ["é1", "é2"], ["c"]]
    for keys in groups:
        items = [(0, key.encode(), b"UNIQ_KEY\x01" + key.encode()) for key in keys]
        put_batch(store, encode_batch(items), properties=b"CLUSTER\x01c")
    committed(store.commit())
    for key in chain.from_iterable(groups):
        found = by_key(store, "T", key, 32, 0, START_MS + 1)
        assert [decode_record(record).body for record in found] == [key.encode()]
    check_sound(store)


def test_a_batch_of_one_form_is_refused_whole_when_properties_grow_too_long(store):
    data = encode_batch([(0, b"x", b"UNIQ_KEY\x010000")])
    for beside, refused in (("UNIQ_KEY 0000 A ", False), ("UNIQ_KEY 0000 A", True)):
        extra = b"A\x01" + b"y" * (32_767 - len(beside))
        assert isinstance(batch_items(data, extra), Alike)
        if refused:
            before = store.log.next
            with pytest.raises(StoreRefused) as refusal:
                put_batch(store, data, properties=extra)
            assert refusal.value.response_code == ResponseCode.MESSAGE_ILLEGAL
            assert store.log.next == before
        else:
            put_batch(store, data, properties=extra)
    committed(store.commit())
    check_sound(store)


@pytest.mark.parametrize("key", [b"UNIQ_KEY\x01k", b"A\x01b"])  # for the fast and for the general parser
@pytest.mark.parametrize(("count", "extra"), [(1, 32_768), (1_000, 20_000)])
def test_what_a_request_adds_to_all_its_messages_is_bounded(key, count, extra):
    """A thousand empty messages with 20 kB of common properties would become 20 MB of records."""
    with pytest.raises(StoreRefused, match="at most 32767B are allowed, and 16777216B for all") as refusal:
        batch_items(encode_batch([(0, b"", key)] * count), b"E\x01" + b"x" * (extra - 2))
    assert refusal.value.response_code == ResponseCode.MESSAGE_ILLEGAL
