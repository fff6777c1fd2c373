"""Arbitrary bytes: the response is a code or a closed connection, and the process answers a next request."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults import malformed
from tests.faults.good_requests import BROKER as BROKER_IDENTITY
from tests.faults.good_requests import (
    BROKER_REQUESTS,
    NAMESRV_REQUESTS,
    Request,
    hostile_broker_bodies,
)
from tests.faults.malformed import command, frame
from tests.faults.servers import BROKER, NAMESRV, ServerProcess
from tests.kit.raw_peer import RawPeer
from tests.kit.waiting import wait_until

MIB = 1024 * 1024
SEND, MAKE_TOPIC = 10, 17
AFTER = 424_242  # opaque of the valid request after the bad bytes
PROGRAMS = {"namesrv": NAMESRV, "broker": BROKER}
REQUESTS = {"namesrv": NAMESRV_REQUESTS, "broker": BROKER_REQUESTS}
# Requests that are always answered: a name server's cluster info and a broker's runtime info.
GOOD = {"namesrv": 106, "broker": 28}


@pytest.fixture(scope="module", params=list(PROGRAMS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with ServerProcess(PROGRAMS[request.param], tmp_path_factory.mktemp(request.param)) as process:
        yield process


@pytest.fixture
def requests(server: ServerProcess, request: pytest.FixtureRequest) -> dict[int, Request]:
    return REQUESTS[kind_of(request)]


@pytest.fixture
def good(server: ServerProcess, request: pytest.FixtureRequest) -> bytes:
    return command(GOOD[kind_of(request)], opaque=AFTER)


def kind_of(request: pytest.FixtureRequest) -> str:
    kind = request.node.callspec.params["server"]
    assert isinstance(kind, str)
    return kind


def whole_frames(data: bytes) -> bool:
    """Return whether the length words lead a reader exactly to the end of `data`."""
    pos = 0
    while len(data) - pos >= 4:
        (size,) = struct.unpack_from(">I", data, pos)
        pos += 4 + size
    return pos == len(data)


async def send_bad(
    server: ServerProcess, bad: bytes, good: bytes, until: frozenset[int] = frozenset({AFTER})
) -> list[dict[str, Any]]:
    """Send bad bytes and a valid request; return the responses up to those in `until`, or up to the close."""
    raw = await RawPeer.connect(server.port)
    answers: list[dict[str, Any]] = []
    try:
        raw.writer.write(bad + good)
        if not whole_frames(bad):
            raw.writer.write_eof()  # ends the server's wait for the rest of a frame
        while True:
            header, _ = await raw.read()
            if not header["flag"] & 1:
                continue  # a request of the server: a bad frame named this connection's own group
            assert isinstance(header["code"], int), header
            answers.append(header)
            if until <= {answer["opaque"] for answer in answers}:
                return answers
    except (asyncio.IncompleteReadError, ConnectionError):
        return answers
    finally:
        raw.writer.close()


async def check_all(
    server: ServerProcess, cases: Iterable[tuple[str, bytes]], good: bytes, *, answered: bool = False
) -> int:
    """Send every case and then a valid request on another connection; return the number of cases.

    answered: The frames themselves are well-formed, so each gets a response and its connection stays open.
    """
    wanted = frozenset({7, AFTER} if answered else {AFTER})
    witness = await RawPeer.connect(server.port)
    count = 0
    for name, bad in cases:
        count += 1
        try:
            answers = await send_bad(server, bad, good, wanted)
        except TimeoutError:
            pytest.fail(f"{name}: neither answered nor closed")
        if answered:  # in any order, since some responses wait for a file
            assert sorted(answer["opaque"] for answer in answers) == [7, AFTER], name
        try:
            await witness.send(good)
            header, _ = await witness.read()
            while header["flag"] == 2:
                header, _ = await witness.read()
        except (asyncio.IncompleteReadError, OSError) as error:
            pytest.fail(f"{name}: the next good request failed: {error!r}, alive: {server.alive}")
        assert (header["opaque"], header["code"]) == (AFTER, 0), name
    await witness.close()
    assert server.alive
    assert server.complaints() == []
    return count


@pytest.mark.parametrize("kind", ["lengths", "header_types", "json_headers"])
async def test_malformed_frames(server: ServerProcess, kind: str, good: bytes) -> None:
    assert await check_all(server, getattr(malformed, kind)(), good) > 15


@pytest.mark.representative("namesrv")
@pytest.mark.thorough("the same for the broker, with more requests")
async def test_fields_missing_and_of_wrong_kinds(
    server: ServerProcess, requests: dict[int, Request], good: bytes
) -> None:
    for code, (fields, body, held) in requests.items():
        await check_all(server, malformed.wrong_fields(code, fields, body), good, answered=not held)


@pytest.mark.representative("namesrv")
@pytest.mark.thorough("the same for the broker, with more requests")
async def test_bodies_of_wrong_kinds(
    server: ServerProcess, requests: dict[int, Request], good: bytes
) -> None:
    for code, (fields, _, held) in requests.items():
        await check_all(server, malformed.json_bodies(code, fields), good, answered=not held)


async def test_hostile_batches_and_properties(tmp_path: Path) -> None:
    with ServerProcess(BROKER, tmp_path) as server:
        await check_all(server, hostile_broker_bodies(), command(28, opaque=AFTER), answered=True)


async def test_mutated_frames(server: ServerProcess, requests: dict[int, Request], good: bytes) -> None:
    originals = [command(code, body, ext=fields) for code, (fields, body, _) in requests.items()]
    originals.append(frame(malformed.GOOD_BINARY, kind=malformed.BINARY))
    cases = (
        (f"mutation {n}: {data[:300]!r}", data)
        for n, data in enumerate(malformed.mutations(1, 1500, originals))
    )
    assert await check_all(server, cases, good) == 1500


async def test_hostile_registrations_cost_bounded_memory(tmp_path: Path) -> None:
    """The decoder stops after 64 MiB of a registration's inflated data, which is up to 2 GiB here."""
    with ServerProcess(NAMESRV, tmp_path) as server:
        before = server.resident_peak()
        await check_all(
            server, malformed.compressed_registrations(BROKER_IDENTITY), command(106, opaque=AFTER)
        )
        assert server.resident_peak() - before < 192 * MIB
        assert server.resident() - before < 32 * MIB


