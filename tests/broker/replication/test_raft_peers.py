"""The protocol between raft members, and their connections over real sockets."""

from __future__ import annotations

import asyncio
import logging
import struct
from unittest import mock

import pytest
from tests.kit.waiting import until

from cometmq.broker.replication import raft_peers, raft_wire
from cometmq.broker.replication.raft_peers import Peers
from cometmq.errors import ProtocolError
from cometmq.logs import LogLimiter
from cometmq.raft import (
    AnyMessage,
    AppendRequest,
    AppendResponse,
    Members,
    MembersEntry,
    TransferRequest,
    VoteRequest,
    VoteResponse,
)

GROUP = "broker-a"
CLOSED = (ConnectionResetError, asyncio.IncompleteReadError)


def beat(sender: str = "n0", to: str = "n1", payload: bytes | None = None) -> AppendRequest:
    return AppendRequest(
        group=GROUP,
        sender=sender,
        to=to,
        term=7,
        prev_index=3,
        prev_term=6,
        last=3,
        commit=2,
        payload=payload,
    )


MEMBERS = MembersEntry(4, 7, Members(frozenset({"n0", "n1"}), frozenset({"n2"})))
MESSAGES: list[AnyMessage] = [
    VoteRequest(group=GROUP, sender="n0", to="n1", term=7, last_index=3, last_term=6, pre=True),
    VoteResponse(group=GROUP, sender="n0", to="n1", term=7, granted=True),
    AppendRequest(
        group=GROUP, sender="n0", to="n1", term=7, prev_index=3, prev_term=6, count=2, entries_term=7, last=5,
        commit=3, members=(MEMBERS,), payload=b"\x00\xffentries",
    ),
    AppendResponse(group=GROUP, sender="n0", to="n1", term=7, match=5, written=5),
    TransferRequest(group=GROUP, sender="n0", to="n1", term=7),
]  # fmt: skip


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_messages_come_as_they_were_sent_however_the_bytes_are_cut(step: int) -> None:
    data = (
        raft_wire.handshake(GROUP, "n0", "h:1", "h:2") + raft_wire.frame(MESSAGES) + raft_wire.frame([beat()])
    )
    frames = raft_wire.Frames(GROUP, "n1")
    found = [message for at in range(0, len(data), step) for message in frames.feed(data[at : at + step])]
    assert found == [*MESSAGES, beat()]
    assert frames.handshake is not None
    assert (frames.handshake.sender, frames.handshake.addr, frames.handshake.broker_addr) == (
        "n0",
        "h:1",
        "h:2",
    )


def body(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


HELLO = raft_wire.handshake(GROUP, "n0", "h:1", "h:2")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of 1195725856 bytes from a raft member is too long"),
        (body(b"\xc1"), "invalid handshake of a raft member"),
        (body(b"\x94\x01\x02\x03\x04"), "invalid handshake of a raft member"),
        (
            raft_wire.handshake("other", "n0", "h:1", "h:2"),
            "member 'n0' of group 'other' is not a member of group 'broker-a'",
        ),
        (
            raft_wire.handshake(GROUP, "", "h:1", "h:2"),
            "member '' of group 'broker-a' is not a member of group 'broker-a'",
        ),
        (
            HELLO.replace(b"\x01\xa8broker", b"\x02\xa8broker"),
            "unsupported version 2 of 'CometMQ raft': 1 is supported",
        ),
        (raft_wire.handshake(GROUP, "n0", "h:x", "h:2"), "member 'n0' cannot be reached at 'h:x'"),
        (HELLO + struct.pack(">I", raft_wire.MAX_FRAME_BYTES + 1), "bytes"),
        (HELLO + body(b"\x91\x80"), "invalid messages from a raft member"),
        (HELLO + body(b"\x91" * 3000), "invalid messages from a raft member"),
        (HELLO + raft_wire.frame([beat("n2")]), "member 'n0' sent a message in the name of 'n2'"),
    ],
)
def test_what_no_member_sends_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        list(raft_wire.Frames(GROUP, "n1").feed(data))
    assert problem in str(caught.value)


