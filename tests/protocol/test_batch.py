"""The body of a batch send: items back to back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.cutting import mutations, never_escapes, truncations

from cometmq.errors import BodyError, MessageIllegal
from cometmq.protocol.batch import BatchItem, encode_batch, iter_batch

int32 = st.integers(-(2**31), 2**31 - 1)
items = st.tuples(int32, st.binary(max_size=60), st.binary(max_size=60))


@given(st.lists(items, max_size=5))
def test_batches(sent: list[tuple[int, bytes, bytes]]) -> None:
    data = encode_batch(sent)

    assert list(iter_batch(data)) == [BatchItem(*item) for item in sent]
    assert [tuple(map(bytes, item[1:])) for item in iter_batch(memoryview(data))] == [
        item[1:] for item in sent
    ]


def test_a_batch_item_byte_for_byte() -> None:
    data = encode_batch([(5, b"b1", b"TAGS\x01TagA")])

    assert (
        data.hex()
        == "00000021 00000000 00000000 00000005 00000002 6231 0009 54414753 01 54616741".replace(" ", "")
    )


def test_magic_and_crc_of_items_are_ignored() -> None:
    data = bytearray(encode_batch([(5, b"b1", b"")]))
    data[4:12] = b"\xda\xa3\x20\xa7\x12\x34\x56\x78"

    assert list(iter_batch(bytes(data))) == [BatchItem(5, b"b1", b"")]


def test_a_cut_batch_is_refused_unless_cut_between_items() -> None:
    first, second = encode_batch([(1, b"one", b"p")]), encode_batch([(2, b"two", b"q")])
    whole = {b"", first}

    for data in truncations(first + second):
        if data in whole:
            list(iter_batch(data))
        else:
            with pytest.raises(BodyError, match=r"item [01]"):
                list(iter_batch(data))
    never_escapes(lambda data: list(iter_batch(data)), mutations(first + second))


def test_a_batch_item_with_properties_beyond_16_bits() -> None:
    with pytest.raises(MessageIllegal, match="32768"):
        encode_batch([(0, b"", bytes(32_768))])
