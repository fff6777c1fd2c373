"""What a peer may not do: it ends the stream or the connection, with the code that RFC 9113 names."""

from __future__ import annotations

import pytest
from tests.grpc.http2.peers import REQUEST, RawPeer, word

from cometmq.grpc.http2 import frames, hpack
from cometmq.grpc.http2.connection import (
    ConnectionEnded,
    HeadersReceived,
    Http2Connection,
    Http2Limits,
    StreamReset,
)
from cometmq.grpc.http2.errors import ErrorCode
from cometmq.grpc.http2.frames import ACK, END_HEADERS, END_STREAM, PADDED, PRIORITY_FIELDS, frame

BLOCK = hpack.encode(REQUEST)
OPEN = frame(frames.HEADERS, END_HEADERS, 1, BLOCK)
COMPLETE = frame(frames.HEADERS, END_HEADERS | END_STREAM, 1, BLOCK)
HALF = frame(frames.HEADERS, 0, 1, BLOCK)
LARGE = (1 << 31) - 1


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(frames.DATA, 0, 0), "PROTOCOL_ERROR"),
        (frame(frames.DATA, 0, 1), "PROTOCOL_ERROR"),  # a stream that was never opened
        (OPEN + frame(frames.DATA, PADDED, 1, b"\x05data"), "PROTOCOL_ERROR"),
        (OPEN + frame(frames.DATA, PADDED, 1), "PROTOCOL_ERROR"),
        (frame(frames.DATA, 0, 1, bytes(16_385)), "FRAME_SIZE_ERROR"),
        (frame(frames.HEADERS, END_HEADERS, 0, BLOCK), "PROTOCOL_ERROR"),
        (frame(frames.HEADERS, END_HEADERS, 2, BLOCK), "PROTOCOL_ERROR"),
        (frame(frames.HEADERS, END_HEADERS | PADDED, 1, b"\x01"), "PROTOCOL_ERROR"),
        (frame(frames.HEADERS, END_HEADERS | PRIORITY_FIELDS, 1, bytes(4)), "FRAME_SIZE_ERROR"),
        (frame(frames.HEADERS, END_HEADERS, 1, b"\x80"), "COMPRESSION_ERROR"),
        (HALF + frame(frames.CONTINUATION, END_HEADERS, 3), "PROTOCOL_ERROR"),
        (HALF + frame(frames.DATA, 0, 1), "PROTOCOL_ERROR"),
        (HALF + HALF, "PROTOCOL_ERROR"),
        (HALF + frame(frames.PING, 0, 0, bytes(8)), "PROTOCOL_ERROR"),
        (HALF + frame(77, 0, 0), "PROTOCOL_ERROR"),
        (frame(frames.CONTINUATION, END_HEADERS, 1), "PROTOCOL_ERROR"),
        (OPEN + frame(frames.CONTINUATION, END_HEADERS, 1), "PROTOCOL_ERROR"),
        (frame(frames.PRIORITY, 0, 0, bytes(5)), "PROTOCOL_ERROR"),
        (frame(frames.RST_STREAM, 0, 0, bytes(4)), "PROTOCOL_ERROR"),
        (frame(frames.RST_STREAM, 0, 1, bytes(4)), "PROTOCOL_ERROR"),
        (OPEN + frame(frames.RST_STREAM, 0, 1, bytes(5)), "FRAME_SIZE_ERROR"),
        (frame(frames.SETTINGS, 0, 1), "PROTOCOL_ERROR"),
        (frame(frames.SETTINGS, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
        (frame(frames.SETTINGS, ACK, 0, bytes(6)), "FRAME_SIZE_ERROR"),
        (frames.settings({frames.ENABLE_PUSH: 2}), "PROTOCOL_ERROR"),
        (frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 31}), "FLOW_CONTROL_ERROR"),
        (frames.settings({frames.MAX_FRAME_SIZE: 16_383}), "PROTOCOL_ERROR"),
        (frames.settings({frames.MAX_FRAME_SIZE: 1 << 24}), "PROTOCOL_ERROR"),
        (
            OPEN
            + frames.window_update(1, LARGE - 65_535)
            + frames.settings({frames.INITIAL_WINDOW_SIZE: 65_536}),
            "FLOW_CONTROL_ERROR",
        ),
        (frame(frames.PUSH_PROMISE, END_HEADERS, 1, word(2) + BLOCK), "PROTOCOL_ERROR"),
        (frame(frames.PING, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
        (frame(frames.PING, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
        (frame(frames.GOAWAY, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
        (frame(frames.GOAWAY, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
        (frames.window_update(0, 0), "PROTOCOL_ERROR"),
        (frames.window_update(0, LARGE), "FLOW_CONTROL_ERROR"),
        (frames.window_update(1, 1), "PROTOCOL_ERROR"),
        (frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), "FRAME_SIZE_ERROR"),
    ],
)
def test_errors_that_end_the_connection(sent: bytes, code: str) -> None:
    peer = RawPeer()
    last = peer.send(sent)[-1]

    assert isinstance(last, ConnectionEnded)
    assert ErrorCode(last.error_code).name == code
    kind, _, _, payload = peer.output()[-1]
    assert kind == frames.GOAWAY
    assert payload[4:] == word(last.error_code) + last.reason.encode()
    assert (peer.server.closed, peer.server.open_streams) == (True, 0)
    assert peer.send(OPEN) == []


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (COMPLETE + frame(frames.DATA, 0, 1, b"more"), "STREAM_CLOSED"),
        (COMPLETE + COMPLETE, "STREAM_CLOSED"),
        (OPEN + OPEN, "PROTOCOL_ERROR"),  # trailers that do not end the request
        (OPEN + frames.window_update(1, 0), "PROTOCOL_ERROR"),
        (OPEN + frames.window_update(1, LARGE), "FLOW_CONTROL_ERROR"),
        (OPEN + frame(frames.PRIORITY, 0, 1, bytes(4)), "FRAME_SIZE_ERROR"),
    ],
)
def test_errors_that_end_a_stream(sent: bytes, code: str) -> None:
    peer = RawPeer()
    events = peer.send(sent)

    assert events[1:] == [StreamReset(1, ErrorCode[code])]
    assert peer.output() == [(frames.RST_STREAM, 0, 1, word(ErrorCode[code]))]
    assert (peer.server.closed, peer.server.open_streams) == (False, 0)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        *([header for header in REQUEST if header[0] != name] for name in (b":method", b":scheme", b":path")),
        [*REQUEST, (b":path", b"/late")],
        [(b":path", b"/twice"), *REQUEST],
        [(b":status", b"200"), *REQUEST],
        [*REQUEST, (b"Upper", b"")],
        [*REQUEST, (b"", b"empty")],
        [*REQUEST, (b"sp ace", b"")],
        [*REQUEST, (b"b\xc3\xa4", b"")],
        [*REQUEST, (b"x", b"a\nb")],
        [*REQUEST, (b"x", b"a\0b")],
        [*REQUEST, (b"connection", b"close")],
        [*REQUEST, (b"transfer-encoding", b"chunked")],
        [(name, b"gzip" if name == b"te" else value) for name, value in REQUEST],
    ],
)
def test_malformed_requests_are_reset(headers: list[tuple[bytes, bytes]]) -> None:
    peer = RawPeer()

    assert peer.send(frame(frames.HEADERS, END_HEADERS, 1, hpack.encode(headers))) == []
    assert peer.output() == [(frames.RST_STREAM, 0, 1, word(ErrorCode.PROTOCOL_ERROR))]
    assert len(peer.send(peer.headers(3))) == 1


def test_headers_above_the_limit_are_reset_and_change_the_table() -> None:
    peer = RawPeer()
    large = [(b"x-%d" % number, b"v" * 1_000) for number in range(16)]

    assert peer.send(peer.headers(1, *large)) == []
    assert peer.output() == [(frames.RST_STREAM, 0, 1, word(ErrorCode.ENHANCE_YOUR_CALM))]
    assert peer.send(peer.headers(3, large[-1])) == [HeadersReceived(3, [*REQUEST, large[-1]], False)]


def test_data_beyond_the_streams_window() -> None:
    peer = RawPeer(Http2Limits(stream_window=20_000))
    peer.send(OPEN, frame(frames.DATA, 0, 1, bytes(16_000)))

    assert peer.send(frame(frames.DATA, 0, 1, bytes(4_001))) == [StreamReset(1, ErrorCode.FLOW_CONTROL_ERROR)]


def test_data_beyond_the_connections_window() -> None:
    peer = RawPeer(Http2Limits(connection_window=65_536))
    peer.send(OPEN)
    events = peer.send(*[frame(frames.DATA, 0, 1, bytes(16_000))] * 5)

    assert len(events) == 5
    assert isinstance(events[-1], ConnectionEnded)
    assert events[-1].error_code == ErrorCode.FLOW_CONTROL_ERROR


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSX",
        b"\x00\x00\x00\x65",
        frames.PREFACE + frame(frames.PING, 0, 0, bytes(8)),
        frames.PREFACE + frame(frames.SETTINGS, ACK, 0),
    ],
)
def test_other_openings_are_refused_at_once(sent: bytes) -> None:
    server = Http2Connection(Http2Limits(), 0.0)
    (event,) = server.receive(sent, 0.0)

    assert isinstance(event, ConnectionEnded)
    assert server.closed


