"""Random sessions: beside PyPI's h2 as the client, and hostile frames against which nothing may break."""

from __future__ import annotations

import random
from collections import defaultdict

import h2.events
import h2.settings
import pytest
from tests.grpc.http2.peers import REQUEST, RESPONSE, Pair, frames_of, hostile_frame
from tests.long_form import LONG

from cometmq.grpc.http2 import frames
from cometmq.grpc.http2.connection import (
    ConnectionEnded,
    DataReceived,
    Event,
    HeadersReceived,
    Http2Connection,
    Http2Limits,
    StreamReset,
)

LIMITS = Http2Limits(max_streams=20, stream_window=70_000, connection_window=200_000)
SIZES = (0, 1, 100, 16_384, 16_385, 80_000)


class Session:
    """Calls of random sizes, in random order, over bytes that arrive in random pieces."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pair = Pair(LIMITS)
        self.next_stream = 1
        self.to_send: dict[int, bytes] = {}  # what is left of requests
        self.to_answer: dict[int, bytes] = {}  # what is left of responses
        self.unconsumed: dict[int, int] = defaultdict(int)
        self.reset: set[int] = set()
        self.sent: dict[int, list[tuple[bytes, bytes]]] = {}
        self.requests: dict[int, bytes] = {}
        self.responses: dict[int, bytes] = {}
        self.got_requests: dict[int, bytes] = defaultdict(bytes)
        self.got_responses: dict[int, bytes] = defaultdict(bytes)
        self.trailers: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.complete: set[int] = set()  # received requests

    def body(self) -> bytes:
        return self.chance.randbytes(self.chance.choice(SIZES))

    def open(self) -> None:
        if self.pair.client.open_outbound_streams >= LIMITS.max_streams:
            return
        stream_id, self.next_stream = self.next_stream, self.next_stream + 2
        value = self.chance.randbytes(self.chance.randrange(60)).hex().encode()
        headers = [*REQUEST, (b"x-mq-request-id", value), (b"x-%d" % self.chance.randrange(50), value)]
        self.pair.client.send_headers(stream_id, headers)
        self.sent[stream_id] = headers
        self.requests[stream_id] = self.to_send[stream_id] = self.body()

    def send(self) -> None:
        if not self.to_send:
            return
        stream_id = self.chance.choice(list(self.to_send))
        client = self.pair.client
        rest = self.to_send[stream_id]
        size = min(len(rest), client.local_flow_control_window(stream_id), 16_384)
        size = self.chance.choice((size, self.chance.randint(0, size)))
        ends = size == len(rest)
        if size or ends:
            client.send_data(stream_id, rest[:size], end_stream=ends)
            self.to_send[stream_id] = rest[size:]
        if ends:
            del self.to_send[stream_id]

    def consume(self) -> None:
        for stream_id, size in list(self.unconsumed.items()):
            part = self.chance.randint(0, size)
            self.pair.server.consumed(stream_id, part)
            self.unconsumed[stream_id] -= part

    def answer(self) -> None:
        if not self.to_answer:
            return
        stream_id = self.chance.choice(list(self.to_answer))
        if stream_id % 4 == 1 and stream_id not in self.complete:
            return  # the other half of the responses need not wait for their requests
        rest = self.to_answer[stream_id]
        size = self.chance.choice((len(rest), self.chance.randint(0, len(rest))))
        self.pair.server.send_data(stream_id, rest[:size])
        self.to_answer[stream_id] = rest[size:]
        if size == len(rest):
            del self.to_answer[stream_id]
            self.pair.server.send_headers(stream_id, [(b"grpc-status", b"%d" % stream_id)], end_stream=True)

    def cancel(self) -> None:
        streams = [each for each in self.sent if each not in self.ended | self.reset]
        if not streams:
            return
        stream_id = self.chance.choice(streams)
        self.reset.add(stream_id)
        self.to_send.pop(stream_id, None)
        if stream_id not in self.responses or self.chance.random() < 0.5:
            self.pair.client.reset_stream(stream_id)
        else:
            self.pair.server.reset(stream_id, 8)

    def change_settings(self) -> None:
        codes = h2.settings.SettingCodes
        size = self.chance.choice((16_384, 65_535, 100_000))
        self.pair.client.update_settings({codes.MAX_FRAME_SIZE: size, codes.HEADER_TABLE_SIZE: size // 100})

    def pass_bytes(self) -> None:
        """Pass the bytes of both sides in pieces, and open the client's windows for what it has read."""
        stream = self.pair.client.data_to_send()
        while stream:
            size = self.chance.choice((len(stream), self.chance.randint(1, 40)))
            for event in self.pair.server.receive(stream[:size], self.pair.now):
                self.on_server_event(event)
            stream = stream[size:]
        for event in self.pair.client.receive_data(b"".join(self.pair.server.take_output())):
            self.on_client_event(event)

    def on_server_event(self, event: Event) -> None:
        if isinstance(event, HeadersReceived):
            assert event.headers == self.sent[event.stream_id]
            self.responses[event.stream_id] = self.to_answer[event.stream_id] = self.body()
            self.pair.server.send_headers(event.stream_id, RESPONSE)
        elif isinstance(event, DataReceived):
            self.got_requests[event.stream_id] += event.data
            if event.end_stream:
                self.complete.add(event.stream_id)
            self.unconsumed[event.stream_id] += len(event.data)
        else:
            assert isinstance(event, StreamReset)
            assert event.stream_id in self.reset

    def on_client_event(self, event: object) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.got_responses[event.stream_id] += event.data
            self.pair.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.TrailersReceived):
            self.trailers[event.stream_id] = dict(event.headers)[b"grpc-status"]
        elif isinstance(event, h2.events.StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            # Also sent for a response that is complete before its request: no more of it is wanted.
            assert event.stream_id in self.reset | self.ended
            self.to_send.pop(event.stream_id, None)

    def run(self, steps: int) -> None:
        acts = [self.open, self.send, self.send, self.send, self.consume, self.answer, self.pass_bytes]
        for _ in range(steps):
            self.pair.now += 0.01
            self.chance.choice(acts)()
            if self.chance.random() < 0.01:
                self.chance.choice((self.cancel, self.change_settings))()
        for _ in range(2_000):
            for act in (self.send, self.consume, self.answer, self.pass_bytes):
                act()


@pytest.mark.parametrize("seed", range(12))
def test_random_sessions_with_h2(seed: int) -> None:
    session = Session(seed)
    session.run(1_500)
    whole = session.sent.keys() - session.reset

    assert len(whole) > 50
    assert whole <= session.ended
    for stream_id in whole:
        assert session.got_responses[stream_id] == session.responses[stream_id]
        assert session.trailers[stream_id] == b"%d" % stream_id
        assert session.requests[stream_id].startswith(session.got_requests[stream_id])
        assert stream_id in session.complete or stream_id % 4 != 1
    for stream_id in session.complete:
        assert session.requests[stream_id] == session.got_requests[stream_id]
    assert (session.pair.server.open_streams, session.pair.server.unsent_total) == (0, 0)
    assert not session.pair.server.closed


# -- hostile frames


@pytest.mark.timeout(3600)
def test_hostile_frames() -> None:
    """Return only events, within the limits, for many frames that are often almost right."""
    chance = random.Random(9113)
    limits = Http2Limits(max_streams=8, max_replies=50, early_resets=20, idle_frames_per_s=200)
    seen: dict[str, int] = defaultdict(int)
    sent = 0
    while sent < (2_000_000 if LONG else 40_000):
        server = Http2Connection(limits, 0.0)
        server.receive(frames.PREFACE + frames.settings({}), 0.0)
        now = 0.0
        for number in range(1_000):
            sent += 1
            now += chance.choice((0.0, 0.1))
            part = hostile_frame(chance, number)
            if chance.random() < 0.01:
                part = part[: chance.randrange(len(part))]
            events = server.receive(part, now)
            for event in events:
                seen[type(event).__name__] += 1
                if isinstance(event, HeadersReceived) and chance.random() < 0.8:
                    server.send_headers(event.stream_id, RESPONSE)
                    server.send_data(event.stream_id, bytes(chance.choice(SIZES)), chance.random() < 0.5)
                if isinstance(event, DataReceived) and chance.random() < 0.8:
                    server.consumed(event.stream_id, len(event.data))
            assert server.closed == any(isinstance(event, ConnectionEnded) for event in events)
            assert server.open_streams <= limits.max_streams
            if chance.random() < 0.9:
                frames_of(server)
            if server.closed:
                break
        server.goaway(1)
        server.take_output()
        assert server.unsent_total == 0

    assert all(
        seen[name] > 100 for name in ("HeadersReceived", "DataReceived", "StreamReset", "ConnectionEnded")
    )


def test_hostile_bytes_in_an_honest_session() -> None:
    """Change single bytes of a session; the server then reports events, and ends or waits."""
    pair = Pair()
    for stream_id in range(1, 20, 2):
        pair.client.send_headers(stream_id, REQUEST)
        pair.client.send_data(stream_id, bytes(range(200)), end_stream=True)
    honest = pair.client.data_to_send()
    chance = random.Random(7540)
    ended = 0
    for _ in range(3_000):
        changed = bytearray(honest)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(24, len(changed) // 4)] = chance.randrange(256)
        server = Http2Connection(Http2Limits(), 0.0)
        server.receive(changed, 0.0)
        frames_of(server)
        ended += server.closed

    assert 500 < ended < 2_500
