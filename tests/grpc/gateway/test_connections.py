"""HTTP clients at the gRPC port: HTTP/1.1 with and without TLS, HTTP/2, curl, hostile clients."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import sys
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace
from tests.grpc.gateway.conftest import port_of
from tests.grpc.serving import serving
from tests.grpc.test_self_signed import careless
from tests.kit.waiting import until

from cometmq.grpc.gateway.exchange import HttpCall, Response
from cometmq.grpc.gateway.gateway import Gateway
from cometmq.grpc.http1.connection import MAX_HEAD_BYTES
from cometmq.remoting import Limits

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
UP = b'{"status":"up"}'


async def opened(port: int, tls: ssl.SSLContext | None = None) -> Any:
    return await asyncio.open_connection("127.0.0.1", port, ssl=tls)


async def response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read one response, and return its status and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split()[1])
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return status, await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""


async def test_pipelined_requests_are_answered_in_order(cluster):
    reader, writer = await opened(port_of(cluster))
    count = 300
    send = b"POST /v1/topics/Orders/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n"
    writer.write(b"".join(send + b"x" + GET for _ in range(count)))
    for _ in range(count):
        status, body = await response(reader)
        assert (status, set(json.loads(body))) == (200, {"message_id", "queue", "offset"})
        assert await response(reader) == (200, UP)
    writer.close()


async def test_a_request_may_arrive_byte_by_byte_and_in_chunks(cluster):
    reader, writer = await opened(port_of(cluster))
    head = b"POST /v1/topics/Orders/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    for byte in head + b"3\r\nabc\r\n0\r\n\r\n":
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0)
    assert (await response(reader))[0] == 200
    writer.close()


async def test_an_endless_chunked_body_is_refused(cluster):
    reader, writer = await opened(port_of(cluster))
    writer.write(b"POST /v1/topics/Orders/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n%s\r\n" % (1 << 20, b"x" * (1 << 20))
    for _ in range(17):
        writer.write(chunk)
        await writer.drain()
    status, body = await response(reader)
    assert (status, json.loads(body)["field"]) == (413, "body")
    try:
        while True:
            writer.write(chunk)
            await writer.drain()
    except ConnectionError:
        pass  # the server stops reading the request


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * MAX_HEAD_BYTES, 431),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET http://x/healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (
            b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Type: application/grpc\r\nContent-Length: 0\r\n"
            b"Connection: close\r\n\r\n",
            404,
        ),
    ],
)
async def test_a_hostile_request_has_a_status_and_the_connection_ends(cluster, data, status):
    reader, writer = await opened(port_of(cluster))
    writer.write(data)
    assert (await response(reader))[0] == status
    assert await reader.read() == b""
    writer.close()


async def test_a_client_that_reads_no_responses_is_not_read_and_then_cut() -> None:
    handled = 0

    def answer(call: HttpCall, _body: bytes) -> None:
        nonlocal handled
        handled += 1
        call.answer(Response(200, (), b"x" * 65536))

    method = replace(Gateway(cast(Any, None), {}).method(), handler=answer)
    limits = Limits(write_high=100_000, write_low=50_000, write_stall_s=0.2)
    async with serving({}, gateway=lambda _: method, limits=limits, scan_s=0.05) as (server, port):
        _, writer = await opened(port)
        writer.write(GET * 5000)
        await until(lambda: server.connections)
        await until(lambda: not server.connections)
        writer.close()

    assert handled < 1000  # requests whose responses fill the socket buffers, and a few more


async def test_both_versions_of_http_inside_tls(cluster):
    tls = careless()
    tls.set_alpn_protocols(["http/1.1"])
    reader, writer = await opened(port_of(cluster), tls)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    writer.write(GET)
    assert await response(reader) == (200, UP)
    writer.close()
    base = f"https://127.0.0.1:{port_of(cluster)}"
    async with httpx.AsyncClient(http1=False, http2=True, verify=False, trust_env=False) as web:
        answer = await web.post(f"{base}/v1/topics/Orders/messages", content=b"x")
    assert (answer.http_version, answer.status_code) == ("HTTP/2", 200)


async def test_http2_without_tls_is_served_on_a_connection_of_grpc(cluster):
    base = f"http://127.0.0.1:{port_of(cluster)}"
    async with httpx.AsyncClient(http1=False, http2=True, trust_env=False) as web:
        sent = [web.post(f"{base}/v1/topics/Orders/messages", content=b"x" * 100_000) for _ in range(20)]
        assert {each.status_code for each in await asyncio.gather(*sent)} == {200}
        head = await web.head(f"{base}/healthz")
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(UP)))


async def test_without_h11_the_answer_names_the_extra(cluster, monkeypatch):
    monkeypatch.setitem(sys.modules, "cometmq.grpc.http1.connection", None)
    reader, writer = await opened(port_of(cluster))
    writer.write(GET)
    status, body = await response(reader)
    assert status == 501
    assert b"pip install 'cometmq[http]'" in body
    assert await reader.read() == b""
    writer.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge", "--http2"])
async def test_curl(cluster, version):
    address = f"http://127.0.0.1:{port_of(cluster)}/v1/topics/Orders"
    sent = json.loads(await curl(version, "-d", "hello", "-H", "X-Mq-Keys: o1", f"{address}/messages"))
    found = json.loads(await curl(version, "-X", "POST", f"{address}/groups/G/messages?max=5&wait=20"))
    (message,) = found["messages"]
    assert (message["message_id"], message["keys"]) == (sent["message_id"], ["o1"])
    acked = await curl(version, "-d", json.dumps({"handles": [message["handle"]]}), f"{address}/groups/G/ack")
    assert json.loads(acked)["results"][0]["code"] == "OK"
    large = await curl(version, "--data-binary", "@-", f"{address}/messages", stdin=b"x" * (3 << 20))
    assert "message_id" in json.loads(large)


async def curl(*arguments: str, stdin: bytes = b"") -> str:
    command = ["curl", "-sS", "--fail-with-body", *arguments]
    done = await asyncio.to_thread(subprocess.run, command, input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout.decode()
