"""Commit-log records, compared with the worked examples of the reference."""

from __future__ import annotations

import ast
import struct
import zlib
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.cutting import mutations, never_escapes, truncations
from tests.protocol.record.encoding import encode_message

from cometmq.errors import MessageIllegal, RecordError
from cometmq.message import MessageExt
from cometmq.protocol.checksum import crc32
from cometmq.protocol.record import layout
from cometmq.protocol.record.one import (
    Place,
    decode_record,
    encode_blank,
    encode_record,
    iter_records,
    place_of,
    record_starts,
)

# A record built by hand (docs/reference/storage.md, Record).
HELLO = bytes.fromhex(
    "0000007adaa320a777d189820000000300000000000000000000000700000000"
    "400000b0000000000000018bcfe56800c0a8000a0000c3500000018bcfe56805"
    "c0a8000a00002a9f0000000000000000000000000000000548656c6c6f09546f"
    "7069635465737400114b455953016b3102544147530154616741"
)
# captured from a real client
UNIQ_KEY = "FD0000000000000000000000000000027C5D5FFD2B27641B65E70003"
SEEN_PROPERTIES = (
    f"UNIQ_KEY\x01{UNIQ_KEY}\x02WAIT\x01true\x02TAGS\x01TagA\x02CLUSTER\x01DefaultCluster\x02WAIT\x01true"
)
SEEN = (
    bytes.fromhex(
        "000000d9 daa320a7 47cc1be0 00000000 00000000 0000000000000000 00000000000002cf 00000000"
        "000001a1f8834e64 7f0000010000b4c8 000001a1f8834e66 7f000001000051af 00000000 0000000000000000"
        "00000002 6231 06 546f70696341 0076"
    )
    + SEEN_PROPERTIES.encode()
)


class TestWorkedExamples:
    def test_hello_is_read(self) -> None:
        message = decode_record(HELLO, check_crc=True)

        assert (message.topic, message.body, message.properties) == (
            "TopicTest", b"Hello", {"KEYS": "k1", "TAGS": "TagA"},
        )  # fmt: skip
        assert (message.queue_id, message.queue_offset, message.physical_offset) == (3, 7, 1073742000)
        assert (message.born_timestamp_ms, message.store_timestamp_ms) == (1700000000000, 1700000000005)
        assert (message.born_host, message.store_host) == ("192.168.0.10:50000", "192.168.0.10:10911")
        assert (message.body_crc, message.store_size) == (0x77D18982, 122)
        assert message.msg_id == message.offset_msg_id == "C0A8000A00002A9F00000000400000B0"
        assert (message.tags, message.keys, message.user_properties) == ("TagA", ("k1",), {})

    def test_hello_is_written(self) -> None:
        host = bytes.fromhex("c0a8000a")
        assert (
            encode_record(
                "TopicTest",
                b"Hello",
                b"KEYS\x01k1\x02TAGS\x01TagA",
                queue_id=3,
                queue_offset=7,
                physical_offset=1073742000,
                born_timestamp_ms=1700000000000,
                born_host=host + (50000).to_bytes(4, "big"),
                store_timestamp_ms=1700000000005,
                store_host=host + (10911).to_bytes(4, "big"),
            )
            == HELLO
        )

    def test_a_batch_element_seen_on_the_wire(self) -> None:
        assert len(SEEN) == 217
        message = decode_record(SEEN, check_crc=True, broker_name="broker-a")

        assert (message.topic, message.body, message.physical_offset) == ("TopicA", b"b1", 719)
        assert (message.born_host, message.store_host) == ("127.0.0.1:46280", "127.0.0.1:20911")
        assert message.offset_msg_id == "7F000001000051AF00000000000002CF"
        assert message.msg_id == UNIQ_KEY
        assert message.properties["WAIT"] == "true"
        assert message.queue.broker_name == "broker-a"

    def test_a_blank_record(self) -> None:
        assert encode_blank(1000).hex() == "000003e8cbd43194"

    def test_the_place_is_read_alone(self) -> None:
        v6 = encode_record(
            "T", b"", queue_offset=7, physical_offset=8, store_timestamp_ms=9, born_host=bytes(20)
        )

        assert place_of(b"x" + HELLO, 1) == Place(7, 1073742000, 1700000000005)
        assert place_of(v6) == Place(7, 8, 9)
        assert place_of(encode_blank(1000).ljust(200, b"\0")) is None


