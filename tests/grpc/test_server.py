"""The gRPC endpoint with grpcio as its client: kinds of calls, deadlines, cancellation, errors, TLS, stop."""

from __future__ import annotations

import asyncio
import inspect
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.certificates import Certificates
from tests.grpc.serving import Client, M, client, connected, sending, serving, stored
from tests.kit.waiting import until

from cometmq.grpc.rpc.calls import Call, frame_message
from cometmq.grpc.rpc.enums import Code
from cometmq.grpc.rpc.messages import SERVICE
from cometmq.grpc.rpc.status import GrpcStatus, RpcError, ServiceError
from cometmq.remoting import Limits, TlsFile
from cometmq.remoting.tls import ServerTls

MIB = 1024 * 1024


def echo(call: Call, request: Any) -> Any:
    return stored(request.messages[0].body)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """Return the error with which a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_unary_call_gets_its_response() -> None:
    async with serving({"SendMessage": echo}) as (_, port), client(port) as c:
        response = await c.send(sending(b"hello"))

    assert response == stored(b"hello")


async def test_200_concurrent_calls_get_their_own_responses() -> None:
    async with serving({"SendMessage": echo}) as (_, port), client(port) as c:
        responses = await asyncio.gather(*(c.send(sending(b"x" * size)) for size in range(1, 201)))

    assert [each.entries[0].message_id for each in responses] == [str(size) for size in range(1, 201)]


async def test_bodies_of_4_mib_pass_in_both_directions() -> None:
    body = bytes(range(256)) * (4 * MIB // 256)

    def receive(call: Call, request: Any) -> Any:
        return M.ReceiveMessageResponse(message=M.Message(body=body))

    async with serving({"SendMessage": echo, "ReceiveMessage": receive}) as (_, port), client(port) as c:
        sends = await asyncio.gather(*(c.send(sending(body)) for _ in range(8)))
        received = [each async for each in c.receive(M.ReceiveMessageRequest())]

    assert [each.entries[0].message_id for each in sends] == [str(len(body))] * 8
    assert [each.message.body == body for each in received] == [True]


async def test_a_server_stream_sends_messages_until_it_is_finished() -> None:
    def receive(call: Call, request: Any) -> None:
        loop = asyncio.get_running_loop()

        def later() -> None:
            for number in range(request.batch_size):
                message = M.Message(body=b"%d" % number)
                call.send(M.ReceiveMessageResponse(message=message).SerializeToString())
            call.finish()

        loop.call_soon(later)

    async with serving({"ReceiveMessage": receive}) as (_, port), client(port) as c:
        received = [each async for each in c.receive(M.ReceiveMessageRequest(batch_size=32))]

    assert [each.message.body for each in received] == [b"%d" % number for number in range(32)]


async def test_an_async_handler_ends_its_stream_when_it_returns() -> None:
    async def receive(call: Call, request: Any) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            call.send(M.ReceiveMessageResponse(message=M.Message(body=b"m")).SerializeToString())

    async with serving({"ReceiveMessage": receive}) as (_, port), client(port) as c:
        received = [each async for each in c.receive(M.ReceiveMessageRequest())]

    assert len(received) == 3


async def test_a_bidi_stream_carries_messages_both_ways_until_the_client_ends_it() -> None:
    def telemetry(call: Call) -> None:
        def on_message(command: Any) -> None:
            call.send(M.TelemetryCommand(status=M.Status(message=command.status.message)).SerializeToString())

        call.on_message = on_message
        call.on_half_close = call.finish

    async with serving({"Telemetry": telemetry}) as (_, port), client(port) as c:
        stream = c.telemetry()
        echoed = []
        for text in ("one", "two", "three"):
            await stream.write(M.TelemetryCommand(status=M.Status(message=text)))
            echoed.append((await stream.read()).status.message)
        await stream.done_writing()
        end = await stream.read()

    assert echoed == ["one", "two", "three"]
    assert end is grpc.aio.EOF


async def test_a_handler_reads_metadata_and_deadline() -> None:
    seen = []

    def handler(call: Call, request: Any) -> Any:
        assert call.deadline is not None
        seen.append((call.text(b"x-mq-client-id"), call.text(b"x-mq-none"), call.deadline - call.begun))
        return stored(b"")

    async with serving({"SendMessage": handler}) as (_, port), client(port) as c:
        await c.send(sending(), metadata=[("x-mq-client-id", "host@1")], timeout=50)

    assert [each[:2] for each in seen] == [("host@1", "")]
    assert 40 < seen[0][2] < 51  # grpcio rounds what is left up to tenths of a second


async def test_a_call_that_its_client_cancels_cancels_the_handler() -> None:
    cancelled: list[str] = []
    seen = []
    begun = asyncio.Event()

    def stream(call: Call, request: Any) -> None:
        call.on_cancel = lambda: cancelled.append("stream")
        begun.set()

    async def unary(call: Call, request: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("task")

    handlers: dict[str, Any] = {"ReceiveMessage": stream, "SendMessage": unary}
    async with serving(handlers) as (_, port), client(port) as c:
        for start in (lambda: c.receive(M.ReceiveMessageRequest()), lambda: c.send(sending())):
            call = start()
            await until(begun.is_set)
            begun.clear()
            call.cancel()
            await until(lambda: bool(cancelled))
            seen.append(cancelled.pop())

    assert (seen, cancelled) == (["stream", "task"], [])


async def test_a_call_that_is_reset_in_the_packet_of_its_request_leaves_no_coroutine() -> None:
    handlers: list[Any] = []

    async def handle() -> None:
        raise AssertionError("the handler has run")

    def send(call: Call, request: Any) -> Any:
        handlers.append(handle())
        return handlers[0]

    async with serving({"SendMessage": send}) as (_, port), connected(port) as peer:
        stream = peer.request(frame_message(sending().SerializeToString()))
        peer.http.reset_stream(stream)
        peer.send()
        await until(lambda: handlers and inspect.getcoroutinestate(handlers[0]) == inspect.CORO_CLOSED)


async def test_a_lost_connection_cancels_its_calls() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()
    closed = []

    def telemetry(call: Call) -> None:
        call.on_cancel = cancelled.set
        begun.set()

    async with serving({"Telemetry": telemetry}, on_close=closed.append) as (server, port):
        async with connected(port) as peer:
            peer.request(path=f"/{SERVICE}/Telemetry", end=False)
            peer.send()
            await begun.wait()
        await cancelled.wait()

        await until(lambda: closed and not server.connections)


async def test_the_server_ends_calls_whose_deadline_has_passed() -> None:
    """The client here waits for a longer time than it says, which no gRPC client does by itself."""
    async with (
        serving({"SendMessage": lambda call, request: None}, scan_s=0.05) as (_, port),
        client(port) as c,
    ):
        error = await failure(c.send(sending(), metadata=[("grpc-timeout", "50m")]))

    assert (error.code(), error.details()) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "the server has not responded in time",
    )


@pytest.mark.parametrize(
    ("raised", "status", "text"),
    [
        (RpcError(GrpcStatus.UNAUTHENTICATED, "100 % wrong: é\n"), "UNAUTHENTICATED", "100 % wrong: é\n"),
        (ValueError("a bug"), "INTERNAL", "ValueError: a bug"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_exception_of_a_handler_is_the_status_of_the_call(
    caplog: pytest.LogCaptureFixture, raised: Exception, status: str, text: str, is_async: bool
) -> None:
    def handler(call: Call, request: Any) -> Any:
        raise raised

    async def async_handler(call: Call, request: Any) -> Any:
        raise raised

    caplog.set_level(logging.ERROR)
    async with (
        serving({"SendMessage": async_handler if is_async else handler}) as (_, port),
        client(port) as c,
    ):
        error = await failure(c.send(sending()))

    assert (error.code().name, error.details()) == (status, text)
    assert [each.getMessage().split(" from ")[0] for each in caplog.records] == (
        ["SendMessage"] if status == "INTERNAL" else []
    )


async def test_exceptions_of_handlers_are_logged_at_a_limited_rate(caplog: pytest.LogCaptureFixture) -> None:
    def handler(call: Call, request: Any) -> Any:
        raise KeyError("bug")

    async with serving({"SendMessage": handler}) as (_, port), client(port) as c:
        errors = await asyncio.gather(*(failure(c.send(sending())) for _ in range(100)))

    assert {each.code() for each in errors} == {grpc.StatusCode.INTERNAL}
    assert 1 <= len(caplog.records) < 100


async def test_an_exception_in_a_callback_ends_the_stream() -> None:
    ended = []

    def telemetry(call: Call) -> None:
        def on_message(command: Any) -> None:
            raise KeyError("bug")

        call.on_message = on_message
        call.on_cancel = lambda: ended.append(call.ended)

    async with serving({"Telemetry": telemetry}) as (_, port), client(port) as c:
        stream = c.telemetry()
        await stream.write(M.TelemetryCommand())
        error = await failure(stream.read())

    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "KeyError: 'bug'")
    assert ended == [True]


async def test_a_service_error_is_a_response_with_its_status() -> None:
    def handler(call: Call, request: Any) -> Any:
        raise ServiceError(Code.TOPIC_NOT_FOUND, "no topic Orders")

    handlers: dict[str, Any] = {"SendMessage": handler, "ReceiveMessage": handler}
    async with serving(handlers) as (_, port), client(port) as c:
        response = await c.send(sending())
        received = [each async for each in c.receive(M.ReceiveMessageRequest())]

    status = M.Status(code=40402, message="no topic Orders")
    assert response.status == status
    assert [each.status for each in received] == [status]


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving({"SendMessage": echo}) as (_, port), client(port) as c:
        error = await failure(c.unary("AckMessage")(b""))

    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details() == "there is no method /apache.rocketmq.v2.MessagingService/AckMessage"


async def test_bytes_that_are_no_message_are_an_invalid_argument(caplog: pytest.LogCaptureFixture) -> None:
    async with serving({"SendMessage": echo}) as (_, port), client(port) as c:
        error = await failure(c.send(b"\xff\xff\xff"))

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "a request of SendMessage is no valid message" in str(error.details())
    assert caplog.records == []


async def test_a_request_above_the_limit_exhausts_a_resource() -> None:
    async with serving({"SendMessage": echo}, limits=Limits(max_frame=1000)) as (_, port), client(port) as c:
        error = await failure(c.send(sending(b"x" * 2000)))
        response = await c.send(sending(b"x" * 900))

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than the limit of 1000 bytes" in str(error.details())
    assert response == stored(b"x" * 900)


async def test_a_compressed_request_is_refused_without_decompression() -> None:
    async with serving({"SendMessage": echo}) as (_, port), client(port) as c:
        error = await failure(c.send(sending(bytes(4 * MIB)), compression=grpc.Compression.Gzip))

    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "compressed" in str(error.details())


# -- TLS


def certificate(tmp_path: Path, mode: str) -> tuple[ServerTls, grpc.ChannelCredentials]:
    files = Certificates(tmp_path)
    tls = ServerTls(mode, TlsFile(str(files.file)))
    return tls, grpc.ssl_channel_credentials(files.ca.read_bytes())


async def test_tls_and_plain_clients_share_a_port(tmp_path: Path) -> None:
    tls, credentials = certificate(tmp_path, "permissive")
    async with (
        serving({"SendMessage": echo}, tls=tls) as (_, port),
        client(port) as plain,
        client(port, credentials) as secure,
    ):
        responses = [await each.send(sending(b"hello" * 100_000)) for each in (plain, secure)]

    assert [each.entries[0].message_id for each in responses] == ["500000"] * 2


async def test_an_enforcing_server_refuses_plain_clients(tmp_path: Path) -> None:
    tls, credentials = certificate(tmp_path, "enforcing")
    async with (
        serving({"SendMessage": echo}, tls=tls) as (_, port),
        client(port) as plain,
        client(port, credentials) as secure,
    ):
        error = await failure(plain.send(sending()))
        response = await secure.send(sending())

    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert response == stored(b"x")


async def test_a_tls_client_of_a_server_without_tls_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, credentials = certificate(tmp_path, "permissive")
    async with serving({"SendMessage": echo}) as (_, port), client(port, credentials) as c:
        error = await failure(c.send(sending()))

    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "it uses TLS, which tls.server.mode=disabled switches off" in caplog.text


async def test_a_tls_handshake_selects_http2(tmp_path: Path) -> None:
    tls, _ = certificate(tmp_path, "permissive")
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with serving({}, tls=tls) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        selected = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        writer.close()

    assert selected == "h2"


# -- stop


async def begun_calls(server: Any, c: Client, stream: bool) -> tuple[Any, Any]:
    """Start a unary call and a stream of a client, and wait until the server handles them."""
    calls = c.send(sending()), c.telemetry() if stream else None
    await until(lambda: sum(len(each.calls) for each in server.connections) == 1 + stream)
    return calls


async def test_a_stop_waits_for_unary_calls_and_ends_streams() -> None:
    release = asyncio.Event()

    async def slow(call: Call, request: Any) -> Any:
        await release.wait()
        return stored(b"done")

    handlers: dict[str, Any] = {"SendMessage": slow, "Telemetry": lambda call: None}
    async with serving(handlers) as (server, port), client(port) as c:
        unary, stream = await begun_calls(server, c, stream=True)
        stopping = asyncio.create_task(server.stop(drain_s=60))
        error = await failure(stream.read())
        release.set()
        response = await unary
        await stopping

    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the server is stopping")
    assert response == stored(b"done")


async def test_a_stop_ends_unary_calls_that_take_too_long() -> None:
    async def endless(call: Call, request: Any) -> Any:
        await asyncio.Event().wait()

    async with serving({"SendMessage": endless}) as (server, port), client(port) as c:
        unary, _ = await begun_calls(server, c, stream=False)
        await server.stop(drain_s=0.01)
        error = await failure(unary)

    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert server.connections == set()


# -- proxies

PROXY_LINE = b"PROXY TCP4 203.0.113.7 10.0.0.2 4711 8081\r\n"


def recording(peers: list[str]) -> dict[str, Any]:
    """Return handlers that record the addresses of their clients."""

    def handler(call: Call, request: Any) -> Any:
        peers.append(call.connection.peer)
        return stored(b"")

    return {"SendMessage": handler}


@pytest.mark.parametrize("split", [len(PROXY_LINE), 3])
async def test_a_proxy_names_its_client(split: int) -> None:
    peers: list[str] = []
    async with (
        serving(recording(peers), is_proxy=lambda _: True) as (_, port),
        connected(port) as direct,
        connected(port, PROXY_LINE[:split], PROXY_LINE[split:]) as proxied,
    ):
        for peer in (direct, proxied):
            stream = peer.request(frame_message(sending().SerializeToString()))
            peer.send()
            await peer.response(stream)

    assert peers[0].startswith("127.0.0.1:")
    assert peers[1] == "203.0.113.7:4711"


async def test_a_client_of_a_server_without_proxies_cannot_name_an_address() -> None:
    peers: list[str] = []
    async with serving(recording(peers)) as (_, port), connected(port, PROXY_LINE) as peer:
        await peer.closed()

    assert peers == []


async def test_a_proxy_names_the_client_of_a_tls_connection(tmp_path: Path) -> None:
    peers: list[str] = []
    tls, credentials = certificate(tmp_path, "enforcing")
    async with (
        serving(recording(peers), tls=tls, is_proxy=lambda _: True) as (_, port),
        proxy(port) as at,
        client(at, credentials) as c,
    ):
        await c.send(sending())

    assert peers == ["203.0.113.7:4711"]


@asynccontextmanager
async def proxy(port: int) -> AsyncIterator[int]:
    """Run a proxy in front of a port. The value is its own port."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        server_writer.write(PROXY_LINE)
        await asyncio.gather(pipe(reader, server_writer), pipe(server_reader, writer))

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    listener = await asyncio.start_server(connect, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


async def test_a_wrong_proxy_header_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving({}, is_proxy=lambda _: True) as (_, port), connected(port, b"PROXY \r\n") as peer:
        await peer.closed()

    assert "a PROXY line is invalid" in caplog.text
