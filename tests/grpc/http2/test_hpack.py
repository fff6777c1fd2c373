"""HPACK: the examples of RFC 7541, and a comparison with PyPI's hpack."""

from __future__ import annotations

import random

import hpack as reference
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.grpc.http2.errors import Http2Error
from cometmq.grpc.http2.hpack import NO_TABLE, TABLE_SIZE, Decoder, Header, encode

REQUEST = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
SECURE = [
    *((b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/index.html")),
    *((b":authority", b"www.example.com"), (b"custom-key", b"custom-value")),
]
# Appendices C.2 (single headers), and C.3 and C.4 (three requests of one connection).
SINGLE = [
    ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", [(b"custom-key", b"custom-header")]),
    ("040c2f73616d706c652f70617468", [(b":path", b"/sample/path")]),
    ("100870617373776f726406736563726574", [(b"password", b"secret")]),
    ("82", [(b":method", b"GET")]),
]
REQUESTS = [
    (
        "828684410f7777772e6578616d706c652e636f6d",
        "828684be58086e6f2d6361636865",
        "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
    ),
    (
        "828684418cf1e3c2e5f23a6ba0ab90f4ff",
        "828684be5886a8eb10649cbf",
        "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
    ),
]
# Appendices C.5 and C.6: responses, with a table of 256 bytes.
DATE = b"Mon, 21 Oct 2013 20:13:2%d GMT"
COOKIE = b"foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"
RESPONSES = [
    (
        "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d546e1768747470"
        "733a2f2f7777772e6578616d706c652e636f6d",
        "4803333037c1c0bf",
        "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f3d4153444a4b"
        "48514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076657273696f6e3d31",
    ),
    (
        "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82"
        "ae43d3",
        "4883640effc1c0bf",
        "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b3960d5"
        "af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
    ),
]


@pytest.mark.parametrize(("block", "headers"), SINGLE)
def test_the_rfcs_single_headers(block: str, headers: list[Header]) -> None:
    assert Decoder().decode(bytes.fromhex(block)) == headers


@pytest.mark.parametrize("blocks", REQUESTS, ids=["plain", "huffman"])
def test_the_rfcs_requests(blocks: tuple[str, ...]) -> None:
    decoder = Decoder()
    decoded = [decoder.decode(bytes.fromhex(block)) for block in blocks]

    assert decoded == [REQUEST, [*REQUEST, (b"cache-control", b"no-cache")], SECURE]


@pytest.mark.parametrize("blocks", RESPONSES, ids=["plain", "huffman"])
def test_the_rfcs_responses_with_a_small_table(blocks: tuple[str, ...]) -> None:
    decoder = Decoder()
    decoder.decode(b"\x3f\xe1\x01")
    first, second, third = (decoder.decode(bytes.fromhex(block)) for block in blocks)
    rest = [
        *((b"cache-control", b"private"), (b"date", DATE % 1), (b"location", b"https://www.example.com")),
    ]

    assert first == [(b":status", b"302"), *rest]
    assert second == [(b":status", b"307"), *rest]
    assert third == [
        *((b":status", b"200"), (b"cache-control", b"private"), (b"date", DATE % 2)),
        *((b"location", b"https://www.example.com"), (b"content-encoding", b"gzip"), (b"set-cookie", COOKIE)),
    ]


@pytest.mark.parametrize(
    "block",
    [
        "80",  # index 0
        "be",  # index 62 of an empty table
        "ffffffffff0f",  # an index above 2^31
        "ff80808080808080808000",  # an integer with many bytes
        "ff",  # an integer without an end
        "40",  # a literal without an end
        "0003616263",  # a literal without a value
        "000361626304787878",  # a value that is longer than the block
        "7e0161",  # the name of an index that does not exist
        "8220",  # a size after a header
        "3fe21f",  # a table of 4097 bytes
        "000161827f",  # Huffman code whose padding is not all ones
        "00016182ffff",  # padding of more than 7 bits
        "00016184ffffffff",  # the end symbol
    ],
)
def test_invalid_blocks_are_refused(block: str) -> None:
    with pytest.raises(Http2Error, match="COMPRESSION_ERROR"):
        Decoder().decode(bytes.fromhex(block))


NAMES = st.sampled_from(
    [b":path", b"authorization", b"x-mq-request-id", b"te", b"x-mq-date-time"]
) | st.binary(min_size=1, max_size=40)
HEADERS = st.lists(
    st.tuples(NAMES, st.sampled_from([b"", b"trailers", b"/"]) | st.binary(max_size=200)), max_size=12
)


@given(
    blocks=st.lists(st.tuples(HEADERS, st.booleans(), st.none() | st.integers(0, TABLE_SIZE)), max_size=12),
    sensitive=st.sets(st.integers(0, 11)),
)
def test_blocks_of_another_encoder_are_decoded(
    blocks: list[tuple[list[Header], bool, int | None]], sensitive: set[int]
) -> None:
    encoder = reference.Encoder()
    decoder = Decoder()
    for headers, huffman, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        fields = [(*header, index in sensitive) for index, header in enumerate(headers)]
        assert decoder.decode(encoder.encode(fields, huffman=huffman)) == headers


@given(blocks=st.lists(HEADERS, max_size=4), size=st.integers(0, 8192))
def test_own_blocks_are_decoded_by_another_decoder(blocks: list[list[Header]], size: int) -> None:
    decoder = reference.Decoder()
    decoder.max_allowed_table_size = size
    for index, headers in enumerate(blocks):
        block = encode(headers) if index else NO_TABLE + encode(headers)
        assert decoder.decode(block, raw=True) == headers


def test_random_bytes_are_decoded_or_refused_as_by_another_decoder() -> None:
    chance = random.Random(7541)
    outcomes = {True: 0, False: 0}
    for _ in range(5_000):
        block = bytes(
            chance.choice((chance.randrange(256), 0x82, 0x86, 0x40, 1))
            for _ in range(chance.randrange(1, 12))
        )
        try:
            headers = Decoder().decode(block)
        except Http2Error:
            headers = None
        try:
            wanted = reference.Decoder().decode(block, raw=True)
        except reference.HPACKError:
            wanted = None
        assert headers == wanted, block.hex()
        outcomes[headers is None] += 1

    assert min(outcomes.values()) > 500


def test_headers_that_fill_the_table_exactly_stay_in_it() -> None:
    decoder = Decoder()
    decoder.decode(b"\x3f\x25" + b"\x40\x01a\x01a" + b"\x40\x01b\x01b")  # 68 bytes, 34 for each header
    assert decoder.decode(b"\xbf\xbe") == [(b"a", b"a"), (b"b", b"b")]

    decoder.decode(b"\x40\x01c\x01c")
    assert decoder.decode(b"\xbf\xbe") == [(b"b", b"b"), (b"c", b"c")]
    with pytest.raises(Http2Error):
        decoder.decode(b"\xc0")


def test_the_table_stays_within_its_size() -> None:
    decoder = Decoder()
    encoder = reference.Encoder()
    for number in range(500):
        decoder.decode(encoder.encode([(b"x-%d" % number, bytes(number % 5_000))]))
    held = decoder._entries  # noqa: SLF001

    assert sum(len(name) + len(value) + 32 for name, value in held) <= TABLE_SIZE