class Member:
    """A member's connections and the messages it received."""

    def __init__(self, me: str, *begins: str) -> None:
        self.heard: asyncio.Queue[AnyMessage] = asyncio.Queue()
        self.begins = begins
        self.peers = Peers(
            GROUP, me, "h:1",
            receive=self.heard.put_nowait, heard=lambda: None, met=lambda: None, begins=lambda: self.begins,
        )  # fmt: skip
        self.addr = ""

    async def start(self, port: int = 0) -> None:
        await self.peers.listen("127.0.0.1", port, "h:2")
        self.addr = f"127.0.0.1:{self.peers.port}"


async def said(speaker: Member, message: AnyMessage, listener: Member) -> AnyMessage:
    """Send a message repeatedly until it arrives: a message without a ready connection is dropped."""
    async with asyncio.timeout(60):
        while listener.heard.empty():
            speaker.peers.send([message])
            await asyncio.sleep(0.01)
        return await listener.heard.get()


async def test_members_hear_each_other_and_connect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_peers, "RETRY_S", 0.01)
    one, other = Member("n0"), Member("n1")
    await one.start()
    await other.start()
    one.peers.use({"n1": other.addr})
    assert await said(one, beat(payload=b"x" * 3_000_000), other) == beat(payload=b"x" * 3_000_000)
    await other.peers.stop()
    again = Member("n1")
    await again.start(int(other.addr.rpartition(":")[2]))
    assert await said(one, beat(), again) == beat()
    await one.peers.stop()
    await again.peers.stop()


async def test_strangers_are_sent_away_and_members_stay(caplog: pytest.LogCaptureFixture) -> None:
    one, other = Member("n0"), Member("n1")
    await one.start()
    await other.start()
    one.peers.use({"n1": other.addr})
    await said(one, beat(), other)
    host, _, port = other.addr.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(CLOSED):
        await reader.readexactly(1)
    writer.close()
    assert "bytes from a raft member is too long" in caplog.text
    assert await said(one, beat(), other) == beat()
    await one.peers.stop()
    await other.peers.stop()


async def test_that_a_member_cannot_be_reached_is_said_rarely(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raft_peers, "RETRY_S", 0.01)
    one, other = Member("n0"), Member("n1")
    await one.start()
    await other.start()
    addr = other.addr
    for _ in range(3):  # the connection opens and closes
        await other.peers.stop()
        one.peers.use({"n1": addr})
        await asyncio.sleep(0.1)
        other = Member("n1")
        await other.start(int(addr.rpartition(":")[2]))
        await said(one, beat(), other)
    assert caplog.text.count("unreachable") == 1
    await one.peers.stop()
    await other.peers.stop()


async def test_a_member_whose_name_cannot_be_resolved_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise UnicodeError("no IDNA name")

    monkeypatch.setattr("cometmq.remoting.dialing.addresses_of", refuse)
    monkeypatch.setattr(raft_peers, "RETRY_S", 0.01)
    monkeypatch.setattr(raft_peers, "CONNECT_S", 0.01)
    monkeypatch.setattr(raft_peers, "UNREACHABLE_WARNING_INTERVAL_S", 0.0)
    one = Member("n0")
    one.peers.use({"n1": "n1.example:1"})
    await until(lambda: caplog.text.count("is not an address: no IDNA name") > 1)
    monkeypatch.setattr(raft_peers, "dial", lambda *_: asyncio.sleep(60))
    await until(lambda: "n1.example:1 unreachable: no answer" in caplog.text)
    await one.peers.stop()


async def test_connections_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_peers, "MAX_CONNECTIONS", 2)
    one = Member("n0")
    await one.start()
    host, _, port = one.addr.rpartition(":")
    oldest, *others = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
    await sent_away(*oldest)
    assert len(one.peers.incoming) == 2
    one.peers.use({"n1": "127.0.0.1:1", "n2": "127.0.0.1:1"})
    for (_, writer), name in zip(others, ("n1", "n2"), strict=True):
        writer.write(raft_wire.handshake(GROUP, name, "h:1", "h:2"))
    await until(lambda: {each.sender for each in one.peers.incoming} == {"n1", "n2"})
    await sent_away(*await asyncio.open_connection(host, int(port)))
    for _, writer in others:
        writer.close()
    await one.peers.stop()


