"""Floods: each ends its connection with ENHANCE_YOUR_CALM; as much as honest clients send passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.grpc.http2.peers import REQUEST, RawPeer

from cometmq.grpc.http2 import frames, hpack
from cometmq.grpc.http2.connection import Allowance, ConnectionEnded, Http2Limits
from cometmq.grpc.http2.errors import ErrorCode
from cometmq.grpc.http2.frames import END_HEADERS, END_STREAM, frame

BLOCK = hpack.encode(REQUEST)
LIMITS = Http2Limits(max_replies=100, early_resets=50, early_resets_per_s=5, idle_frames_per_s=500)


def sent_until_the_end(peer: RawPeer, part: Callable[[int], bytes], each: Callable[[], object]) -> int:
    """Send part 0, 1, ... and call `each` after each. Returns how many passed before the connection ended."""
    for number in range(100_000):
        events = peer.send(part(number))
        if peer.server.closed:
            assert isinstance(events[-1], ConnectionEnded)
            assert events[-1].error_code == ErrorCode.ENHANCE_YOUR_CALM
            return number
        each()
    raise AssertionError("the connection has not ended")


def opened(number: int) -> bytes:
    return frame(frames.HEADERS, END_HEADERS, 2 * number + 1, BLOCK)


def opened_and_reset(number: int) -> bytes:
    return opened(number) + frames.reset(2 * number + 1, ErrorCode.CANCEL)


def opened_and_violated(number: int) -> bytes:
    return opened(number) + frames.window_update(2 * number + 1, 0)


def malformed(number: int) -> bytes:
    return frame(frames.HEADERS, END_HEADERS, 2 * number + 1, b"\x82")


@pytest.mark.parametrize("part", [opened_and_reset, opened_and_violated, malformed])
def test_streams_that_end_at_once(part: Callable[[int], bytes]) -> None:
    peer = RawPeer(LIMITS)

    assert sent_until_the_end(peer, part, peer.output) == 50


@pytest.mark.parametrize("part", [opened_and_reset, opened_and_violated])
def test_streams_that_end_at_once_now_and_then(part: Callable[[int], bytes]) -> None:
    peer = RawPeer(LIMITS)
    for number in range(1_000):
        peer.send(part(number))
        peer.output()
        peer.now += 0.201

    assert not peer.server.closed


def test_a_client_may_cancel_all_its_long_polls_at_once() -> None:
    peer = RawPeer(Http2Limits())
    for start in range(0, 10_000, 1_000):
        peer.send(*[opened(start + number) for number in range(1_000)])
        peer.now += 1
        peer.send(*[frames.reset(2 * (start + number) + 1, ErrorCode.CANCEL) for number in range(1_000)])

    assert (peer.server.closed, peer.server.open_streams) == (False, 0)


@pytest.mark.parametrize(
    "part",
    [
        frame(frames.PING, 0, 0, bytes(8)),
        frames.settings({}),
        frame(frames.HEADERS, END_HEADERS | END_STREAM, 1, b"\x82"),
    ],
    ids=["ping", "settings", "malformed"],
)
def test_replies_to_a_peer_that_does_not_read(part: bytes) -> None:
    peer = RawPeer(Http2Limits(max_replies=100))
    number = sent_until_the_end(
        peer,
        lambda number: (
            part[:5] + (2 * number + 1).to_bytes(4) + part[9:] if part[3] == frames.HEADERS else part
        ),
        int,
    )

    assert number == 100
    assert peer.server.unsent_total < 100 * 20 + 200


def test_replies_to_a_peer_that_reads() -> None:
    peer = RawPeer(Http2Limits(max_replies=100))
    for _ in range(100):
        peer.send(frame(frames.PING, 0, 0, bytes(8)) * 100)
        assert len(peer.output()) == 100
        peer.now += 0.01

    assert not peer.server.closed


@pytest.mark.parametrize(
    "part",
    [
        frame(frames.PING, 0, 0, bytes(8)),
        frame(frames.PING, frames.ACK, 0, bytes(8)),
        frames.settings({}),
        frame(frames.SETTINGS, frames.ACK, 0),
        frame(frames.DATA, 0, 1),
        frame(frames.DATA, frames.PADDED, 1, b"\x02\0\0"),
        frame(frames.PRIORITY, 0, 7, bytes(5)),
        frame(77, 0, 0),
        frame(frames.HEADERS, END_HEADERS | END_STREAM, 3, BLOCK),  # of a stream that has ended
    ],
)
def test_frames_without_a_use(part: bytes) -> None:
    peer = RawPeer(LIMITS)
    peer.send(opened(0), opened_and_reset(1))

    assert 490 <= sent_until_the_end(peer, lambda _: part, peer.output) <= 510

    peer = RawPeer(LIMITS)
    peer.send(opened(0), opened_and_reset(1))
    for _ in range(5_000):
        peer.send(part)
        peer.output()
        peer.now += 0.0021
    assert not peer.server.closed


def test_settings_that_change_many_windows_count_more() -> None:
    peer = RawPeer(LIMITS)
    peer.send(*[opened(number) for number in range(100)])
    sizes = [frames.settings({frames.INITIAL_WINDOW_SIZE: size}) for size in (1, 2)]

    assert 40 <= sent_until_the_end(peer, lambda number: sizes[number % 2], peer.output) <= 50


def test_a_header_block_of_too_many_frames() -> None:
    peer = RawPeer()
    peer.send(frame(frames.HEADERS, 0, 1))

    assert sent_until_the_end(peer, lambda _: frame(frames.CONTINUATION, 0, 1), peer.output) == 31


def test_a_header_block_of_too_many_bytes() -> None:
    peer = RawPeer()
    peer.send(frame(frames.HEADERS, 0, 1, bytes(16_384)))

    assert (
        sent_until_the_end(peer, lambda _: frame(frames.CONTINUATION, 0, 1, bytes(8_192)), peer.output) == 2
    )


def test_a_small_block_that_stands_for_large_headers_is_not_expanded() -> None:
    peer = RawPeer()
    value = b"v" * 4_000
    peer.send(peer.headers(1, (b"x-bomb", value), end=True))
    block = peer.encoder.encode([(b"x-bomb", value)])
    assert len(block) == 1
    events = peer.send(frame(frames.HEADERS, END_HEADERS, 3, BLOCK + block * 16_000))

    assert events == []
    assert peer.output()[-1][0] == frames.RST_STREAM
    assert not peer.server.closed


def test_an_allowance_refills_with_time() -> None:
    allowance = Allowance(3, 2, 0.0)
    assert [allowance.take(0.0) for _ in range(3)] == [True] * 3
    assert [allowance.take(0.5), allowance.take(0.5)] == [True, False]
    assert [allowance.take(100.0, 3), allowance.take(100.0)] == [True, False]
