"""TLS on the port of plain connections: the first byte distinguishes them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates
from tests.kit.raw_peer import RawPeer, raw_frame
from tests.kit.waiting import until

from cometmq.errors import ConfigError, ConnectError, RemotingError
from cometmq.protocol.frame import Frame
from cometmq.remoting import (
    Connection,
    Limits,
    Openings,
    RemotingClient,
    RemotingServer,
    TlsFile,
    client_tls,
    server_tls,
)

ECHO = 7


def echo(_connection: Connection, frame: Frame) -> Frame:
    return frame.response(body=bytes(frame.body))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certificates")


@contextlib.asynccontextmanager
async def serving(path: Path, mode: str = "", **limits: Any) -> AsyncIterator[tuple[RemotingServer, int]]:
    tls = await server_tls(mode, str(path))
    server = RemotingServer({ECHO: echo}, tls=tls, limits=Limits(**limits))
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.stop()


async def ask(port: int, context: ssl.SSLContext | None, body: bytes = b"hello") -> bytes:
    client = RemotingClient(ssl_context=context)
    try:
        answer = await client.call(f"127.0.0.1:{port}", Frame.request(ECHO, None, body), 10.0)
        return bytes(answer.body)
    finally:
        await client.close()


async def still_serves(certificates: Certificates, port: int) -> None:
    """Ask until there is an answer: on a busy machine a handshake may exceed the short limit of a test."""

    async def answers() -> bool:
        with contextlib.suppress(RemotingError):
            return await ask(port, client_tls(certificates.file)) == b"hello"
        return False

    await until(answers, "the server answers over TLS")


async def test_one_port_takes_both(certificates: Certificates) -> None:
    context = client_tls(str(certificates.file))
    large = bytes(range(256)) * 16_384  # 4 MiB
    async with serving(certificates.file) as (_server, port):
        for body in (b"hello", b"", large):
            assert await ask(port, context, body) == body
            assert await ask(port, None, body) == body


async def test_many_requests_go_over_one_secure_connection(certificates: Certificates) -> None:
    async with serving(certificates.file) as (server, port):
        client = RemotingClient(ssl_context=client_tls(certificates.file))
        bodies = [b"%d" % number * 1000 for number in range(200)]
        calls = [client.call(f"127.0.0.1:{port}", Frame.request(ECHO, None, body)) for body in bodies]
        assert [bytes(answer.body) for answer in await asyncio.gather(*calls)] == bodies
        (connection,) = server.connections
        assert connection.peer.startswith("127.0.0.1:")
        await client.close()


@pytest.mark.parametrize("parts", [1, 3, 50])
async def test_a_plain_frame_may_come_in_pieces(certificates: Certificates, parts: int) -> None:
    frame = raw_frame(ECHO, 5, b"x" * 20_000)
    async with serving(certificates.file) as (_server, port):
        peer = await RawPeer.connect(port)
        size = len(frame) // parts
        for at in range(0, len(frame), size):
            await peer.send(frame[at : at + size])
            await asyncio.sleep(0)
        header, body = await peer.read()
        assert (header["opaque"], body) == (5, b"x" * 20_000)
        peer.writer.close()


async def test_a_hello_may_come_byte_by_byte(certificates: Certificates) -> None:
    """The output of the client's TLS is sent in small pieces."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = client_tls(str(certificates.file))
    assert context is not None
    tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    async with serving(certificates.file) as (_server, port):
        peer = await RawPeer.connect(port)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                hello = outgoing.read()
                for at in range(0, len(hello), 97):
                    await peer.send(hello[at : at + 97])
                    await asyncio.sleep(0.001)
                incoming.write(await asyncio.wait_for(peer.reader.read(65_536), 10))
        tls.write(raw_frame(ECHO, 9, b"secure"))
        await peer.send(outgoing.read())  # the end of the handshake together with the request
        answer = b""
        while not answer.endswith(b"secure"):
            incoming.write(await asyncio.wait_for(peer.reader.read(65_536), 10))
            with contextlib.suppress(ssl.SSLWantReadError):
                answer += tls.read(65_536)
        peer.writer.close()


async def test_an_enforcing_server_refuses_what_is_plain(certificates: Certificates) -> None:
    async with serving(certificates.file, "enforcing") as (_server, port):
        assert await ask(port, client_tls(certificates.file)) == b"hello"
        with pytest.raises(RemotingError):
            await ask(port, None)


