"""A tap between Apache's clients and servers: it forwards every byte and records the frames.

One tap is before the name server and one before the broker. Routes contain the broker's own address, so the
name server's tap replaces it by the address of the broker's tap when it forwards them (both ports have five
digits, so no length changes); the recorded frames are those of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field

from tests.kit.raw_peer import header_and_body

LARGEST_KEPT = 12_000
"""Frames above this size, in bytes, add no information to smaller ones."""


@dataclass(frozen=True)
class Recorded:
    """A frame: its sender and receiver, the code of its request, and its bytes."""

    sender: str
    receiver: str
    request: int
    response: bool
    data: bytes


@dataclass
class Recording:
    """The first ``per_kind`` frames of each kind: same ends, same request code, same outcome."""

    per_kind: int = 2
    frames: list[Recorded] = field(default_factory=list)
    seen: Counter[tuple[str, str, int, int]] = field(default_factory=Counter)

    def add(self, frame: Recorded, outcome: int) -> None:
        kind = (frame.sender, frame.receiver, frame.request, outcome)
        if len(frame.data) <= LARGEST_KEPT and self.seen[kind] < self.per_kind:
            self.seen[kind] += 1
            self.frames.append(frame)


class Tap:
    """A listener on a free port that connects each client to ``target``."""

    def __init__(
        self,
        name: str,
        target: int,
        recording: Recording,
        *,
        replace: dict[bytes, bytes] | None = None,
        client: str = "client",
    ) -> None:
        self.name = name
        self.target = target
        self.recording = recording
        self.replace = replace or {}
        self.client = client
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        asked: dict[tuple[str, int], int] = {}
        ends = [
            asyncio.create_task(self._pass(reader, far_writer, self.client, self.name, asked)),
            asyncio.create_task(self._pass(far_reader, writer, self.name, self.client, asked)),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            for each in (writer, far_writer):
                each.close()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sender: str,
        receiver: str,
        asked: dict[tuple[str, int], int],
    ) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readexactly(4)
                payload = await reader.readexactly(int.from_bytes(head))
                self._keep(head + payload, sender, receiver, asked)
                for old, new in self.replace.items():
                    payload = payload.replace(old, new)
                writer.write(head + payload)
                await writer.drain()

    def _keep(self, data: bytes, sender: str, receiver: str, asked: dict[tuple[str, int], int]) -> None:
        code, opaque, flag = envelope(data)
        if flag & 1:
            request = asked.pop((receiver, opaque), -1)
            self.recording.add(Recorded(sender, receiver, request, True, data), code)
        else:
            asked[sender, opaque] = code
            self.recording.add(Recorded(sender, receiver, code, False, data), -1)


def envelope(data: bytes) -> tuple[int, int, int]:
    """Return (code, opaque, flag) of a frame with its length word, in either serialization."""
    header, _ = header_and_body(data[4:])
    return header["code"], header["opaque"], header["flag"]
