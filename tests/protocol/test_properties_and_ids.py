"""Property strings, Java's hash, message ids: vectors of the reference, and round trips."""

from __future__ import annotations

import pickle
import time
from contextlib import suppress
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import MessageIllegal
from cometmq.message import Message, MessageExt, MessageQueue
from cometmq.protocol.ids import (
    IdError,
    UniqueKeys,
    decode_offset_id,
    decode_unique_key,
    encode_offset_id,
    offset_id_of,
    pack_host,
    unpack_host,
)
from cometmq.protocol.properties.text import (
    decode_properties,
    encode_properties,
    has_stray_separator,
    index_hash,
    is_reserved,
    java_hash,
    tags_code,
)

# (docs/reference/storage.md, Consume queue, Index)
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
        text, begun = "k" * length, time.perf_counter()
        java_hash(text)
        return time.perf_counter() - begun

    # Four times the length took sixteen times as long, which is 14 s for the longer one.
    assert min(seconds(400_000) for _ in range(3)) < 10 * min(seconds(100_000) for _ in range(3))


def test_index_hash_has_no_sign() -> None:
    assert index_hash("TopicTest#key1") == 1655984460
    assert index_hash("polygenelubricants") == 0
    assert tags_code(None) == 0


# -- properties

names = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\x01\x02"), min_size=1, max_size=15
)


@given(st.dictionaries(names, names), st.booleans())
def test_properties_survive_with_either_ending(properties: dict[str, str], last_separator: bool) -> None:
    text = encode_properties(properties, last_separator)

    assert decode_properties(text) == properties
    assert text.endswith("\x02") == (last_separator and bool(properties))


@given(st.text())
def test_any_text_is_read(text: str) -> None:
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
    assert decode_properties(text) == properties


@pytest.mark.parametrize(
    "properties", [{"a\x01": "b"}, {"a": "b\x02c"}, {"a": "\x01"}, {"x": "y", "\x02": "z"}]
)
def test_a_separator_within_a_property_is_refused(properties: dict[str, str]) -> None:
    with pytest.raises(MessageIllegal, match="separator"):
        encode_properties(properties)


# -- hosts and ids


@given(st.ip_addresses(), st.integers(0, 2**31 - 1))
def test_hosts(address: object, port: int) -> None:
    text = f"[{address}]:{port}" if ":" in str(address) else f"{address}:{port}"
    data = pack_host(text)

    assert len(data) in (8, 20)
    assert unpack_host(data) == text
    assert unpack_host(memoryview(data)) == text


@pytest.mark.parametrize(
    "text", ["", "1.2.3.4", "host:1", "1.2.3.4:x", "1.2.3.4:-1", "1.2.3.4:4294967296", "::1"]
)
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        pack_host(text)


@pytest.mark.parametrize(
    ("text", "host", "offset"),
    [
        ("7F000001000051AF00000000000002CF", "127.0.0.1:20911", 719),
        ("C0A8000A00002A9F00000000400000B0", "192.168.0.10:10911", 1073742000),
        ("FD00000000000000000000000000000200002A9F0000000000000001", "[fd00::2]:10911", 1),
    ],
)
def test_offset_ids(text: str, host: str, offset: int) -> None:
    assert offset_id_of(host, offset) == text
    assert encode_offset_id(pack_host(host), offset) == text
    for written in (text, text.lower()):
        found = decode_offset_id(written)
        assert (found.host, found.physical_offset) == (host, offset)


def test_a_unique_key_seen_on_the_wire() -> None:
    key = decode_unique_key("FD00000000000000000000000000000269E95FFD2B27641B65E70000")

    assert (key.address, key.pid, key.since_month_ms, key.counter) == ("fd00::2", 27113, 1679517159, 0)


@pytest.mark.parametrize("address", ["192.168.0.10", "fd00::2"])
def test_unique_keys_count_and_say_when_they_were_made(address: str) -> None:
    month = 1_793_491_200_000
    keys = UniqueKeys(ip_address(address).packed, 70_000, 0xDEADBEEF, month, month + 10**9, counter=0xFFFF)

    texts = [keys.make(month + 123_456), keys.make(month + 123_457)]

    parts = [decode_unique_key(text) for text in texts]
    assert [part.counter for part in parts] == [0xFFFF, 0]
    assert [part.since_month_ms for part in parts] == [123_456, 123_457]
    assert {part.address for part in parts} == {address}
    assert {(part.pid, part.process_constant) for part in parts} == {(70_000 & 0xFFFF, 0xDEADBEEF)}
    assert {len(text) for text in texts} == {32 if "." in address else 56}
    assert all(text == text.upper() for text in texts)
    keys.roll(month + 10**9, month + 2 * 10**9)
    assert decode_unique_key(keys.make(month + 10**9 + 7)).since_month_ms == 7


@pytest.mark.parametrize("length", [4, 16])
@pytest.mark.parametrize("decode", [decode_offset_id, decode_unique_key])
def test_what_is_no_id(length: int, decode: object) -> None:
    assert callable(decode)
    good = "7F" * (length + 12)
    for text in ("", good[:-1], good + "0", "G" + good[1:], "é" + good[1:], " " + good[1:]):
        with pytest.raises(IdError, match="message id"):
            decode(text)


def test_a_negative_offset_is_no_offset_id() -> None:
    with pytest.raises(IdError, match="negative"):
        decode_offset_id("7F000001000051AFFFFFFFFFFFFFFFFF")


# -- messages


def test_wire_properties_of_a_message() -> None:
    message = Message(
        "T", b"x", tags="A", keys=("k1", "k2"), delay_level=3, properties={"user": "1", "DELAY": "9"}
    )

    assert message.wire_properties() == {
        "user": "1", "DELAY": "3", "KEYS": "k1 k2", "TAGS": "A", "WAIT": "true",
    }  # fmt: skip
    assert message.properties == {"user": "1", "DELAY": "9"}
    assert Message("T", b"x", wait_store=False).wire_properties() == {"WAIT": "false"}


def test_reserved_names_are_not_the_users() -> None:
    message = MessageExt(
        "T", b"", properties={"TAGS": "A", "mine": "1", "__RMQ.TRANSIENT.x": "y", "CLUSTER": "c"}
    )

    assert message.user_properties == {"mine": "1"}
    assert is_reserved("UNIQ_KEY")
    assert not is_reserved("__SHARDINGKEY")
    assert (message.delay_level, MessageExt("T", b"", properties={"DELAY": "x"}).delay_level) == (0, 0)


def test_queues_order_and_hash_and_pickle() -> None:
    queues = [MessageQueue("T", "b", 1), MessageQueue("T", "a", 2), MessageQueue("S", "z", 0)]

    assert [str(queue) for queue in sorted(queues)] == ["S@z:0", "T@a:2", "T@b:1"]
    assert len({*queues, MessageQueue("T", "b", 1)}) == 3
    assert pickle.loads(pickle.dumps(queues)) == queues


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
        with suppress(MessageIllegal, UnicodeEncodeError):
            assert not has_stray_separator(encode_properties(properties, last).encode())