int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
hosts = st.one_of(
    st.tuples(st.ip_addresses(v=4), st.integers(0, 65535)).map(lambda host: f"{host[0]}:{host[1]}"),
    st.tuples(st.ip_addresses(v=6), st.integers(0, 65535)).map(lambda host: f"[{host[0]}]:{host[1]}"),
)
property_texts = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\x01\x02"), min_size=1, max_size=12
)
messages = st.builds(
    MessageExt,
    topic=texts | st.text("t", min_size=128, max_size=300),
    body=st.binary(max_size=200),
    flag=int32,
    properties=st.dictionaries(property_texts, property_texts, max_size=5),
    queue_id=int32,
    queue_offset=int64,
    physical_offset=int64,
    sys_flag=st.sampled_from([0, 1, 4, 8, 12, 0x301]),
    born_timestamp_ms=int64,
    born_host=hosts,
    store_timestamp_ms=int64,
    store_host=hosts,
    reconsume_times=int32,
    prepared_transaction_offset=int64,
)


def with_stored_fields(message: MessageExt, data: bytes) -> MessageExt:
    """Return the message as decoding must return it: the codec sets size, CRC and the IPv6 bits."""
    message.store_size = len(data)
    message.body_crc = zlib.crc32(message.body) & 0x7FFFFFFF
    message.sys_flag |= 0x10 * message.born_host.startswith("[") | 0x20 * message.store_host.startswith("[")
    return message


@settings(max_examples=50)
@given(st.lists(messages, max_size=4), st.booleans())
def test_records_back_to_back(sent: list[MessageExt], last_separator: bool) -> None:
    encoded = [encode_message(message, last_separator) for message in sent]
    expected = [with_stored_fields(message, data) for message, data in zip(sent, encoded, strict=True)]
    log = b"".join(encoded)

    assert list(iter_records(log, check_crc=True)) == expected
    assert list(iter_records(memoryview(log))) == expected
    assert list(iter_records(log + encode_blank(500) + bytes(500))) == expected
    starts = [0, *accumulate(map(len, encoded))]
    assert record_starts(log + encode_blank(500)) == (starts[:-1], starts[-1])
    assert record_starts(log, most=2)[0] == starts[:-1][:2]


@settings(max_examples=30)
@given(messages)
def test_a_record_cut_anywhere_is_refused(message: MessageExt) -> None:
    data = encode_message(message)

    assert never_escapes(decode_record, truncations(data)) == (0, len(data))
    with pytest.raises(RecordError):
        list(iter_records(data + b"\0"))


@pytest.mark.parametrize("data", [HELLO, SEEN])
def test_a_changed_byte_is_read_or_refused(data: bytes) -> None:
    read, refused = never_escapes(lambda changed: decode_record(changed, check_crc=True), mutations(data))

    assert read > 0
    assert refused > 0


@pytest.mark.parametrize("data", [HELLO, SEEN])
def test_one_of_many_is_read_as_one_alone(data: bytes) -> None:
    def alone(changed: bytes) -> MessageExt | str:
        try:
            return decode_record(HELLO + changed, len(HELLO), check_crc=True)
        except RecordError as error:
            return str(error)

    def second_of_two(changed: bytes) -> MessageExt | str:
        try:
            return list(iter_records(HELLO + changed, check_crc=True))[1]
        except RecordError as error:
            return str(error)

    for changed in mutations(data):
        assert second_of_two(changed) == alone(changed)


