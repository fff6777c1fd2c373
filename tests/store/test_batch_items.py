"""What the fast ways of a batch read is what the careful ones read."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.store.kit import HOST, START_MS, committed, open_store, small

from cometmq.errors import BodyError
from cometmq.protocol.batch import encode_batch, iter_batch
from cometmq.protocol.properties import decode_properties, java_hash, tags_code
from cometmq.protocol.record import decode_record
from cometmq.store.batch_append import batch_columns
from cometmq.store.keys import (
    code_and_key,
    codes_and_keys,
    hash_equal,
    hash_keys,
    index_keys,
    stored_tags_code,
)
from cometmq.store.refusal import StoreRefused
from cometmq.store.verify import verify

ITEMS = st.lists(
    st.tuples(
        st.integers(-(2**31), 2**31 - 1),
        st.binary(max_size=20),
        st.lists(st.sampled_from([b"a\x01b", b"\x02", b"\x01", b"KEYS\x01k"]), max_size=4).map(b"".join),
    ),
    max_size=5,
)


@given(ITEMS, st.sampled_from([b"", b"CLUSTER\x01c"]))
def test_items_of_a_batch_get_the_properties_of_the_request(items, extra):
    data = encode_batch(items)
    if not items:
        with pytest.raises(StoreRefused, match="empty"):
            batch_columns(data, extra)
        return
    found = batch_columns(memoryview(data), extra)
    for flag, body, properties, item in zip(*found, iter_batch(data), strict=True):
        assert (flag, body) == (item.flag, item.body)
        joint = b"\x02" if extra and item.properties and item.properties[-1] != 2 else b""
        assert properties == item.properties + joint + extra


@given(st.lists(st.tuples(st.binary(min_size=3, max_size=3), st.binary(min_size=4, max_size=4)), min_size=1))
def test_items_of_one_form_are_cut_like_any(parts):
    items = [(number, body, text) for number, (body, text) in enumerate(parts)]
    assert list(zip(*batch_columns(encode_batch(items), b""), strict=True)) == items


def test_items_of_one_size_need_not_be_of_one_form():
    items = [(1, b"abc", b"k\x01v\x02"), (2, b"abcde", b"k\x01"), (3, b"ab", b"k\x01vw\x02")]
    assert list(zip(*batch_columns(encode_batch(items), b""), strict=True)) == items


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
        assert list(zip(*batch_columns(data, b""), strict=True)) == expected
        return
    with pytest.raises(StoreRefused) as refusal:
        batch_columns(data, b"")
    assert refusal.value.remark == problem


PROPERTIES = st.lists(
    st.one_of(
        st.sampled_from(
            [b"\x01", b"\x02", b"\x02", b"UNIQ_KEY\x01", b"\x02UNIQ_KEY\x01A", b"UNIQ_KEY\x01B\x02"]
        ),
        st.sampled_from([b"TAGS\x01", b"TAGS\x01t", b"KEYS\x01", b"KEYS\x01k l", b"x", "é".encode()]),
    ),
    max_size=8,
).map(b"".join)


def keys_of_the_map(properties: bytes) -> list[bytes]:
    """What a reader of the whole map would index."""
    found = decode_properties(properties.decode())
    keys = [found.get("UNIQ_KEY", ""), *found.get("KEYS", "").split(" ")]
    return [key.encode() for key in keys if key]


@given(PROPERTIES)
@example(b"UNIQ_KEY\x01ITEM\x02TAGS\x01a\x02KEYS\x01k\x02UNIQ_KEY\x01BATCH\x02TAGS\x01b\x02KEYS\x01l m")
@example(b"UNIQ_KEY\x01A\x02UNIQ_KEY\x01\x02TAGS\x01a\x02TAGS\x01\x02KEYS\x01k\x02KEYS\x01")
@example(b"UNIQ_KEY\x01A\x02XUNIQ_KEY\x01A\x02MY_KEYS\x01k\x02XTAGS\x01a")
def test_keys_and_tags_are_those_that_every_reader_sees(properties):
    assert index_keys(properties) == keys_of_the_map(properties)
    assert stored_tags_code(properties) == tags_code(decode_properties(properties.decode()).get("TAGS"))


@given(st.lists(PROPERTIES, min_size=1, max_size=5))
@example([b"UNIQ_KEY\x01A\x02UNIQ_KEY\x01B\x02", b"UNIQ_KEY\x01B\x02KEYS\x01k\x02KEYS\x01l m", b"KEYS\x01n"])
def test_keys_of_many_records_hash_as_those_of_each(texts):
    hashes, lengths, records = hash_keys(texts)
    expected = [(number, key.decode()) for number, text in enumerate(texts) for key in keys_of_the_map(text)]
    assert records.tolist() == [number for number, _ in expected]
    assert hashes.tolist() == [java_hash(key) & 0xFFFFFFFF for _, key in expected]
    assert lengths.tolist() == [len(key) for _, key in expected]


@given(PROPERTIES)
@example(b"TAGS\x01a UNIQ_KEY\x01b\x02")
@example(b"TAGS\x01a UNIQ_KEY\x01c\x02")
def test_remembered_codes_and_keys_are_those_of_the_properties(properties):
    for _ in range(2):
        code, key = code_and_key(properties)
        assert code == stored_tags_code(properties)
        assert key is None or index_keys(properties) == [key]


def codes_and_keys_are_those_of_each(properties):
    codes, keys = codes_and_keys(properties)
    assert codes == [stored_tags_code(each) for each in properties]
    assert keys is None or [[key] for key in keys] == [index_keys(each) for each in properties]
    return keys


@given(st.lists(PROPERTIES, min_size=1, max_size=5))
def test_codes_and_keys_of_many_are_those_of_each(properties):
    codes_and_keys_are_those_of_each(properties)


KEY_PARTS = st.sampled_from([b"a", b"b", b"\x01", b"\x02", b" ", b"TAGS\x01", b"KEYS\x01k", b"UNIQ_KEY\x01x"])
NINE_BYTES = st.lists(KEY_PARTS, min_size=1).map(lambda parts: b"".join(parts)[:9].ljust(9, b"z"))


@given(st.lists(NINE_BYTES, min_size=1), PROPERTIES, PROPERTIES)
def test_codes_and_keys_of_one_form_are_those_of_each(keys, before, behind):
    codes_and_keys_are_those_of_each([before + b"\x02UNIQ_KEY\x01" + key + behind for key in keys])


def test_one_form_is_seen_as_such():
    keys = [b"%04d" % number for number in range(40)]
    found = codes_and_keys_are_those_of_each([b"UNIQ_KEY\x01" + key + b"\x02TAGS\x01t" for key in keys])
    assert found == keys


@given(st.lists(st.binary(min_size=4, max_size=4).map(lambda key: key.hex().encode()), min_size=1))
def test_keys_of_one_length_hash_as_keys_of_any(keys):
    hashes = hash_equal(keys)
    assert hashes is not None
    assert hashes.tolist() == hash_keys([b"UNIQ_KEY\x01" + key for key in keys])[0].tolist()


def test_keys_of_several_lengths_and_beyond_ascii_are_left_to_others():
    assert hash_equal([b"a", b"bc"]) is None
    assert hash_equal(["é".encode()]) is None


@pytest.mark.parametrize("end", ["running", "stopped", "killed"])
def test_items_with_a_second_unique_key_are_found_by_the_id_that_clients_see(tmp_path, end):
    """4.9 adds the properties of the request behind those of each item; clients of 5.x give both an id."""
    store = open_store(tmp_path)
    items = [(0, b"%d" % number, b"UNIQ_KEY\x01ITEM%d\x02TAGS\x01t" % number) for number in range(3)]
    store.append_batch(
        "T", 0, encode_batch(items), b"UNIQ_KEY\x01BATCH", born_timestamp_ms=START_MS, born_host=HOST
    )
    committed(store.commit())
    if end == "stopped":
        store.close()
    elif end == "killed":
        store.crash()
        shutil.rmtree(tmp_path / "index", ignore_errors=True)
    if end != "running":
        store = open_store(tmp_path)
    found = store.query_by_key("T", "BATCH", 32, 0, START_MS + 1)
    assert [decode_record(record).body for record in found] == [b"0", b"1", b"2"]
    assert decode_record(found[0]).properties["UNIQ_KEY"] == "BATCH"
    assert store.query_by_key("T", "ITEM0", 32, 0, START_MS + 1) == []
    store.close()
    assert verify(str(tmp_path), config=small(tmp_path)).findings == []
