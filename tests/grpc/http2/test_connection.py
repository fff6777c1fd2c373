"""A connection beside PyPI's h2 as its client: requests, responses, flow control, the end."""

from __future__ import annotations

import h2.events
import h2.settings
import pytest
from tests.grpc.http2.peers import REQUEST, RESPONSE, TRAILERS, Pair, RawPeer, frames_of, kinds, word

from cometmq.grpc.http2 import frames
from cometmq.grpc.http2.connection import (
    ConnectionEnded,
    DataReceived,
    HeadersReceived,
    Http2Connection,
    Http2Limits,
    StreamReset,
)
from cometmq.grpc.http2.errors import ErrorCode

MIB = 1 << 20


def data_of(events: list[object], stream_id: int = 1) -> bytes:
    """Return the data of a response that h2 has reported."""
    parts = [event for event in events if isinstance(event, h2.events.DataReceived)]
    return b"".join(event.data for event in parts if event.stream_id == stream_id)


def test_a_unary_call() -> None:
    pair = Pair()

    assert pair.request(1, b"question") == [
        HeadersReceived(1, REQUEST, False),
        DataReceived(1, b"question", True),
    ]
    pair.server.send_headers(1, RESPONSE)
    pair.server.send_data(1, b"answer")
    pair.server.send_headers(1, TRAILERS, end_stream=True)
    _, answered = pair.exchange()

    assert kinds(answered) == ["ResponseReceived", "DataReceived", "TrailersReceived", "StreamEnded"]
    assert (answered[0].headers, answered[1].data, answered[2].headers) == (RESPONSE, b"answer", TRAILERS)
    assert pair.server.open_streams == pair.server.unsent_total == 0


def test_a_response_without_data() -> None:
    pair = Pair()
    assert pair.request(1) == [HeadersReceived(1, REQUEST, True)]
    pair.server.send_headers(1, [*RESPONSE, *TRAILERS], end_stream=True)

    assert kinds(pair.exchange()[1]) == ["ResponseReceived", "StreamEnded"]


def test_trailers_of_a_request_end_it() -> None:
    pair = Pair()
    pair.client.send_headers(1, REQUEST)
    pair.client.send_data(1, b"x")
    pair.client.send_headers(1, [(b"checksum", b"7")], end_stream=True)

    assert pair.exchange()[0][1:] == [DataReceived(1, b"x", False), DataReceived(1, b"", True)]


def test_long_header_blocks_in_both_directions() -> None:
    pair = Pair()
    peer = RawPeer()
    long = (b"x-long", b"~" * 15_000)
    block = peer.encoder.encode([*REQUEST, long], huffman=False)
    events = peer.send(
        frames.frame(frames.HEADERS, frames.END_STREAM, 1, block[:10]),
        frames.frame(frames.CONTINUATION, 0, 1, block[10:5_000]),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[5_000:]),
    )

    assert events == [HeadersReceived(1, [*REQUEST, long], True)]
    pair.request(1)
    pair.server.send_headers(1, [*RESPONSE, (b"grpc-message", b"m" * 50_000)], end_stream=True)
    assert pair.exchange()[1][0].headers[-1] == (b"grpc-message", b"m" * 50_000)


# -- flow control of responses


def test_a_response_waits_for_windows_and_its_trailers_wait_behind_it() -> None:
    pair = Pair()
    pair.request(1)
    body = bytes(range(256)) * 1_000
    pair.server.send_headers(1, RESPONSE)
    pair.server.send_data(1, body)
    pair.server.send_headers(1, TRAILERS, end_stream=True)
    answered = pair.exchange()[1]

    assert pair.server.unsent(1) == pair.server.unsent_total == len(body) - frames.DEFAULT_WINDOW
    while pair.server.open_streams:
        pair.client.increment_flow_control_window(10_000)
        pair.client.increment_flow_control_window(10_000, 1)
        answered += pair.exchange()[1]

    assert data_of(answered) == body
    assert kinds(answered)[-2:] == ["TrailersReceived", "StreamEnded"]
    assert pair.server.unsent_total == 0


def test_each_window_alone_holds_a_response_back() -> None:
    pair = Pair()
    pair.request(1)
    pair.server.send_headers(1, RESPONSE)
    pair.server.send_data(1, b"a" * 70_000)
    pair.exchange()
    pair.client.increment_flow_control_window(1_000, 1)
    pair.exchange()
    assert pair.server.unsent(1) == 70_000 - frames.DEFAULT_WINDOW

    pair.client.increment_flow_control_window(100_000)
    pair.exchange()
    assert pair.server.unsent(1) == 69_000 - frames.DEFAULT_WINDOW

    pair.client.increment_flow_control_window(100_000, 1)
    pair.exchange()
    assert pair.server.unsent(1) == pair.server.unsent(99) == 0