@pytest.mark.parametrize(
    ("mode", "auth", "said"),
    [
        ("", "require", True),
        ("permissive", "require", True),
        ("enforcing", "require", False),
        ("", "optional", False),
    ],
)
async def test_a_demand_that_keeps_nobody_out_is_said(
    certificates: Certificates, caplog: pytest.LogCaptureFixture, mode: str, auth: str, said: bool
) -> None:
    path = certificates.settings(
        tls_server_need_client_auth=auth, tls_server_trustCertPath=str(certificates.ca)
    )
    async with serving(path, mode) as (_server, port):
        if said:
            assert await ask(port, None) == b"hello"
    assert ("has no effect for clients without TLS" in caplog.text) == said


async def test_a_disabled_server_knows_no_tls(certificates: Certificates) -> None:
    async with serving(certificates.file, "disabled") as (_server, port):
        assert await ask(port, None) == b"hello"
        with pytest.raises(ConnectError):
            await ask(port, client_tls(certificates.file))


async def test_a_client_believes_only_whom_it_is_told_to(certificates: Certificates, tmp_path: Path) -> None:
    stranger = Certificates(tmp_path / "stranger")
    nobody_asks = certificates.settings("any.properties", tls_client_authServer="false")
    test_mode = certificates.settings("test.properties", tls_test_mode_enable="true")
    async with serving(certificates.file) as (_server, port):
        for wrong in (stranger.file, True):
            with pytest.raises(ConnectError, match="verify failed"):
                await ask(port, client_tls(wrong if wrong is True else str(wrong)))
        for lax in (nobody_asks, test_mode):
            assert await ask(port, client_tls(str(lax))) == b"hello"


async def test_clients_may_have_to_show_a_certificate(certificates: Certificates, tmp_path: Path) -> None:
    server = certificates.settings(
        "require.properties",
        tls_server_need_client_auth="require",
        tls_server_trustCertPath=str(certificates.ca),
    )
    known = certificates.settings("known.properties", tls_client_certPath=str(certificates.client))
    stranger = Certificates(tmp_path / "stranger")
    unknown = certificates.settings("unknown.properties", tls_client_certPath=str(stranger.client))
    async with serving(server) as (_server, port):
        assert await ask(port, client_tls(str(known))) == b"hello"
        for wrong in (certificates.file, unknown):
            with pytest.raises(RemotingError):
                await ask(port, client_tls(str(wrong)))


@pytest.mark.parametrize("garbage", [b"\x16", b"\x16\x03\x01" + bytes(600), b"\x16" * 5000])
async def test_garbage_ends_its_own_connection(certificates: Certificates, garbage: bytes) -> None:
    async with serving(certificates.file, handshake_s=0.3) as (_server, port):
        peer = await RawPeer.connect(port)
        await peer.send(garbage)
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(peer.reader.read(), 10)  # until the connection ends
        peer.writer.close()
        await still_serves(certificates, port)


async def test_slow_handshakes_are_bounded_in_number_and_time(certificates: Certificates) -> None:
    async with serving(certificates.file, handshakes=3, handshake_s=2.0) as (_server, port):
        slow = [await RawPeer.connect(port) for _ in range(3)]
        for peer in slow:
            await peer.send(b"\x16\x03\x01")
        await asyncio.sleep(0.1)
        for _ in range(2):  # One more handshake ends the oldest
            assert await ask(port, client_tls(certificates.file)) == b"hello"
        assert await ask(port, None) == b"hello"
        for peer in slow:
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(peer.reader.read(), 10)
            peer.writer.close()
        await still_serves(certificates, port)


async def test_the_host_with_the_most_handshakes_loses_its_oldest() -> None:
    class Shaking:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    openings = Openings(None, Limits(handshakes=4), asyncio.BufferedProtocol)
    hosts = ["good", "bad", "bad", "good too", "bad"]
    shaking: Any = [Shaking() for _ in hosts]
    for each, host in zip(shaking, hosts, strict=True):
        openings.make_room()
        openings.shaking[each] = host
    assert [each.aborted for each in shaking] == [False, True, False, False, False]


