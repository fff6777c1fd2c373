"""Keys that are hashed many at once have the hashes that Java gives each."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from tests.protocol.properties.strategies import PROPERTIES, keys_of_the_map

from cometmq.protocol.properties.key_hashes import hash_equal, hash_keys
from cometmq.protocol.properties.values import java_hash


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
