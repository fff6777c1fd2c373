"""The gRPC endpoint and clients that break rules, do not read, or do not speak gRPC: all is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import logging
import random
import time
from functools import partial
from typing import Any

import psutil
import pytest
from tests.grpc.http2.peers import REQUEST as HEADERS
from tests.grpc.http2.peers import hostile_frame
from tests.grpc.serving import M, Peer, client, connected, sending, serving, stored
from tests.kit.waiting import until
from tests.long_form import LONG

from cometmq.grpc.http2 import frames, hpack
from cometmq.grpc.listener.server import GrpcServer
from cometmq.grpc.rpc.calls import Call, frame_message
from cometmq.grpc.rpc.messages import SERVICE
from cometmq.remoting import Limits, Tick

MIB = 1024 * 1024
REQUEST = frame_message(sending(b"hello").SerializeToString())
RESPONSE = frame_message(stored(b"hello").SerializeToString())
TELEMETRY = f"/{SERVICE}/Telemetry"


def echo(call: Call, request: Any) -> Any:
    return stored(request.messages[0].body)


HANDLERS: dict[str, Any] = {"SendMessage": echo, "Telemetry": lambda call: None}


async def answer_of(peer: Peer, *data: bytes, **more: Any) -> tuple[dict[str, str], bytes]:
    stream = peer.request(*data, **more)
    peer.send()
    return await peer.response(stream)


async def test_a_request_may_arrive_byte_by_byte() -> None:
    async with serving(HANDLERS) as (_, port), connected(port) as peer:
        stream = peer.request(*(REQUEST[at : at + 1] for at in range(len(REQUEST))))
        for byte in peer.http.data_to_send():
            peer.writer.write(bytes([byte]))
            await peer.writer.drain()
        headers, data = await peer.response(stream)

    assert (headers[":status"], headers["grpc-status"], data) == ("200", "0", RESPONSE)


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        ((b"\7" + REQUEST[1:],), "13", "flag byte of a message is 7"),
        ((REQUEST[:-1],), "3", "bytes into a message"),
        ((REQUEST, REQUEST), "3", "more than one request"),
        ((), "3", "no request"),
        ((b"\0\xff\xff\xff\xff",), "8", "larger than the limit"),
        ((b"\1\0\0\0\5xxxxx",), "12", "compressed"),
        ((frame_message(b"\x0a" * 50),), "3", "no valid message"),
        ((frame_message(b"\x0a\xff\xff\xff\xff\x0f"),), "3", "no valid message"),
    ],
)
async def test_a_wrong_request_fails_alone(data: tuple[bytes, ...], status: str, text: str) -> None:
    async with serving(HANDLERS) as (_, port), connected(port) as peer:
        headers, _ = await answer_of(peer, *data)
        good = await answer_of(peer, REQUEST)

    assert (headers[":status"], headers["grpc-status"]) == ("200", status)
    assert text in headers["grpc-message"]
    assert (good[0]["grpc-status"], good[1]) == ("0", RESPONSE)


async def test_messages_after_the_end_of_a_bidi_call_are_dropped() -> None:
    received = []

    def telemetry(call: Call) -> None:
        def on_message(command: Any) -> None:
            received.append(command.status.message)
            call.finish()

        call.on_message = on_message

    messages = [M.TelemetryCommand(status=M.Status(message=text)) for text in ("one", "two")]
    data = b"".join(frame_message(each.SerializeToString()) for each in messages)
    handlers: dict[str, Any] = {"SendMessage": echo, "Telemetry": telemetry}
    async with serving(handlers) as (_, port), connected(port) as peer:
        headers, _ = await answer_of(peer, data, path=TELEMETRY, end=False)
        await answer_of(peer, REQUEST)

    assert headers["grpc-status"] == "0"
    assert received == ["one"]


async def test_a_gzip_bomb_is_not_decompressed() -> None:
    bomb = gzip.compress(bytes(64 * MIB))
    async with serving(HANDLERS) as (_, port), connected(port) as peer:
        headers, _ = await answer_of(
            peer, b"\1" + len(bomb).to_bytes(4, "big") + bomb[:10_000], grpc_encoding="gzip"
        )

    assert (headers["grpc-status"], headers["grpc-accept-encoding"]) == ("12", "identity")


async def test_a_wrong_timeout_fails_the_call() -> None:
    async with serving(HANDLERS) as (_, port), connected(port) as peer:
        headers, _ = await answer_of(peer, REQUEST, grpc_timeout="soon")

    assert headers["grpc-status"] == "13"
    assert "grpc-timeout" in headers["grpc-message"]


async def test_requests_that_are_not_grpc_learn_what_the_port_is() -> None:
    async with serving(HANDLERS) as (_, port), connected(port) as peer:
        get = await answer_of(peer, path="/", __method="GET", content_type="text/html")
        post = await answer_of(peer, b"{}", content_type="application/json")

    assert (get[0][":status"], post[0][":status"]) == ("404", "415")
    assert b"gRPC API of RocketMQ" in get[1]
    assert get[1] == post[1]


async def test_an_http_1_request_learns_what_the_port_is() -> None:
    async with serving(HANDLERS) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert b"gRPC API of RocketMQ" in answer


async def test_bytes_of_another_protocol_close_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(HANDLERS) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\0\0\1\0{}" * 10)
        await reader.read()
        writer.close()
        await until(lambda: not server.connections)

    assert "closing the connection of 127.0.0.1" in caplog.text


# -- incomplete requests


async def test_incomplete_requests_of_a_connection_are_bounded() -> None:
    """Ten streams send requests without their last byte; four of the largest size fit."""
    size = 100_000
    async with serving(HANDLERS, limits=Limits(max_frame=size)) as (server, port), connected(port) as peer:
        almost = frame_message(bytes(size))[:-1]
        streams = []
        for _ in range(10):
            streams.append(peer.request(end=False))
            for at in range(0, len(almost), 10_000):
                while peer.http.local_flow_control_window(streams[-1]) < 10_000:
                    peer.send()
                    await peer.read()
                peer.http.send_data(streams[-1], almost[at : at + 10_000])
        peer.send()
        headers, _ = await peer.response(streams[4])

        (connection,) = server.connections
        kept = connection.calls.buffered

    assert headers["grpc-status"] == "8"
    assert kept <= 4 * size


async def test_a_complete_message_without_the_end_of_its_request_counts_too() -> None:
    async with serving(HANDLERS) as (server, port), connected(port) as peer:
        stream = peer.request(REQUEST, end=False)
        peer.send()
        await until(lambda: any(each.calls.buffered for each in server.connections))
        (connection,) = server.connections
        kept = connection.calls.buffered
        peer.http.end_stream(stream)
        peer.send()
        headers, _ = await peer.response(stream)

    assert kept == len(REQUEST) - 5
    assert headers["grpc-status"] == "0"
    assert connection.calls.buffered == 0


async def test_incomplete_requests_of_all_connections_are_bounded() -> None:
    """Above the limit, the connection that has kept bytes for the longest time is cut."""
    part = frame_message(bytes(100_000))[:10_000]
    async with (
        serving(HANDLERS, limits=Limits(partial_total=150_000)) as (server, port),
        connected(port) as first,
        connected(port) as second,
        connected(port) as third,
    ):
        for number, peer in enumerate((first, second, third), 1):
            peer.request(part, *(bytes(10_000) for _ in range(5)), end=False)
            peer.send()
            if peer is not third:
                await until(partial(buffered_in_all, server, number * 60_000))
        await first.closed()
        headers, _ = await answer_of(second, REQUEST)

    assert headers["grpc-status"] == "0"


def buffered_in_all(server: GrpcServer, size: int) -> bool:
    return sum(each.calls.buffered for each in server.connections) == size


async def test_a_request_that_takes_too_long_is_ended() -> None:
    limits = Limits(frame_grace_s=0.05)
    async with serving(HANDLERS, limits=limits, scan_s=0.05) as (_, port), connected(port) as peer:
        idle = peer.request(end=False, path=TELEMETRY)
        begun = peer.request(REQUEST[:7], end=False, path=TELEMETRY)
        nothing = peer.request(end=False)
        peer.send()
        answers = [await peer.response(stream) for stream in (begun, nothing)]
        peer.http.reset_stream(idle)  # raises an error if the server has ended it

    assert [headers["grpc-status"] for headers, _ in answers] == ["4", "4"]


# -- responses that are not read


async def test_responses_that_are_not_read_are_bounded_for_each_connection() -> None:
    def big(call: Call, request: Any) -> Any:
        return M.SendMessageResponse(status=M.Status(message="x" * MIB))

    limits = Limits(write_evict=4 * MIB)
    async with serving({"SendMessage": big}, limits=limits) as (server, port):
        async with connected(port) as peer:
            peer.reads_data = False
            for _ in range(20):
                peer.request(REQUEST)
            peer.send()
            await peer.closed()
        await until(lambda: not server.connections)
        async with client(port) as other:
            assert len((await other.send(sending())).status.message) == MIB


async def test_responses_that_are_not_read_are_bounded_in_all() -> None:
    """Above the limit, the connection whose responses have waited for the longest time is cut."""
    calls: list[Call] = []
    async with (
        serving({"Telemetry": calls.append}, limits=Limits(write_total=MIB)) as (_, port),
        connected(port) as first,
        connected(port) as second,
    ):
        for number, peer in enumerate((first, second), 1):
            await open_stream(peer, calls, number)
            calls[-1].send(bytes(700_000))
        waiting = calls[-1].unsent
        await first.closed()
        await until(lambda: calls[0].ended)

    assert waiting == 700_005 - 65_535


async def open_stream(peer: Peer, calls: list[Call], number: int = 1) -> None:
    """Begin a bidi call of a client that will not read its responses; it becomes `calls[number - 1]`."""
    peer.reads_data = False
    peer.request(end=False, path=TELEMETRY)
    peer.send()
    await until(lambda: len(calls) == number)


async def test_a_client_that_receives_nothing_for_long_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Call] = []
    limits = Limits(write_low=100_000, write_stall_s=0.1)
    async with (
        serving({"Telemetry": calls.append}, limits=limits, scan_s=0.05) as (_, port),
        connected(port) as peer,
    ):
        await open_stream(peer, calls)
        calls[0].send(bytes(300_000))
        await peer.closed()

    assert "no response received for" in caplog.text


async def test_a_stream_that_is_not_read_does_not_hold_up_others() -> None:
    calls: list[Call] = []
    handlers: dict[str, Any] = {"SendMessage": echo, "Telemetry": calls.append}
    async with serving(handlers) as (_, port), connected(port) as peer:
        peer.http.increment_flow_control_window(MIB)
        await open_stream(peer, calls)
        calls[0].send(bytes(200_000))
        headers, data = await answer_of(peer, REQUEST)

    assert (headers["grpc-status"], data) == ("0", RESPONSE)


# -- large requests in progress, idle connections


async def test_reading_pauses_while_large_requests_are_handled() -> None:
    limits = Limits(max_frame=100_000)
    release = asyncio.Event()
    begun = []

    async def slow(call: Call, request: Any) -> Any:
        begun.append(call)
        await release.wait()
        return stored(request.messages[0].body)

    async with serving({"SendMessage": slow}, limits=limits) as (server, port), client(port) as c:
        calls = [asyncio.ensure_future(c.send(sending(b"x" * 90_000))) for _ in range(20)]
        await until(lambda: len(begun) >= 2)
        for _ in range(20):
            await asyncio.sleep(0.001)
        (connection,) = server.connections
        handled = connection.calls.handled
        release.set()
        responses = await asyncio.gather(*calls)

    assert handled < 4 * 100_000
    assert [each.entries[0].message_id for each in responses] == ["90000"] * 20
    assert connection.calls.handled == 0


async def test_an_idle_connection_is_closed_unless_it_has_streams_or_sends_pings() -> None:
    async with (
        serving(HANDLERS, limits=Limits(idle_s=0.3), scan_s=0.05) as (_, port),
        connected(port) as idle,
        connected(port) as streaming,
        connected(port) as pinging,
    ):
        streaming.request(end=False, path=TELEMETRY)
        streaming.send()
        closed = asyncio.create_task(idle.closed())
        while not closed.done():
            pinging.http.ping(b"12345678")
            pinging.send()
            assert await pinging.read()
            await asyncio.sleep(0.02)
        answers = [await answer_of(peer, REQUEST) for peer in (streaming, pinging)]

    assert [headers["grpc-status"] for headers, _ in answers] == ["0", "0"]
    assert [type(event).__name__ for event in idle.events].count("ConnectionTerminated") == 2


async def test_many_calls_of_one_connection_do_not_starve_another() -> None:
    """Each call takes all the time of a read callback, so the callback ends after its first 16 KiB."""
    order: list[str] = []

    def slow(call: Call, request: Any) -> Any:
        order.append(call.text(b"x-mq-client-id"))
        until_time = time.monotonic() + 0.001
        while time.monotonic() < until_time:
            pass
        return stored(b"")

    large = frame_message(sending(bytes(1000)).SerializeToString())
    async with (
        serving({"SendMessage": slow}, limits=Limits(callback_s=0.001)) as (_, port),
        connected(port) as busy,
        connected(port) as other,
    ):
        streams = [busy.request(large, x_mq_client_id="busy") for _ in range(60)]
        last = other.request(REQUEST, x_mq_client_id="other")
        busy.send()
        other.send()
        await other.response(last)
        await busy.response(streams[-1])

    assert order.count("busy") == 60
    assert order.index("other") < 40


async def test_the_output_of_one_iteration_of_the_loop_is_one_write() -> None:
    """Ten calls that arrive in one read are answered by one flush. Others are of the client's settings."""
    flushes = []

    class Counting(Tick):
        def mark_dirty(self, connection: Any) -> None:
            flushes.append(connection)
            super().mark_dirty(connection)

    async with serving(HANDLERS, tick=Counting()) as (_, port), connected(port) as peer:
        await answer_of(peer, REQUEST)
        flushes.clear()
        streams = [peer.request(REQUEST) for _ in range(10)]
        peer.send()
        for stream in streams:
            assert (await peer.response(stream))[1] == RESPONSE

    assert len(flushes) <= 3


