"""Connections to a broker that does not lead are forwarded to the leader."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from tests.grpc.serving import Client, client, connected, sending, serving, stored
from tests.kit.waiting import until

from cometmq import remoting
from cometmq.errors import ConnectError
from cometmq.grpc.listener import forwards
from cometmq.grpc.listener.server import GrpcServer
from cometmq.grpc.rpc.calls import Call, frame_message

LEADER = "leader:10911"
REQUEST = frame_message(sending(b"x").SerializeToString())


def recording(peers: list[str]) -> dict[str, Any]:
    """Return a handler that records the clients' addresses, and responds with the size of the body."""

    def handler(call: Call, request: Any) -> Any:
        peers.append(call.connection.peer)
        return stored(request.messages[0].body)

    return {"SendMessage": handler}


def follow(server: GrpcServer, leader: list[str | None], port: int, names_clients: bool = True) -> None:
    """Let a server pass its connections on to `port` while `leader` contains an address."""

    async def endpoint_of(_broker_addr: str) -> tuple[str, int]:
        return "127.0.0.1", port

    server.forward(lambda: leader[0], endpoint_of, names_clients)


async def has_forward(server: GrpcServer) -> None:
    """Wait until a connection waits for a leader."""
    await until(lambda: server.forwards is not None and bool(server.forwards.open))


async def size_of(c: Client, body: bytes) -> str:
    response = await c.send(sending(body))
    return str(response.entries[0].message_id)


async def test_the_leader_receives_the_bytes_and_the_address_of_the_client() -> None:
    peers: list[str] = []
    async with (
        serving(recording(peers), is_proxy=lambda host: host == "127.0.0.1") as (_, leader),
        serving({}) as (follower, port),
    ):
        follow(follower, [LEADER], leader)
        async with connected(port) as peer:
            name = peer.writer.get_extra_info("sockname")
            stream = peer.request(REQUEST)
            peer.send()
            await peer.response(stream)
        assert peers == [f"127.0.0.1:{name[1]}"]


async def test_large_requests_wait_for_a_leader_that_reads_slowly() -> None:
    async with (
        serving(recording([]), is_proxy=lambda _: True) as (_, leader),
        serving({}) as (follower, port),
    ):
        follow(follower, [LEADER], leader)
        async with client(port) as c:
            sizes = await asyncio.gather(*(size_of(c, bytes(3 << 20)) for _ in range(8)))
    assert sizes == [str(3 << 20)] * 8


async def test_a_connection_waits_until_a_leader_is_known() -> None:
    leader: list[str | None] = [""]
    async with serving(recording([]), is_proxy=lambda _: True) as (_, at), serving({}) as (follower, port):
        follow(follower, leader, at)
        async with client(port) as c:
            sizes = asyncio.create_task(size_of(c, b"x"))
            await has_forward(follower)
            leader[0] = LEADER
            assert await sizes == "1"
            assert not follower.connections


async def test_a_connection_that_waits_is_served_by_a_broker_that_becomes_the_leader() -> None:
    leader: list[str | None] = [""]
    async with serving(recording([])) as (server, port):
        follow(server, leader, 1)
        async with client(port) as c:
            sizes = asyncio.create_task(size_of(c, b"x"))
            await has_forward(server)
            leader[0] = None
            assert await sizes == "1"
            assert len(server.connections) == 1


async def test_connections_to_a_former_leader_are_closed() -> None:
    leader: list[str | None] = [LEADER]
    async with (
        serving(recording([]), is_proxy=lambda _: True) as (_, first),
        serving({}) as (follower, port),
    ):
        follow(follower, leader, first)
        async with connected(port) as peer:
            stream = peer.request(REQUEST)
            peer.send()
            await peer.response(stream)
            follower.leader_changed()
            stream = peer.request(REQUEST)
            peer.send()
            await peer.response(stream)
            leader[0] = "other:10911"
            follower.leader_changed()
            await peer.closed()


async def test_a_connection_that_begins_after_its_broker_has_another_leader_is_closed() -> None:
    leaders: list[str | None] = [None]

    async def endpoint_of(broker_addr: str) -> tuple[str, int]:
        raise ConnectError(broker_addr, "unused")

    async with serving(recording([]), is_proxy=lambda _: True) as (server, port):
        server.forward(lambda: leaders.pop() if leaders else LEADER, endpoint_of, names_clients=True)
        async with connected(port) as peer:
            peer.request(REQUEST)
            peer.send()
            await peer.closed()
        assert not server.ended


async def test_a_connection_ends_if_no_leader_accepts_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forwards, "WAIT_S", 0.2)

    async def endpoint_of(broker_addr: str) -> tuple[str, int]:
        raise ConnectError(broker_addr, "this broker has no endpoint")

    async with serving({}) as (follower, port):
        follower.forward(lambda: LEADER, endpoint_of, names_clients=True)
        async with connected(port) as peer:
            await peer.closed()
    assert (
        "was not forwarded to the leader: cannot connect to leader:10911: this broker has no endpoint"
        in caplog.text
    )


async def test_a_leader_that_does_not_read_the_first_bytes_pauses_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def dial(*args: Any) -> Any:
        upstream, side = await remoting.dial(*args)
        upstream.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return upstream, side

    monkeypatch.setattr(forwards, "dial", dial)
    leader: list[str | None] = [""]
    with socket.socket() as hung, socket.socket() as peer:
        hung.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        hung.bind(("127.0.0.1", 0))
        hung.listen()
        async with serving({}) as (follower, port):
            follow(follower, leader, hung.getsockname()[1])
            peer.connect(("127.0.0.1", port))
            peer.setblocking(False)
            peer.send(bytes(1 << 20))  # The follower accepts the connection later, and reads much at once
            await has_forward(follower)
            assert follower.forwards is not None
            (forward,) = follower.forwards.open
            await until(lambda: bool(forward.early))
            leader[0] = LEADER
            await until(lambda: bool(forward.leader))
            assert forward.transport is not None
            assert not forward.transport.is_reading()


async def test_two_brokers_that_follow_each_other_do_not_forward_a_connection_for_ever() -> None:
    leader: list[str | None] = [LEADER]
    async with (
        serving({}) as (first, first_port),
        serving(recording([]), is_proxy=lambda _: True) as (second, second_port),
    ):
        follow(first, [LEADER], second_port)
        follow(second, leader, first_port)
        async with client(first_port) as c:
            sizes = asyncio.create_task(size_of(c, b"x"))
            await has_forward(second)
            assert second.forwards is not None
            assert first.forwards is not None
            (forward,) = second.forwards.open
            await until(lambda: bool(forward.early) or bool(forward.leader))
            leader[0] = None
            assert await sizes == "1"
            assert len(first.forwards.open) == 1


async def test_connections_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "MAX_FORWARDS", 1)
    async with serving({}) as (follower, port):
        follow(follower, [""], 1)
        async with connected(port):
            await has_forward(follower)
            async with connected(port) as refused:
                await refused.closed()
