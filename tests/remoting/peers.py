"""The other end of a connection as plain sockets: builds and reads frames without the code under test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any


def raw_frame(
    code: int, opaque: int = 0, body: bytes = b"", *, flag: int = 0, ext: dict[str, str] | None = None
) -> bytes:
    """A JSON frame, as a Java client writes it."""
    header: dict[str, Any] = {
        "code": code,
        "flag": flag,
        "language": "JAVA",
        "opaque": opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": 409,
    }
    if ext is not None:
        header["extFields"] = ext
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    return struct.pack(">II", 4 + len(text) + len(body), len(text)) + text + body


class RawPeer:
    """One socket that sends what it is told and reads frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, *, limit: int = 2**25) -> RawPeer:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=limit))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read(self) -> tuple[dict[str, Any], bytes]:
        """The next frame: header (of a binary one without its ext fields) and body."""
        async with asyncio.timeout(60):
            (size,) = struct.unpack(">I", await self.reader.readexactly(4))
            payload = await self.reader.readexactly(size)
        (word,) = struct.unpack_from(">I", payload)
        length = word & 0xFFFFFF
        if word >> 24 == 1:
            code, _, version, opaque, flag, size = struct.unpack_from(">hbhiii", payload, 4)
            remark = payload[21 : 21 + size].decode() if size else None
            header = {"code": code, "version": version, "opaque": opaque, "flag": flag, "remark": remark}
            return header, payload[4 + length :]
        return json.loads(payload[4 : 4 + length]), payload[4 + length :]

    async def ask(
        self, code: int, opaque: int = 0, body: bytes = b"", **more: Any
    ) -> tuple[dict[str, Any], bytes]:
        await self.send(raw_frame(code, opaque, body, **more))
        return await self.read()

    async def read_end(self) -> bytes:
        """Everything until the peer closes."""
        async with asyncio.timeout(60):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass  # the other side was first


@contextlib.asynccontextmanager
async def peer(port: int) -> AsyncIterator[RawPeer]:
    raw = await RawPeer.connect(port)
    try:
        yield raw
    finally:
        await raw.close()


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait for `condition`; fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        await asyncio.sleep(0.005)


async def soon(awaitable: Awaitable[Any], within_s: float = 60.0) -> Any:
    """The result of `awaitable`; fails after `within_s`."""
    return await asyncio.wait_for(awaitable, within_s)
