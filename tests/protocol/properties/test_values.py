"""Property strings: look-ups and changes of single values equal a dictionary's, and hashes equal Java's."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.protocol.properties.strategies import PROPERTIES, keys_of_the_map

from cometmq.errors import MessageIllegal
from cometmq.protocol.properties import values
from cometmq.protocol.properties.key_hashes import hash_equal, hash_keys
from cometmq.protocol.properties.values import (
    append,
    decode_properties,
    drop,
    encode_properties,
    has_stray_separator,
    index_hash,
    index_keys,
    is_reserved,
    java_hash,
    put,
    stored_tags_code,
    tags_code,
    value_of,
)

# From docs/reference/storage.md, Consume queue, Index.
HASHES = {
    "": 0,
    "TagA": 2598919,
    "TagB": 2598920,
    "TAG_A": 79583420,
    "red": 112785,
    "VIP": 84989,
    "order_paid": 756282653,
    "订单": 1129459,
    "polygenelubricants": -(2**31),
    "\U0001f600": 1772899,
    "aaaaaaa": -1236860927,
    "TopicTest#key1": -1655984460,
    "TopicTest#k1": 2746024,
}


@pytest.mark.parametrize("text", HASHES)
def test_java_hash_vectors(text: str) -> None:
    assert java_hash(text) == HASHES[text]
    assert tags_code(text) == HASHES[text]


@pytest.mark.parametrize("text", ["x", "é", "aB3x" * 16, "aB3x" * 16 + "y", "订\U0001f600" * 43])
def test_java_hash_of_any_length_is_the_sum_that_java_defines(text: str) -> None:
    for count in (1, 2, 3, 64, 65):
        units = (text * count).encode("utf-16-be")
        total = 0
        for at in range(0, len(units), 2):
            total = (31 * total + int.from_bytes(units[at : at + 2], "big")) % 2**32
        assert java_hash(text * count) % 2**32 == total


def test_java_hash_takes_time_in_proportion_to_the_length() -> None:
    def seconds(length: int) -> float:
        text, begun = "k" * length, time.thread_time()  # CPU time, so that other processes do not count
        java_hash(text)
        return time.thread_time() - begun

    # Four times the length once took sixteen times as long, which is 14 s for the longer string.
    assert min(seconds(400_000) for _ in range(9)) < 10 * min(seconds(100_000) for _ in range(9))


def test_index_hash_has_no_sign() -> None:
    assert index_hash("TopicTest#key1") == 1655984460
    assert index_hash("polygenelubricants") == 0
    assert tags_code(None) == 0


def test_reserved_names_are_not_the_users() -> None:
    assert is_reserved("UNIQ_KEY")
    assert not is_reserved("__SHARDINGKEY")


# -- the whole string

names = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\x01\x02"), min_size=1, max_size=15
)


@given(st.dictionaries(names, names), st.booleans())
def test_properties_survive_with_either_ending(properties: dict[str, str], last_separator: bool) -> None:
    text = encode_properties(properties, last_separator)

    assert decode_properties(text) == properties
    assert text.endswith(b"\x02") == (last_separator and bool(properties))


@given(st.one_of(st.binary(), PROPERTIES))
def test_any_bytes_are_read(text: bytes) -> None:
    assert all(name and value for name, value in decode_properties(text).items())


@pytest.mark.parametrize(
    ("text", "properties"),
    [
        ("", {}),
        ("\x02\x02", {}),
        ("a\x01b", {"a": "b"}),
        ("a\x01b\x02", {"a": "b"}),
        ("a\x01\x02c\x01d", {"c": "d"}),
        ("\x01b\x02c\x01d", {"c": "d"}),
        ("ab\x02c\x01d", {"c": "d"}),
        ("a\x01b\x01c\x02c\x01d", {"a": "b\x01c", "c": "d"}),
        ("a\x01b\x02a\x01c\x02a\x01", {"a": "c"}),
        ("WAIT\x01false\x02CLUSTER\x01C\x02WAIT\x01true", {"WAIT": "true", "CLUSTER": "C"}),
    ],
)
def test_what_javas_reader_makes_of_odd_strings(text: str, properties: dict[str, str]) -> None:
    assert decode_properties(text.encode()) == properties


@pytest.mark.parametrize(
    "properties", [{"a\x01": "b"}, {"a": "b\x02c"}, {"a": "\x01"}, {"x": "y", "\x02": "z"}]
)
def test_a_separator_within_a_property_is_refused(properties: dict[str, str]) -> None:
    with pytest.raises(MessageIllegal, match="separator"):
        encode_properties(properties)


STRAY = [b"a\x01b\x01c", b"a\x01b\x02c", b"c\x02a\x01b", b"a\x01b\x02c\x02d\x01e", b"c", b"\x01\x01"]
SOUND = [b"", b"\x02", b"a\x01b", b"a\x01b\x02", b"\x02\x02a\x01b\x02\x02", b"a\x01\x02b\x01", b"\x01"]


@pytest.mark.parametrize("text", STRAY + SOUND)
def test_separators_inside_of_names_and_values_are_seen(text: bytes) -> None:
    assert has_stray_separator(text) == (text in STRAY)
    for beside in (b"x\x01y", b"x\x01y\x02", b""):
        assert has_stray_separator(b"\x02".join((beside, text, beside))) == (text in STRAY)


@given(st.dictionaries(st.text(min_size=1), st.text(min_size=1), max_size=4))
def test_what_can_be_written_has_no_stray_separator(properties: dict[str, str]) -> None:
    for last in (False, True):
        with suppress(MessageIllegal):
            assert not has_stray_separator(encode_properties(properties, last))


# -- single values

NAMES = st.sampled_from(
    ["KEYS", "TAGS", "WAIT", "WAIT2", "XWAIT", "DELAY", "UNIQ_KEY", "CLUSTER", "a", "WAI"]
)
VALUES = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=5
)


@given(st.dictionaries(NAMES, VALUES, max_size=6), NAMES, VALUES, st.booleans())
def test_values_are_found_dropped_and_put_as_in_a_dictionary(properties, name, value, last_separator):
    text, key = encode_properties(properties, last_separator), name.encode()
    assert value_of(text, key).decode() == properties.get(name, "")
    without = {key: kept for key, kept in properties.items() if key != name}
    assert decode_properties(drop(text, key)) == without
    changed = put(text, key, value.encode())
    assert value_of(changed, key).decode() == value
    assert decode_properties(changed) == {**without, name: value}


def test_of_duplicates_the_last_counts():
    assert value_of(b"TAGS\x01a\x02TAGS\x01b", b"TAGS") == b"b"
    assert value_of(b"TAGS\x01a\x02KEYS\x01TAGS", b"TAGS") == b"a"
    assert value_of(b"TAGS\x01a\x02TAGS\x01b\x02TAGS\x01", b"TAGS") == b"b"
    assert drop(b"TAGS\x01a\x02KEYS\x01k\x02TAGS\x01b", b"TAGS") == b"KEYS\x01k"
    assert append(b"", b"a\x01b") == b"a\x01b"


@given(PROPERTIES)
def test_values_of_odd_strings_are_those_of_the_map(properties):
    for name in ("UNIQ_KEY", "TAGS", "KEYS"):
        assert value_of(properties, name.encode()).decode() == decode_properties(properties).get(name, "")


@given(PROPERTIES)
@example(b"UNIQ_KEY\x01ITEM\x02TAGS\x01a\x02KEYS\x01k\x02UNIQ_KEY\x01BATCH\x02TAGS\x01b\x02KEYS\x01l m")
@example(b"UNIQ_KEY\x01A\x02UNIQ_KEY\x01\x02TAGS\x01a\x02TAGS\x01\x02KEYS\x01k\x02KEYS\x01")
@example(b"UNIQ_KEY\x01A\x02XUNIQ_KEY\x01A\x02MY_KEYS\x01k\x02XTAGS\x01a")
def test_keys_and_tags_are_those_that_every_reader_sees(properties):
    assert index_keys(properties) == keys_of_the_map(properties)
    assert stored_tags_code(properties) == tags_code(decode_properties(properties).get("TAGS"))


def test_codes_of_short_tags_alone_are_remembered(monkeypatch):
    hashed: list[str] = []
    monkeypatch.setattr(values, "java_hash", lambda text: hashed.append(text) or 0)
    for _ in range(2):
        for tag in ("seen nowhere else", "t" * 129):
            stored_tags_code(b"TAGS\x01" + tag.encode())
    assert [len(tag) for tag in hashed] == [17, 129, 129]


# -- Keys hashed together have the same hashes as in Java


@given(st.lists(PROPERTIES, min_size=1, max_size=5))
@example([b"UNIQ_KEY\x01A\x02UNIQ_KEY\x01B\x02", b"UNIQ_KEY\x01B\x02KEYS\x01k\x02KEYS\x01l m", b"KEYS\x01n"])
def test_keys_of_many_records_hash_as_those_of_each(texts):
    hashes, lengths, records = hash_keys(texts)
    expected = [(number, key.decode()) for number, text in enumerate(texts) for key in keys_of_the_map(text)]
    assert records.tolist() == [number for number, _ in expected]
    assert hashes.tolist() == [java_hash(key) & 0xFFFFFFFF for _, key in expected]
    assert lengths.tolist() == [len(key) for _, key in expected]


@given(st.lists(st.binary(min_size=4, max_size=4).map(lambda key: key.hex().encode()), min_size=1))
def test_keys_of_one_length_hash_as_keys_of_any(keys):
    hashes = hash_equal(keys)
    assert hashes is not None
    assert hashes.tolist() == hash_keys([b"UNIQ_KEY\x01" + key for key in keys])[0].tolist()


def test_keys_of_several_lengths_and_beyond_ascii_are_left_to_others():
    assert hash_equal([b"a", b"bc"]) is None
    assert hash_equal(["é".encode()]) is None