async def test_who_does_not_say_who_it_is_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_peers, "HANDSHAKE_TIMEOUT_S", 0.05)
    one = Member("n0")
    await one.start()
    host, _, port = one.addr.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        with pytest.raises(CLOSED):
            await reader.readexactly(1)
    writer.close()
    await one.peers.stop()


async def test_a_member_that_connects_again_has_one_connection() -> None:
    one = Member("n0")
    await one.start()
    host, _, port = one.addr.rpartition(":")
    hello = raft_wire.handshake(GROUP, "n1", "h:1", "h:2")
    first, first_writer = await asyncio.open_connection(host, int(port))
    first_writer.write(hello + raft_wire.frame([beat("n1", "n0")]))
    await one.heard.get()
    _, second_writer = await asyncio.open_connection(host, int(port))
    second_writer.write(hello)
    async with asyncio.timeout(60):
        with pytest.raises(CLOSED):
            await first.readexactly(1)
    second_writer.write(raft_wire.frame([beat("n1", "n0")]))
    assert await one.heard.get() == beat("n1", "n0")
    assert len(one.peers.incoming) == 1
    for writer in (first_writer, second_writer):
        writer.close()
    await one.peers.stop()


async def test_what_is_too_long_for_one_frame_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_wire, "MAX_FRAME_BYTES", 100_000)
    one, other = Member("n0"), Member("n1")
    await one.start()
    await other.start()
    one.peers.use({"n1": other.addr})
    await said(one, beat(), other)
    one.peers.send([beat(payload=b"x" * 40_000) for _ in range(4)])
    async with asyncio.timeout(60):
        while (await other.heard.get()).payload is None:
            pass
        for _ in range(3):
            assert (await other.heard.get()).payload == b"x" * 40_000
    await one.peers.stop()
    await other.peers.stop()


async def greet(one: Member, hello: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = one.addr.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(hello)
    return reader, writer


async def sent_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(CLOSED):
            await reader.readexactly(1)
    writer.close()


async def test_who_bears_the_name_of_another_is_sent_away_before_it_is_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Member("n0")
    await one.start()
    said = raft_wire.frame([beat("n1", "n0")])
    await sent_away(*await greet(one, raft_wire.handshake(GROUP, "n0", "h:1", "h:2") + said))
    assert "another member has the name n0, at h:1" in caplog.text
    _, first = await greet(one, raft_wire.handshake(GROUP, "n1", "h:1", "h:2") + said)
    await one.heard.get()
    await sent_away(*await greet(one, raft_wire.handshake(GROUP, "n1", "elsewhere:1", "h:2") + said))
    assert "two members have the name n1, at h:1 and at elsewhere:1" in caplog.text
    assert one.heard.empty()
    first.write(said)
    await one.heard.get()
    first.close()
    await one.peers.stop()


async def test_strangers_who_hold_all_places_keep_no_member_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_peers, "MAX_CONNECTIONS", 3)
    one = Member("n0")
    await one.start()
    one.peers.use({"n1": "127.0.0.1:1", "n2": "127.0.0.1:1"})
    named = [await greet(one, raft_wire.handshake(GROUP, name, "h:1", "h:2")) for name in ("n1", "s1")]
    await until(lambda: {each.sender for each in one.peers.incoming} == {"n1", "s1"})
    silent = await greet(one, b"")
    await until(lambda: len(one.peers.incoming) == 3)
    second = await greet(one, raft_wire.handshake(GROUP, "n2", "h:1", "h:2"))
    await sent_away(*silent)
    await until(lambda: {each.sender for each in one.peers.incoming} == {"n1", "s1", "n2"})
    last = await greet(one, b"")
    await sent_away(*named[1])
    await until(lambda: {each.sender for each in one.peers.incoming} == {"n1", "n2", ""})
    for _, writer in (named[0], second, last):
        writer.close()
    await one.peers.stop()


