"""HTTP/1.1 without sockets: events of requests, responses, pipelining, hostile bytes, time limits."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.grpc.http1.connection import (
    DISCARD_S,
    HEAD_S,
    MAX_DISCARDED_BYTES,
    MAX_HEAD_BYTES,
    Http1Connection,
)
from cometmq.grpc.http2.connection import ConnectionEnded, DataReceived, HeadersReceived

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
OK = [(b":status", b"200"), (b"content-length", b"2")]


class Served:
    """A connection with its events, to which a test responds."""

    def __init__(self) -> None:
        self.freed = 0
        self.http = Http1Connection(0.0, self._free)

    def _free(self) -> None:
        self.freed += 1

    def receive(self, data: bytes, now: float = 0.0) -> list[Any]:
        return self.http.receive(data, now)

    def respond(self, stream: int) -> bytes:
        self.http.send_headers(stream, OK)
        self.http.send_data(stream, b"ok", end_stream=True)
        return self.output()

    def output(self) -> bytes:
        return b"".join(self.http.take_output())


def body_of(events: list[Any]) -> bytes:
    return b"".join(each.data for each in events if isinstance(each, DataReceived))


@pytest.mark.parametrize(
    ("framing", "sent"),
    [
        (b"Content-Length: 5", b"hello"),
        (b"Transfer-Encoding: chunked", b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nTrailer: 1\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
def test_a_request_is_a_stream(framing: bytes, sent: bytes, step: int) -> None:
    served, events = Served(), []
    data = b"POST /a?b HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n" + sent
    for at in range(0, len(data), step):
        events += served.receive(data[at : at + step])

    head = events[0]
    assert isinstance(head, HeadersReceived)
    assert head.headers[:3] == [(b":method", b"POST"), (b":path", b"/a?b"), (b"host", b"x")]
    assert body_of(events) == b"hello"
    assert events[-1].end_stream
    assert served.http.is_occupied
    assert served.respond(head.stream_id) == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    assert not served.http.is_occupied
    assert served.freed == 1


def test_the_next_request_waits_for_the_response() -> None:
    served = Served()
    (first, end) = served.receive(GET + GET)
    assert end.end_stream
    assert served.http.is_occupied
    served.respond(first.stream_id)
    assert served.http.has_more
    (second, _) = served.receive(b"")
    assert second.stream_id != first.stream_id
    assert served.respond(first.stream_id) == b""  # of the request that has ended
    assert served.respond(second.stream_id).endswith(b"ok")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 4\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0x3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: 1\rB: 2\r\n\r\n", 400),
        (b"GET /\x01 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/2.5\r\nHost: x\r\n\r\n", 505),
        (b"HELO mail\r\n\r\n", 400),
        (b"GET /" + b"a" * (MAX_HEAD_BYTES + 1), 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * MAX_HEAD_BYTES, 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 20_000, 431),
    ],
)
def test_bytes_that_are_no_valid_request_end_the_connection(data: bytes, status: int) -> None:
    served = Served()
    events = served.receive(data)
    output = served.output()

    assert isinstance(events[-1], ConnectionEnded)
    assert output.startswith(b"HTTP/1.1 %d " % status), output
    assert b"application/problem+json" in output
    assert b"connection: close" in output.lower()
    assert served.http.closed
    assert served.receive(GET) == []


def test_the_first_byte_of_a_head_begins_its_time() -> None:
    served = Served()
    (first, _) = served.receive(GET)
    served.respond(first.stream_id)
    assert served.receive(b"G", 1000.0) == []
    assert served.receive(b"ET /a ", 1000.0 + HEAD_S) == []
    events = served.receive(b"H", 1000.1 + HEAD_S)

    assert isinstance(events[-1], ConnectionEnded)
    assert served.output().startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("size", "after_s"), [(MAX_DISCARDED_BYTES + 1, 0.0), (1, DISCARD_S + 0.1), (99, 0.0)]
)
def test_a_refused_request_is_read_a_little_longer(size: int, after_s: float) -> None:
    served = Served()
    (head,) = served.receive(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
    output = served.respond(head.stream_id)
    assert b"connection: close" in output
    events = served.receive(b"x" * size, after_s)

    assert served.http.closed is (size != 99)
    assert [type(each) for each in events] == ([] if size == 99 else [ConnectionEnded])


def test_a_client_that_waits_for_100_continue_is_told_to_go_on() -> None:
    served = Served()
    served.receive(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n")

    assert served.output().startswith(b"HTTP/1.1 100 ")


@pytest.mark.parametrize("busy", [False, True])
def test_goaway_ends_the_connection_after_the_response(busy: bool) -> None:
    served = Served()
    if busy:
        (head, _) = served.receive(GET)
    served.http.goaway()
    assert served.http.closed is not busy
    if busy:
        assert b"connection: close" in served.respond(head.stream_id)
        assert served.http.closed


@pytest.mark.parametrize(
    "request_", [b"GET / HTTP/1.0\r\n\r\n", GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")]
)
def test_the_connection_of_a_client_that_wants_no_other_request_ends(request_: bytes) -> None:
    served = Served()
    (head, _) = served.receive(request_)
    assert served.respond(head.stream_id).endswith(b"ok")
    assert served.http.closed
