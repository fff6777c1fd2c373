"""TLS of a server without TLS settings: the certificate that it makes at the first use."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import subprocess
import sys
from contextlib import AsyncExitStack

import pytest
from cryptography import x509
from tests.broker.conftest import start_cluster  # noqa: F401 (a fixture)
from tests.grpc.service.caller import SETTINGS
from tests.grpc.serving import client, connected, sending, serving, stored
from tests.grpc.test_server import echo
from tests.kit.brokers import StartCluster

from cometmq.errors import CometError
from cometmq.grpc.listener.self_signed import SelfSigned, self_signed
from cometmq.grpc.rpc.calls import frame_message

REQUEST = frame_message(sending(b"hello").SerializeToString())
RESPONSE = frame_message(stored(b"hello").SerializeToString())


def careless() -> ssl.SSLContext:
    """Return the TLS context of a client that accepts any certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def test_clients_that_accept_any_certificate_and_plain_clients_share_a_port() -> None:
    made = 0

    def make():
        nonlocal made
        made += 1
        return self_signed()

    async with AsyncExitStack() as stack:
        _, port = await stack.enter_async_context(serving({"SendMessage": echo}, make_tls=make))
        plain = await stack.enter_async_context(client(port))
        connecting = [stack.enter_async_context(connected(port, tls=careless())) for _ in range(20)]
        peers = await asyncio.gather(*connecting)
        streams = [peer.request(REQUEST) for peer in peers]
        for peer in peers:
            peer.send()
        for peer, stream in zip(peers, streams, strict=True):
            assert (await peer.response(stream))[1] == RESPONSE
        assert await plain.send(sending(b"hello")) == stored(b"hello")
        connections = [peer.writer.get_extra_info("ssl_object") for peer in peers]

    assert made == 1
    assert {each.selected_alpn_protocol() for each in connections} == {"h2"}
    (certificate,) = {each.getpeercert(binary_form=True) for each in connections}
    found = x509.load_der_x509_certificate(certificate)
    now = datetime.datetime.now(datetime.UTC)
    assert found.not_valid_before_utc < now < found.not_valid_after_utc
    found.verify_directly_issued_by(found)


async def test_each_server_has_a_key_of_its_own() -> None:
    async def certificate() -> bytes:
        async with serving({}, make_tls=self_signed) as (_, port), connected(port, tls=careless()) as peer:
            found: bytes = peer.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            return found

    assert await certificate() != await certificate()


async def test_without_a_certificate_plain_clients_are_served(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> SelfSigned:
        raise CometError("the package cryptography is missing")

    caplog.set_level("INFO")
    async with serving({"SendMessage": echo}, make_tls=fail) as (_, port), client(port) as plain:
        for _ in range(2):
            with pytest.raises(ConnectionError):
                async with connected(port, tls=careless()):
                    pass
        assert await plain.send(sending(b"hello")) == stored(b"hello")

    assert "no certificate could be made: the package cryptography is missing" in caplog.text


async def test_a_stop_ends_connections_that_wait_for_the_certificate() -> None:
    begun = asyncio.Event()

    async def never() -> SelfSigned:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with serving({}, make_tls=never) as (_, port):
        connecting = asyncio.ensure_future(
            asyncio.open_connection("127.0.0.1", port, ssl=careless(), ssl_handshake_timeout=60)
        )
        await begun.wait()

    with pytest.raises(ConnectionError):
        await connecting


@pytest.mark.parametrize("mode", ["", "disabled"])
async def test_a_broker_without_tls_settings_offers_it_unless_the_mode_is_disabled(
    start_cluster: StartCluster,  # noqa: F811 (a fixture)
    mode: str,
) -> None:
    cluster = await start_cluster(**SETTINGS, **{"tls.server.mode": mode} if mode else {})
    assert cluster.broker.endpoint is not None
    try:
        async with connected(cluster.broker.endpoint.port, tls=careless()) as peer:
            assert await peer.read()
            offered = True
    except ConnectionError:
        offered = False

    assert offered == (mode == "")


def test_the_package_that_makes_certificates_is_imported_at_the_first_use() -> None:
    program = "import sys, cometmq.grpc.endpoint; print('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
