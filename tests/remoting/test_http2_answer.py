"""A gRPC client at a remoting port: its error says which port it needs."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tests.certificates import Certificates

from cometmq.remoting import RemotingServer, TlsFile
from cometmq.remoting.tls import ServerTls


@pytest.mark.parametrize("secure", [False, True])
async def test_a_grpc_client_of_a_remoting_port_learns_of_the_right_port(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, secure: bool
) -> None:
    caplog.set_level(logging.INFO)
    files = Certificates(tmp_path)
    server = RemotingServer({}, tls=ServerTls("permissive", TlsFile(str(files.file))))
    target = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    options = [("grpc.enable_retries", 0)]
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes())
    try:
        async with (
            grpc.aio.secure_channel(target, credentials, options)
            if secure
            else grpc.aio.insecure_channel(target, options)
        ) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/apache.rocketmq.v2.MessagingService/QueryRoute")(b"")
    finally:
        await server.stop()

    assert "5.x clients connect to the port that the broker's setting grpcPort names" in str(caught.value)
    assert "it is a gRPC client, which needs the port of the setting grpcPort" in caplog.text