def test_the_reserved_bit_of_a_stream_id_is_ignored() -> None:
    peer = RawPeer()

    assert peer.send(frame(frames.HEADERS, END_HEADERS, 1 << 31 | 1, BLOCK)) == [
        HeadersReceived(1, REQUEST, False)
    ]


@pytest.mark.parametrize(
    "sent",
    [
        frame(77, 0xFF, 0, b"extension"),
        frame(77, 0xFF, 1, b"extension"),
        frames.settings({0xAAAA: 7}),
        frame(frames.SETTINGS, ACK, 0),
        frame(frames.PING, ACK, 0, bytes(8)),
        frame(frames.PRIORITY, 0, 1, bytes(5)),
        frame(frames.PRIORITY, 0, 99, bytes(5)),
        COMPLETE + frames.reset(1, 8) + frames.window_update(1, 1) + frames.reset(1, 8),
    ],
)
def test_frames_without_effect(sent: bytes) -> None:
    peer = RawPeer()
    peer.send(sent)

    assert not peer.server.closed
    assert {kind for kind, *_ in peer.output()} <= {frames.SETTINGS}
    assert (
        len(
            peer.send(
                frame(
                    frames.HEADERS,
                    END_HEADERS | PADDED | PRIORITY_FIELDS,
                    3,
                    b"\2" + bytes(5) + BLOCK + b"\0\0",
                )
            )
        )
        == 1
    )