def test_the_peers_settings_close_and_open_the_windows_of_open_streams() -> None:
    peer = RawPeer()
    peer.send(peer.headers(1), peer.headers(3))
    peer.server.send_data(1, b"a" * 1_000)
    peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 100}))  # the window of stream 1 is now -900
    peer.output()
    peer.server.send_data(1, b"b" * 50)
    peer.server.send_data(3, b"c" * 150)
    assert peer.output() == [(frames.DATA, 0, 3, b"c" * 100)]
    assert (peer.server.unsent(1), peer.server.unsent(3)) == (50, 50)

    peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1_040}))
    assert peer.output()[:2] == [(frames.DATA, 0, 1, b"b" * 40), (frames.DATA, 0, 3, b"c" * 50)]
    assert (peer.server.unsent(1), peer.server.unsent(3)) == (10, 0)


def test_the_end_of_a_response_passes_windows_below_zero() -> None:
    peer = RawPeer()
    peer.send(peer.headers(1, end=True))
    peer.server.send_data(1, b"a" * 1_000)
    peer.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    peer.output()
    peer.server.send_data(1, b"", end_stream=True)

    assert peer.output() == [(frames.DATA, frames.END_STREAM, 1, b"")]
    assert (peer.server.open_streams, peer.server.unsent_total) == (0, 0)


def test_streams_share_the_connections_window() -> None:
    pair = Pair()
    for stream_id in (1, 3, 5):
        pair.request(stream_id)
        pair.server.send_headers(stream_id, RESPONSE)
    pair.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: MIB})
    pair.exchange()
    pair.server.send_data(1, bytes(frames.DEFAULT_WINDOW))
    for stream_id in (1, 3, 5):
        pair.server.send_data(stream_id, bytes(100_000), end_stream=True)
    pair.exchange()
    pair.client.increment_flow_control_window(3 * 2 * frames.MIN_MAX_FRAME)
    answered = pair.exchange()[1]

    assert [len(data_of(answered, stream_id)) for stream_id in (1, 3, 5)] == [2 * frames.MIN_MAX_FRAME] * 3
    pair.client.increment_flow_control_window(MIB)
    pair.exchange()
    assert pair.server.open_streams == 0


def test_larger_frames_are_sent_to_a_peer_that_accepts_them() -> None:
    pair = Pair()
    pair.client.update_settings({h2.settings.SettingCodes.MAX_FRAME_SIZE: 50_000})
    pair.request(1)
    pair.server.send_data(1, bytes(60_000))
    output = frames_of(pair.server)

    assert [len(payload) for kind, _, _, payload in output if kind == frames.DATA] == [50_000, 10_000]


# -- flow control of requests