async def test_a_group_does_not_begin_with_members_that_differ(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Majorities of different member lists need not overlap."""
    monkeypatch.setattr(raft_peers, "RETRY_S", 0.1)
    one, other = Member("n0", "n0", "n1"), Member("n1", "n0", "n1", "n2")
    await one.start()
    await other.start()
    other.peers.use({"n0": one.addr})
    await until(lambda: "closed the connection immediately; its log shows the reason" in caplog.text)
    words = "dLegerPeers must be equal where a group begins: at n1 n0;n1;n2, here n0;n1"
    assert f"closing the connection of raft member n1: {words}" in caplog.text
    assert one.peers.problem == words
    assert (one.peers.learned, one.heard.empty()) == ({}, True)
    other.begins = ("n0", "n1")  # as after a correction of the file
    assert await said(other, beat("n1", "n0"), one) == beat("n1", "n0")
    assert one.peers.problem == ""
    await one.peers.stop()
    await other.peers.stop()


@pytest.mark.parametrize(("here", "there"), [((), ("n0", "n1")), (("n0", "n1"), ())])
async def test_where_one_of_two_belongs_to_a_group_already_its_log_counts(
    here: tuple[str, ...], there: tuple[str, ...]
) -> None:
    one, other = Member("n0", *here), Member("n1", *there)
    await one.start()
    await other.start()
    other.peers.use({"n0": one.addr})
    assert await said(other, beat("n1", "n0"), one) == beat("n1", "n0")
    assert one.peers.problem == ""
    await one.peers.stop()
    await other.peers.stop()


async def test_who_connects_and_is_no_member_is_named_with_the_cure(caplog: pytest.LogCaptureFixture) -> None:
    one = Member("n0")
    await one.start()
    for name in ("n1", "n9"):
        one.peers.use({"n1": "127.0.0.1:1"})
        _, writer = await greet(one, raft_wire.handshake(GROUP, name, "h:1", "h:2"))
        await until(lambda name=name: name in one.peers.learned)
        writer.close()
    assert "raft member n9 connected from h:1, but is neither in this group" in caplog.text
    assert "raft member n1 connected from h:1" not in caplog.text
    await one.peers.stop()


async def test_strangers_are_forgotten_when_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_peers, "MAX_CONNECTIONS", 3)
    one = Member("n0")
    await one.start()
    for number in range(10):
        _, writer = await greet(one, raft_wire.handshake(GROUP, f"s{number}", "h:1", "h:2"))
        await until(lambda n=number: f"s{n}" in one.peers.learned)
        writer.close()
        await until(lambda: not one.peers.incoming)
    assert len(one.peers.learned) <= 3
    await one.peers.stop()


async def test_half_frames_have_a_limit_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(raft_peers, "MAX_INCOMPLETE_BYTES", 100_000)
    one = Member("n0")
    await one.start()
    half = struct.pack(">I", 1 << 20) + bytes(70_000)
    _, first = await greet(one, raft_wire.handshake(GROUP, "n1", "h:1", "h:2") + half)
    await until(lambda: sum(each.frames.unread for each in one.peers.incoming) > 70_000)
    await sent_away(*await greet(one, raft_wire.handshake(GROUP, "n2", "h:1", "h:2") + half))
    assert "bytes of incomplete frames" in caplog.text
    assert [each.sender for each in one.peers.incoming] == ["n1"]
    first.close()
    await one.peers.stop()


def test_a_frame_has_a_limit_of_messages() -> None:
    frames = raft_wire.Frames(GROUP, "n1")
    hello = raft_wire.handshake(GROUP, "n0", "h:1", "h:2")
    assert (
        len(list(frames.feed(hello + raft_wire.frame([beat()] * raft_wire.MAX_MESSAGES_PER_FRAME)))) == 1024
    )
    with pytest.raises(ProtocolError, match="invalid messages"):
        list(frames.feed(raft_wire.frame([beat()] * (raft_wire.MAX_MESSAGES_PER_FRAME + 1))))


def test_strangers_get_a_few_lines_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("test")
    lines = LogLimiter(20, 60.0, log)
    with mock.patch("time.monotonic", return_value=5.0):
        assert sum(lines.allows() for _ in range(1000)) == 20
        assert not caplog.records
    with mock.patch("time.monotonic", return_value=66.0):
        assert lines.allows()
    assert caplog.messages == ["980 similar lines omitted"]