@pytest.mark.timeout(3600)
async def test_hostile_frames_leave_memory_flat_and_others_served() -> None:
    """Each connection sends until it is closed. Between them, a witness calls, and is answered at once."""
    chance, resident, calls = random.Random(6210), [], []

    def counting(call: Call, request: Any) -> Any:
        calls.append(call)
        return echo(call, request)

    async with serving({**HANDLERS, "SendMessage": counting}) as (server, port), connected(port) as witness:
        for half in [(2_000_000 if LONG else 20_000) // 2] * 2:
            sent = 0
            while sent < half:
                sent += await hostile_connection(port, chance)
                headers, data = await answer_of(witness, REQUEST)
                assert (headers["grpc-status"], data) == ("0", RESPONSE)
                witness.events.clear()
            assert len(calls) > sent // 10, "few hostile connections had a call answered"
            calls.clear()
            await until(lambda: len(server.connections) == 1)
            gc.collect()
            resident.append(psutil.Process().memory_info().rss)

    assert resident[1] - resident[0] < 16 * MIB


def _call_or_hostile_frame(chance: random.Random, number: int) -> bytes:
    if chance.random() < 0.1:
        return hostile_frame(chance, number)
    stream = 2 * number + 1
    headers = frames.frame(frames.HEADERS, 4, stream, hpack.encode(HEADERS))
    return headers + frames.frame(frames.DATA, 1, stream, REQUEST)


async def hostile_connection(port: int, chance: random.Random) -> int:
    """Send frames, in lots, until the server closes the connection. Return their number."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def read() -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass

    reading, number = asyncio.ensure_future(read()), 0
    with contextlib.suppress(ConnectionError):
        writer.write(frames.PREFACE + frames.settings({}))
        while not reading.done():
            lot = range(number, number := number + chance.randint(1, 10))
            writer.write(b"".join(_call_or_hostile_frame(chance, each) for each in lot))
            await writer.drain()
            await asyncio.sleep(0)
    writer.transport.abort()
    await reading
    return number