def test_a_request_is_as_large_as_its_window_until_data_is_consumed() -> None:
    pair = Pair()
    pair.client.send_headers(1, REQUEST)
    pair.exchange()
    for _ in range(64):
        pair.client.send_data(1, bytes(16_384))
    pair.exchange()
    assert pair.client.local_flow_control_window(1) == 0

    pair.server.consumed(1, MIB // 2 - 1)
    pair.exchange()
    assert pair.client.local_flow_control_window(1) == 0

    pair.server.consumed(1, 1)
    pair.exchange()
    assert pair.client.local_flow_control_window(1) == MIB // 2


def test_the_connections_window_is_given_back_by_consumption_and_by_the_end_of_streams() -> None:
    pair = Pair(Http2Limits(connection_window=4 * 65_536))
    for stream_id in (1, 3):
        pair.client.send_headers(stream_id, REQUEST)
        pair.exchange()
        for _ in range(8):
            pair.client.send_data(stream_id, bytes(16_384))
    pair.exchange()
    assert pair.client.outbound_flow_control_window == 0

    pair.server.consumed(1, 8 * 16_384)
    pair.exchange()
    assert pair.client.outbound_flow_control_window == 8 * 16_384

    pair.server.consumed(3, 16_384)
    pair.server.reset(3, ErrorCode.CANCEL)
    pair.server.consumed(3, 7 * 16_384)  # ignored: the end of the stream has given it back
    pair.exchange()
    assert pair.client.outbound_flow_control_window == 16 * 16_384


def test_the_window_of_a_complete_request_is_not_opened() -> None:
    peer = RawPeer(Http2Limits(stream_window=20_000))
    peer.send(peer.headers(1), frames.frame(frames.DATA, frames.END_STREAM, 1, bytes(16_000)))
    peer.server.consumed(1, 16_000)

    assert peer.output() == []


def test_data_of_streams_that_have_ended_is_ignored_and_given_back() -> None:
    peer = RawPeer(Http2Limits(connection_window=65_536))
    peer.send(peer.headers(1))
    peer.server.reset(1, ErrorCode.CANCEL)
    peer.output()

    for _ in range(100):
        assert peer.send(frames.frame(frames.DATA, 0, 1, bytes(16_384))) == []
    assert peer.send(peer.headers(1, end=True)) == []
    assert {kind for kind, *_ in peer.output()} == {frames.WINDOW_UPDATE}
    assert not peer.server.closed


def test_padding_is_removed_and_given_back() -> None:
    pair = Pair(Http2Limits(stream_window=65_536))
    pair.client.send_headers(1, REQUEST)
    pair.client.send_data(1, b"data", pad_length=200)
    received = pair.exchange()[0]
    assert received[1:] == [DataReceived(1, b"data", False)]

    for _ in range(500):
        pair.client.send_data(1, b"", pad_length=255)
        assert pair.exchange()[0] == []


# -- the end


def test_a_response_that_ends_before_its_request_stops_the_request() -> None:
    pair = Pair()
    pair.client.send_headers(1, REQUEST)
    pair.exchange()
    pair.server.send_headers(1, [*RESPONSE, *TRAILERS], end_stream=True)
    _, answered = pair.exchange()

    assert isinstance(answered[-1], h2.events.StreamReset)
    assert answered[-1].error_code == ErrorCode.NO_ERROR
    assert pair.server.open_streams == 0


def test_actions_on_streams_that_have_ended_do_nothing() -> None:
    pair = Pair()
    pair.request(1)
    pair.client.reset_stream(1, ErrorCode.CANCEL)
    assert pair.exchange()[0] == [StreamReset(1, ErrorCode.CANCEL)]
    pair.request(3)
    pair.server.send_headers(3, [*RESPONSE, *TRAILERS], end_stream=True)
    pair.exchange()

    for stream_id in (1, 3, 5):
        pair.server.send_headers(stream_id, RESPONSE)
        pair.server.send_data(stream_id, b"late")
        pair.server.reset(stream_id, ErrorCode.CANCEL)
        pair.server.consumed(stream_id, 5)
    assert pair.server.take_output() == []


def test_nothing_follows_the_end_of_a_response_that_is_still_queued() -> None:
    pair = Pair()
    pair.request(1)
    pair.server.send_data(1, bytes(70_000), end_stream=True)
    pair.server.send_data(1, b"late")
    pair.server.send_headers(1, TRAILERS, end_stream=True)

    assert pair.server.unsent(1) == 70_000 - frames.DEFAULT_WINDOW


def test_a_reset_discards_what_is_queued() -> None:
    pair = Pair()
    pair.request(1)
    pair.request(3)
    pair.server.send_headers(1, RESPONSE)
    pair.server.send_data(1, bytes(100_000))
    pair.server.send_data(3, bytes(1_000))
    pair.exchange()
    pair.server.reset(1, ErrorCode.CANCEL)
    assert isinstance(pair.exchange()[1][0], h2.events.StreamReset)
    assert pair.server.unsent_total == pair.server.unsent(3) == 1_000

    pair.client.reset_stream(3, ErrorCode.CANCEL)
    pair.exchange()
    assert pair.server.unsent_total == 0


def test_streams_that_end_while_the_connections_window_is_closed_leave_nothing() -> None:
    peer = RawPeer()
    peer.send(peer.headers(1))
    peer.server.send_data(1, bytes(frames.DEFAULT_WINDOW))
    for stream_id in range(3, 1_000, 2):
        peer.send(peer.headers(stream_id))
        peer.server.send_data(stream_id, b"data")
        peer.server.reset(stream_id, ErrorCode.CANCEL)

    assert len(peer.server._sender._waiting) == 0  # noqa: SLF001
    peer.output()
    peer.send(frames.window_update(0, 1_000))
    assert peer.output() == []


def test_streams_above_the_limit_are_refused() -> None:
    peer = RawPeer(Http2Limits(max_streams=2))
    assert len(peer.send(peer.headers(1), peer.headers(3), peer.headers(5))) == 2
    assert peer.output() == [(frames.RST_STREAM, 0, 5, word(ErrorCode.REFUSED_STREAM))]

    peer.send(frames.reset(1, ErrorCode.CANCEL))
    assert peer.send(peer.headers(7))[0].stream_id == 7


def test_a_connection_ends_gracefully_in_two_steps() -> None:
    peer = RawPeer()
    peer.send(peer.headers(1))
    peer.server.goaway()
    assert peer.output() == [(frames.GOAWAY, 0, 0, word(frames.MAX_STREAM_ID) + word(0))]

    assert len(peer.send(peer.headers(3, end=True))) == 1
    peer.server.goaway()
    assert peer.output() == [(frames.GOAWAY, 0, 0, word(3) + word(0))]
    assert peer.send(peer.headers(5), frames.frame(frames.DATA, 0, 5, b"late")) == []

    peer.server.send_headers(1, [*RESPONSE, *TRAILERS], end_stream=True)
    assert not peer.server.closed
    assert peer.send(frames.reset(3, ErrorCode.CANCEL)) == [
        StreamReset(3, ErrorCode.CANCEL),
        ConnectionEnded(ErrorCode.NO_ERROR, "all streams have ended"),
    ]
    assert peer.server.closed
    assert peer.send(peer.headers(7)) == []


def test_an_idle_connection_ends_with_its_second_goaway() -> None:
    peer = RawPeer()
    peer.server.goaway()
    assert not peer.server.closed
    peer.server.goaway()
    assert peer.server.closed
    peer.server.goaway()
    assert len(peer.output()) == 2


def test_a_goaway_with_an_error_ends_all_streams() -> None:
    peer = RawPeer()
    peer.send(peer.headers(1, end=True))
    peer.server.send_data(1, bytes(100_000))
    peer.output()
    peer.server.goaway(ErrorCode.INTERNAL_ERROR)

    assert (peer.server.closed, peer.server.open_streams, peer.server.unsent(1)) == (True, 0, 0)
    ((kind, _, _, payload),) = peer.output()
    assert (kind, payload[:8]) == (frames.GOAWAY, word(1) + word(ErrorCode.INTERNAL_ERROR))


def test_a_peer_that_leaves_gets_its_responses() -> None:
    pair = Pair()
    pair.request(1)
    pair.client.close_connection()
    assert pair.exchange()[0] == []
    pair.server.send_headers(1, [*RESPONSE, *TRAILERS], end_stream=True)

    assert pair.server.closed
    assert len(pair.server.take_output()) == 1


def test_a_peer_that_leaves_an_idle_connection_ends_it() -> None:
    pair = Pair()
    pair.exchange()
    pair.client.close_connection()

    assert pair.exchange()[0] == [ConnectionEnded(ErrorCode.NO_ERROR, "all streams have ended")]


def test_pings_are_answered_for_days() -> None:
    pair = Pair()
    pair.exchange()
    for number in range(10_000):
        pair.now += 10
        pair.client.ping(number.to_bytes(8, "big"))
        received, answered = pair.exchange()
        assert received == []
        assert [event.ping_data for event in answered] == [number.to_bytes(8, "big")]


# -- division of the received bytes


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 10, 100, 1_000])
def test_the_division_of_the_received_bytes_does_not_matter(size: int, as_view: bool) -> None:
    peer = RawPeer()
    parts = [
        *(frames.PREFACE, frames.settings({frames.INITIAL_WINDOW_SIZE: 5}), peer.headers(1)),
        *(frames.frame(frames.DATA, 0, 1, bytes(range(256))), frames.frame(frames.PING, 0, 0, b"12345678")),
        *(frames.frame(frames.DATA, frames.END_STREAM, 1), peer.headers(3, end=True), frames.reset(3, 8)),
    ]
    stream = b"".join(parts)
    whole, divided = Http2Connection(Http2Limits(), 0.0), Http2Connection(Http2Limits(), 0.0)
    events = []
    for start in range(0, len(stream), size):
        buffer = bytearray(stream[start : start + size])
        events += divided.receive(memoryview(buffer) if as_view else bytes(buffer), 0.0)
        buffer[:] = bytes(len(buffer))

    assert events == whole.receive(stream, 0.0)
    assert kinds(events) == [
        "HeadersReceived",
        "DataReceived",
        "DataReceived",
        "HeadersReceived",
        "StreamReset",
    ]
    assert b"".join(divided.take_output()) == b"".join(whole.take_output())