async def test_a_bad_frame_closes_its_connection_only(server: ServerProcess, good: bytes) -> None:
    others = [await RawPeer.connect(server.port) for _ in range(20)]
    for name, bad in malformed.lengths():
        await send_bad(server, bad, good)
        for other in others:
            await other.send(good)
        for other in others:
            assert (await other.read())[0]["opaque"] == AFTER, name
    for other in others:
        await other.close()


async def fill_memory(server: ServerProcess, requests: dict[int, Request]) -> None:
    """Send messages until the memory for the newest part of the log is full."""
    if SEND not in requests:
        return
    raw = await RawPeer.connect(server.port)
    fill = command(SEND, b"m" * MIB, ext=requests[SEND].ext)
    for each in (command(MAKE_TOPIC, ext=requests[MAKE_TOPIC].ext), *[fill] * 16):
        await raw.send(each)
        header, _ = await raw.read()
        assert header["code"] == 0, header
    raw.writer.close()


@pytest.mark.slow("thousands of bad frames")
async def test_many_thousand_bad_frames_leave_memory_and_descriptors_as_they_were(
    server: ServerProcess, requests: dict[int, Request], good: bytes
) -> None:
    originals = [command(code, body, ext=fields) for code, (fields, body, _) in requests.items()]
    large = [bad for _, bad in malformed.json_headers() if len(bad) > 100_000]

    async def flood(seed: int, count: int) -> None:
        pending = iter(malformed.mutations(seed, count, originals))

        async def worker() -> None:
            for bad in pending:
                await send_bad(server, bad, good)

        await asyncio.gather(*(worker() for _ in range(16)))
        for bad in large:
            await send_bad(server, bad, good)

    await fill_memory(server, requests)
    await flood(2, 3000)
    resident, descriptors = [server.resident()], server.descriptors()
    for seed in range(3, 16):
        await flood(seed, 3000)
        resident.append(server.resident())
        if resident[-1] - resident[-2] < MIB // 4:
            break  # a leak grows at each attempt; growth of a table or an arena ends
    else:
        pytest.fail(f"it grows and grows: {resident}")
    enough = descriptors + 4
    await asyncio.to_thread(wait_until, "what was open is closed", lambda: server.descriptors() <= enough)
    assert server.complaints() == []