@pytest.mark.parametrize(
    ("at", "change", "field"),
    [
        (0, "00000079", "properties length"),
        (0, "0000007b", "size"),
        (0, "00000000", "size"),
        (0, "ffffffff", "size"),
        (4, "daa320a8", "magic"),
        (4, "cbd43194", "magic"),
        (8, "00000001", "body CRC"),
        (84, "00000030", "body length"),
        (84, "ffffffff", "body length"),
        (84, "7fffffff", "body length"),
        (93, "ff", "topic length"),
        (103, "ffff", "properties length"),
        (103, "0010", "properties length"),
    ],
)
def test_the_wrong_field_is_named(at: int, change: str, field: str) -> None:
    replaced = bytes.fromhex(change)
    data = HELLO[:at] + replaced + HELLO[at + len(replaced) :]

    with pytest.raises(RecordError) as caught:
        decode_record(b"xx" + data, 2, check_crc=True)

    assert (caught.value.pos, caught.value.field) == (2, field)


def test_records_before_a_bad_one_are_given() -> None:
    records = iter_records(HELLO + SEEN[:-1])

    assert next(records).body == b"Hello"
    with pytest.raises(RecordError, match="record at 122: size"):
        next(records)


def test_ipv6_hosts_that_do_not_fit_the_record() -> None:
    small = encode_record("", b"")
    flags = small[:36] + (0x30).to_bytes(4, "big") + small[40:]

    with pytest.raises(RecordError, match="two hosts"):
        decode_record(flags)


def test_text_that_is_no_utf8_is_replaced() -> None:
    data = encode_record("topic", b"", b"k\x01\xff\xfe")

    assert decode_record(data).properties == {"k": "\ufffd\ufffd"}


def test_long_topics_make_v2_records() -> None:
    v1, v2 = encode_record("t" * 127, b"x"), encode_record("t" * 128, b"x")

    assert (v1[4:8].hex(), v2[4:8].hex()) == ("daa320a7", "daa320ab")
    assert decode_record(v2).topic == "t" * 128


@pytest.mark.parametrize(
    "arguments",
    [
        {"topic": "T", "body": b"", "properties": bytes(32_768)},
        {"topic": "T" * 40_000, "body": b""},
        {"topic": "T", "body": b"", "queue_id": 2**31},
        {"topic": "T", "body": b"", "born_host": b"abc"},
    ],
)
def test_what_no_record_holds(arguments: dict[str, object]) -> None:
    with pytest.raises(MessageIllegal):
        encode_record(**arguments)  # type: ignore[arg-type]


# -- Every CRC-32 equals zlib's


@given(st.binary(max_size=5_000), st.integers(0, 64))
def test_checksums_are_those_of_zlib_in_every_kind_of_buffer(data: bytes, skip: int):
    wanted = zlib.crc32(data[skip:])
    assert crc32(data[skip:]) == wanted
    assert crc32(bytearray(data)[skip:]) == wanted
    assert crc32(memoryview(data)[skip:]) == wanted


# -- The layout of a record is defined only once


SRC = Path(layout.__file__).parents[2]
MAGICS = {layout.MAGIC_V1, layout.MAGIC_V2, layout.BLANK_MAGIC}
HEAD = "iiiiiqqi"  # format of a record from the size to sysFlag


def says_the_layout(value: object) -> bool:
    """Return whether a source constant is a magic number, in either sign, or a struct of a record's head."""
    if isinstance(value, int):
        return value in MAGICS or value - (1 << 32) in MAGICS
    if isinstance(value, bytes):
        return any(struct.pack(">i", magic)[:3] in value for magic in MAGICS)
    return isinstance(value, str) and HEAD in value


def test_no_other_module_knows_the_layout() -> None:
    found = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and says_the_layout(node.value)
    }

    assert found == {"protocol/record/layout.py"}


def test_the_heads_are_those_of_the_format() -> None:
    assert {hosts: head.format for hosts, head in layout.HEADS.items()} == {
        (born, store): f">iiiiiqqiq{born}sq{store}siqi" for born in (8, 20) for store in (8, 20)
    }
    assert (layout.AT["store_timestamp"], layout.AT["body_length"], layout.MIN_SIZE) == (56, 84, 91)
    assert {layout.head_for(flag) for flag in (0x31, 0x30)} == {layout.HEADS[20, 20]}
    assert layout.head_for(0x10) == layout.HEADS[20, 8]