async def test_a_silent_connection_is_closed(certificates: Certificates) -> None:
    async with serving(certificates.file, idle_s=0.2) as (_server, port):
        peer = await RawPeer.connect(port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(peer.reader.read(), 10) == b""
        peer.writer.close()


async def test_a_stop_ends_what_is_not_open_yet(certificates: Certificates) -> None:
    async with serving(certificates.file) as (_server, port):
        silent, shaking = await RawPeer.connect(port), await RawPeer.connect(port)
        await shaking.send(b"\x16\x03\x01")
        await asyncio.sleep(0.05)
    for peer in (silent, shaking):
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(peer.reader.read(), 10)
        peer.writer.close()


@pytest.mark.parametrize("turns", range(4))
async def test_what_was_accepted_and_opens_after_the_stop_is_cut(
    certificates: Certificates, turns: int
) -> None:
    async with serving(certificates.file) as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop()
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(raw, 1), 10) == b""


async def test_new_certificates_are_taken_up(certificates: Certificates, tmp_path: Path) -> None:
    other = Certificates(tmp_path / "other")
    tls = await server_tls("", str(certificates.file))
    assert tls is not None
    server = RemotingServer({ECHO: echo}, tls=tls)
    port = await server.start("127.0.0.1", 0)
    assert await ask(port, client_tls(certificates.file)) == b"hello"

    other.server.replace(certificates.server)
    await tls.check_files()
    assert await ask(port, client_tls(other.file)) == b"hello"

    certificates.server.write_text("no certificate")
    await tls.check_files()
    assert await ask(port, client_tls(other.file)) == b"hello"

    # The settings contain the path of a file that is created later.
    late = tmp_path / "late.pem"
    settings = certificates.file.read_text()
    certificates.file.write_text(settings.replace(str(certificates.server), str(late)))
    await tls.check_files()
    third = Certificates(tmp_path / "third")
    third.server.replace(late)
    await tls.check_files()
    assert await ask(port, client_tls(third.file)) == b"hello"
    await server.stop()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tls_server_certPath": ""}, "none is generated"),
        ({"tls_server_certPath": "/nowhere.pem"}, "No such file"),
        ({"tls_server_keyPath": "CA"}, "a certificate and its private key"),
        ({"tls_server_need_client_auth": "perhaps"}, "none, optional or require"),
        ({"tls_server_need_client_auth": "require"}, "tls.server.trustCertPath"),
        ({"tls_server_need_client_auth": "require", "tls_server_trustCertPath": "/dev/null"}, "a PEM file"),
        ({"tls_server_mode": "perhaps"}, "disabled, permissive or enforcing"),
    ],
)
async def test_half_a_configuration_of_a_server_is_refused(
    certificates: Certificates, settings: dict[str, str], words: str
) -> None:
    settings = {key: str(certificates.ca) if value == "CA" else value for key, value in settings.items()}
    with pytest.raises(ConfigError, match=words):
        await server_tls("", str(certificates.settings(**settings)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tls_client_trustCertPath": "/nowhere"}, "No such file"),
        ({"tls_client_certPath": "/nowhere"}, "No such file"),
        ({"tls_client_authServer": "maybe"}, "true or false"),
        ({"tls_enable": "maybe"}, "true or false"),
        ({"tls_enable": "false"}, "true, because a client is to use TLS with this file"),
    ],
)
def test_half_a_configuration_of_a_client_is_refused(
    certificates: Certificates, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        client_tls(str(certificates.settings(**settings)))


async def test_a_mode_without_a_certificate_is_refused() -> None:
    assert await server_tls("", "") is None
    assert await server_tls("disabled", "") is None
    with pytest.raises(ConfigError, match="which names the certificate"):
        await server_tls("enforcing", "")
    with pytest.raises(ConfigError, match="a file of settings that can be read"):
        await server_tls("", "/nowhere/tls.properties")


def test_an_encrypted_key_needs_its_password_and_shows_it_nowhere(certificates: Certificates) -> None:
    from cryptography.hazmat.primitives import serialization as forms

    key = forms.load_pem_private_key(certificates.server.read_bytes(), None)
    path = certificates.directory / "key.pem"
    kept = forms.BestAvailableEncryption(b"a-password")
    path.write_bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, kept))
    good = {"tls_server_keyPath": str(path), "tls_server_keyPassword": "a-password"}

    TlsFile(str(certificates.settings(**good))).server_context()
    with pytest.raises(ConfigError) as caught:
        TlsFile(
            str(certificates.settings(**{**good, "tls_server_keyPassword": "wrong-word"}))
        ).server_context()
    assert "wrong-word" not in str(caught.value)
