"""A connection beside PyPI's h2 as its client: requests, responses, flow control, the end."""

from __future__ import annotations

import h2.events
from tests.grpc.http2.peers import REQUEST, RESPONSE, TRAILERS, Pair

from cometmq.grpc.http2 import frames
from cometmq.grpc.http2.errors import ErrorCode
from cometmq.grpc.http2.events import DataReceived, HeadersReceived


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

    assert [type(event).__name__ for event in answered] == [
        *("ResponseReceived", "DataReceived", "TrailersReceived", "StreamEnded")
    ]
    assert (answered[0].headers, answered[1].data, answered[2].headers) == (RESPONSE, b"answer", TRAILERS)
    assert pair.server.open_streams == pair.server.unsent_total == 0


def test_a_response_waits_for_windows_and_its_trailers_wait_behind_it() -> None:
    pair = Pair()
    pair.request(1)
    body = bytes(range(256)) * 1_000
    pair.server.send_headers(1, RESPONSE)
    pair.server.send_data(1, body)
    pair.server.send_headers(1, TRAILERS, end_stream=True)
    _, answered = pair.exchange()

    assert pair.server.unsent(1) == pair.server.unsent_total == len(body) - frames.DEFAULT_WINDOW
    got = b"".join(event.data for event in answered if isinstance(event, h2.events.DataReceived))
    while pair.server.open_streams:
        pair.client.increment_flow_control_window(10_000)
        pair.client.increment_flow_control_window(10_000, 1)
        _, answered = pair.exchange()
        got += b"".join(event.data for event in answered if isinstance(event, h2.events.DataReceived))

    assert got == body
    assert [type(event) for event in answered][-2:] == [h2.events.TrailersReceived, h2.events.StreamEnded]
    assert pair.server.unsent_total == 0


def test_a_response_that_ends_before_its_request_stops_the_request() -> None:
    pair = Pair()
    pair.client.send_headers(1, REQUEST)
    pair.exchange()
    pair.server.send_headers(1, [*RESPONSE, *TRAILERS], end_stream=True)
    _, answered = pair.exchange()

    assert isinstance(answered[-1], h2.events.StreamReset)
    assert answered[-1].error_code == ErrorCode.NO_ERROR
    assert pair.server.open_streams == 0
    pair.server.send_data(1, b"late")
    pair.server.send_headers(1, TRAILERS)
    pair.server.reset(1, ErrorCode.CANCEL)
    assert pair.server.take_output() == []
