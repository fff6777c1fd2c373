"""Cached header blocks: they mean what the decoder reads."""

from __future__ import annotations

import hpack as reference
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.grpc.http2.peers import REQUEST, Pair, RawPeer, kinds

from cometmq.grpc.http2 import frames, templates
from cometmq.grpc.http2.connection import HeadersReceived
from cometmq.grpc.http2.hpack import NO_TABLE, Decoder, Header, encode
from cometmq.grpc.http2.templates import HeaderTemplates


def call(number: int, *more: Header) -> list[Header]:
    values = ((b"x-mq-request-id", b"id-%04d" % number), (b"grpc-timeout", b"%07du" % number))
    return [*REQUEST, *values, (b"x-mq-client-id", b"client"), *more]


def learned(headers: list[Header]) -> HeaderTemplates:
    found = HeaderTemplates()
    found.learn(encode(headers), headers)
    return found


def test_a_block_with_other_values_has_these_values() -> None:
    known = learned(call(1))
    assert known.find(encode(call(2))) == call(2)
    assert known.find(encode(call(1))) == call(1)


def test_a_block_with_another_constant_header_or_length_is_not_known() -> None:
    known = learned(call(1))
    other = [(name, b"CLIENT" if name == b"x-mq-client-id" else value) for name, value in call(1)]
    assert known.find(encode(other)) is None
    assert known.find(encode(call(1, (b"x", b"y")))) is None
    assert known.find(encode(call(12345678))) is None


@pytest.mark.parametrize("value", [b"id\r\n-01", b"id\x00-001"])
def test_a_value_with_illegal_bytes_is_left_to_the_check(value: bytes) -> None:
    known = learned(call(1))
    headers = [(name, value if name == b"x-mq-request-id" else old) for name, old in call(1)]
    assert len(value) == 7
    assert known.find(encode(headers)) is None


@pytest.mark.parametrize("text", [b"id-0001", b"\x07id-0001"])
def test_a_value_that_also_stands_elsewhere_is_not_confused(text: bytes) -> None:
    before = [*REQUEST, (b"x-first", text), *call(1)[len(REQUEST) :]]
    found = learned(before).find(encode(before))
    assert found in (None, before)
    after = call(1, (b"x-last", text))
    assert learned(after).find(encode(call(2, (b"x-last", text)))) == call(2, (b"x-last", text))


def test_blocks_with_huffman_codes_or_empty_values_are_not_cached() -> None:
    encoder = reference.Encoder()
    encoder.header_table_size = 0
    block = encoder.encode(call(1))
    known = HeaderTemplates()
    assert not known.learn(block, call(1))
    headers = [*REQUEST, (b"authorization", b"")]
    assert not known.learn(encode(headers), headers)
    assert known.find(encode(headers)) is None
    assert known.find(block) is None


@pytest.mark.parametrize("length", [1, 126, 127, 128, 300])
def test_values_of_any_length_are_replaced(length: int) -> None:
    first, second = ([*REQUEST, (b"authorization", byte * length)] for byte in (b"v", b"w"))
    assert learned(first).find(encode(second)) == second


@pytest.mark.parametrize("more", [[(b"grpc-timeout", b"a")], [(b"%d" % number, b"") for number in range(32)]])
def test_blocks_with_repeated_varying_or_with_many_headers_are_not_cached(more: list[Header]) -> None:
    headers = call(1, *more)
    assert learned(headers).find(encode(headers)) is None


def test_a_stranger_cannot_use_up_the_layouts_of_a_length() -> None:
    known = HeaderTemplates()
    size = len(encode(call(1)))
    for number in range(templates.MAX_CUTS):
        headers = [*REQUEST, (b"grpc-timeout", b"%07du" % 1), (b"x" * (number + 1), b"")]
        headers.append((b"y", b"v" * (size - len(encode(headers)) - 4)))
        assert len(encode(headers)) == size
        known.learn(encode(headers), headers)
        assert known.find(encode(headers)) == headers
    known.learn(encode(call(1)), call(1))
    assert known.find(encode(call(2))) == call(2)


def test_large_blocks_are_not_cached() -> None:
    headers = call(1, (b"x", b"v" * templates.MAX_BLOCK_BYTES))
    assert learned(headers).find(encode(headers)) is None


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_TEMPLATES", 3)
    known = HeaderTemplates()
    for number in range(4):
        headers = call(1, (b"x", b"%d" % number))
        known.learn(encode(headers), headers)
    present = [known.find(encode(call(1, (b"x", b"%d" % number)))) is not None for number in range(4)]
    assert present == [False, False, False, True]


TEXT = st.binary(min_size=0, max_size=3)
HEADERS = st.lists(st.tuples(st.sampled_from([*templates.VARYING, b"a", b"te"]), TEXT), max_size=6)


@given(HEADERS, HEADERS)
def test_what_is_found_is_what_the_decoder_reads(first: list[Header], second: list[Header]) -> None:
    known = learned(first)
    for headers in (first, second):
        found = known.find(encode(headers))
        assert found is None or found == Decoder().decode(NO_TABLE + encode(headers))


def test_a_client_is_asked_to_use_no_table_and_its_blocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, decoded = Pair(), list[bytes]()
    pair.exchange()
    original = Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda self, block: decoded.append(block) or original(self, block))
    for number in range(5):
        stream_id = 2 * number + 1
        headers = call(number)
        block = pair.client.encoder.encode(headers, huffman=False)
        frame = frames.header_frames(stream_id, block, True, 16_384)
        (event,) = pair.server.receive(frame, 0.0)
        assert isinstance(event, HeadersReceived)
        assert event.headers == headers
    assert len(decoded) <= 3  # the first block, and those that confirm the templates


def test_a_table_of_the_client_switches_the_cache_off() -> None:
    peer = RawPeer()
    for number, headers in enumerate((call(1), call(1), call(2), call(2))):
        block = peer.encoder.encode(headers, huffman=False)
        events = peer.send(frames.header_frames(2 * number + 1, block, True, 16_384))
        assert kinds(events) == ["HeadersReceived"]
        assert events[0].headers == headers  # type: ignore[union-attr]
