"""Hostile requests: the server stays up, fast and constant in memory, and writes only in its directory.

`--hostile-frames` sets the number of frames.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.faults import hostile
from tests.faults.good_requests import BROKER_REQUESTS, NAMESRV_REQUESTS, Request
from tests.faults.malformed import command
from tests.faults.servers import BROKER, NAMESRV, ServerProcess
from tests.kit.raw_peer import RawPeer

from cometmq.protocol.codes import RequestCode
from cometmq.store.derived.queue_table import TRASH

MIB = 1024 * 1024
AFTER = 424_242  # opaque of the valid request after a batch of hostile ones
LOT_FRAMES, LOT_BYTES = 64, 4 * MIB
CONNECTIONS = 4
QUICK_S = 30.0  # limit for a witness's request on a busy machine; a request that hangs takes minutes
FLAT = 12 * MIB
"""Allowed growth of memory, in bytes, over the second half of the flood; about 1 MiB is usual.

A leak of 1 KiB per frame would be 17 MiB at the broker.
"""

# As in production, topics and groups are created when they are first named. Clients that send one hostile
# heartbeat and then nothing would be disconnected, which would happen during the flood on a slow machine.
OPEN_BROKER = BROKER.replace(
    '"autoCreateTopicEnable": "false", "autoCreateSubscriptionGroup": "false",', ""
).replace(
    "import asyncio, sys\n",
    "import asyncio, sys\nimport cometmq.broker.groups.clients as c; c.EXPIRED_MS = 1 << 40\n",
)
KINDS: dict[str, tuple[str, Mapping[int, Request], int]] = {
    "namesrv": (NAMESRV, NAMESRV_REQUESTS, RequestCode.GET_BROKER_CLUSTER_INFO),
    "broker": (OPEN_BROKER, BROKER_REQUESTS, RequestCode.GET_BROKER_RUNTIME_INFO),
}
# Requests that neither server handles are sent to both.
UNHANDLED = Request({"topic": "TopicA", "group": "CG", "consumerGroup": "CG", "queueId": "0"}, b"{}")
# Shares of the frames: the table has 50,000 frames for each server, and more of the broker's have an effect.
SHARE = {"namesrv": 0.4, "broker": 0.6}


async def flood(server: ServerProcess, frames: Iterator[bytes], count: int, good: bytes) -> int:
    """Send `count` frames over a few connections; return the number sent.

    A valid request after each batch must be answered, so no well-formed frame closes a connection.
    """
    sent = 0

    def next_lot() -> list[bytes]:
        nonlocal sent
        lot: list[bytes] = []
        size = 0
        while sent < count and len(lot) < LOT_FRAMES and size < LOT_BYTES:
            frame = next(frames, None)
            if frame is None:
                break
            lot.append(frame)
            size += len(frame)
            sent += 1
        return lot

    async def worker() -> None:
        raw = await RawPeer.connect(server.port)
        while lot := next_lot():
            await raw.send(b"".join((*lot, good)))
            try:
                await answer_of(raw, AFTER)
            except asyncio.IncompleteReadError:
                pytest.fail(f"closed after {sent} frames; runs on: {server.alive}\n{server.output[-2000:]}")
        await raw.close()

    await asyncio.gather(*(worker() for _ in range(CONNECTIONS)))
    return sent


async def answer_of(raw: RawPeer, opaque: int) -> dict[str, object]:
    wanted = b'"opaque":%d,' % opaque
    while True:
        async with asyncio.timeout(60):
            size, word = struct.unpack(">II", await raw.reader.readexactly(8))
            header = await raw.reader.readexactly(word & 0xFFFFFF)
            await raw.reader.readexactly(size - 4 - (word & 0xFFFFFF))
        if wanted in header:
            found: dict[str, object] = json.loads(header)
            if found["opaque"] == opaque:
                return found


class Witness:
    """A client during the flood whose valid requests must be answered in time."""

    def __init__(self, server: ServerProcess, good: bytes) -> None:
        self._server = server
        self._good = good
        self._raw: RawPeer | None = None
        self._slowest_s = 0.0
        self._begun = time.monotonic()
        self._waiting = False
        self.asked = 0

    @property
    def slowest_s(self) -> float:
        """The longest response time of all requests, including one that is still pending."""
        return max(self._slowest_s, time.monotonic() - self._begun if self._waiting else 0.0)

    async def close(self) -> None:
        if self._raw is not None:
            await self._raw.close()

    async def run(self) -> None:
        raw = self._raw = await RawPeer.connect(self._server.port)
        while True:
            self._begun, self._waiting = time.monotonic(), True
            await raw.send(self._good)
            header = await answer_of(raw, AFTER)
            assert header["code"] == 0, header
            self._slowest_s = self.slowest_s
            self._waiting = False
            self.asked += 1
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_known_code_is_in_the_table(kind: str, tmp_path: Path) -> None:
    program, requests, _ = KINDS[kind]
    with ServerProcess(program, tmp_path) as server:
        raw = await RawPeer.connect(server.port)
        handled = set()
        for code in RequestCode:
            await raw.send(command(code, opaque=int(code)))
            header = await answer_of(raw, int(code))
            if header["code"] != 3:
                handled.add(int(code))
        await raw.close()

    assert handled == set(requests)


@pytest.mark.slow("sends 100,000 hostile frames")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_flood_of_hostile_requests(kind: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    program, known, good_code = KINDS[kind]
    requests = {int(code): known.get(code, UNHANDLED) for code in RequestCode}
    good = command(good_code, opaque=AFTER)
    total = int(pytestconfig.getoption("--hostile-frames") * SHARE[kind])
    home = tmp_path / "home"
    home.mkdir()
    with ServerProcess(program, home) as server:
        witness = Witness(server, good)
        watching = asyncio.ensure_future(witness.run())
        sent = await flood(server, hostile.table(requests), total, good)
        halves = [max(0, total - sent) // 2] * 2
        resident = []
        for seed, half in enumerate(halves):
            sent += await flood(server, hostile.mixtures(requests, seed), half, good)
            resident.append(server.resident())
        slowest_s = witness.slowest_s
        if watching.done():
            watching.result()
        watching.cancel()
        await witness.close()

        assert server.alive
        assert server.complaints() == []
        assert sent >= total - 1
        assert witness.asked > 10
        assert slowest_s < QUICK_S
        assert resident[1] - resident[0] < FLAT, resident
    assert_nothing_left_its_directory(tmp_path)
    with ServerProcess(program, home) as server:  # the data left by the requests does not prevent a start
        raw = await RawPeer.connect(server.port)
        await raw.send(good)
        assert (await answer_of(raw, AFTER))["code"] == 0
        await raw.close()
        assert server.complaints() == []


def assert_nothing_left_its_directory(path: Path) -> None:
    assert [entry.name for entry in path.iterdir()] == ["home"]
    queues = path / "home" / "store" / "consumequeue"
    if queues.exists():
        topics = [entry for entry in queues.iterdir() if entry.name != TRASH]  # TRASH holds deleted topics
        assert [each for each in topics if not re.fullmatch(r"[%|a-zA-Z0-9_-]{1,127}", each.name)] == []
        assert all(entry.name.isdecimal() for topic in topics for entry in topic.iterdir())
