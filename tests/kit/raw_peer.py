"""A plain-socket peer that builds and parses frames independently of the code under test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

from tests.kit.waiting import PATIENCE_S


def raw_frame(
    code: int,
    opaque: int = 0,
    body: bytes = b"",
    *,
    flag: int = 0,
    ext: dict[str, str] | None = None,
    version: int = 409,
) -> bytes:
    """Build a JSON frame as a Java client does."""
    header: dict[str, Any] = {
        "code": code,
        "flag": flag,
        "language": "JAVA",
        "opaque": opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": version,
    }
    if ext is not None:
        header["extFields"] = ext
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    return struct.pack(">II", 4 + len(text) + len(body), len(text)) + text + body


def header_and_body(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Parse a frame without its length word, in either serialization."""
    (word,) = struct.unpack_from(">I", payload)
    head, body = payload[4 : 4 + (word & 0xFFFFFF)], payload[4 + (word & 0xFFFFFF) :]
    if word >> 24 == 0:
        return json.loads(head), body
    code, _, version, opaque, flag, size = struct.unpack_from(">hBhiii", head)
    fields = {"code": code, "version": version, "opaque": opaque, "flag": flag}
    at = 17 + size
    end = at + 4 + int.from_bytes(head[at : at + 4])
    at += 4
    ext = {}
    while at < end:
        key_end = at + 2 + int.from_bytes(head[at : at + 2])
        value_end = key_end + 4 + int.from_bytes(head[key_end : key_end + 4])
        ext[head[at + 2 : key_end].decode()] = head[key_end + 4 : value_end].decode()
        at = value_end
    return {**fields, "remark": head[17 : 17 + size].decode() or None, "extFields": ext}, body


class RawPeer:
    """A socket that sends given frames and reads frames."""

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
        """Read the next frame and return its header and body."""
        return header_and_body(await self.read_payload())

    async def read_payload(self) -> bytes:
        """Read the next frame and return it without its length word."""
        async with asyncio.timeout(PATIENCE_S):
            (size,) = struct.unpack(">I", await self.reader.readexactly(4))
            return await self.reader.readexactly(size)

    async def ask(
        self, code: int, opaque: int = 0, body: bytes = b"", **more: Any
    ) -> tuple[dict[str, Any], bytes]:
        await self.send(raw_frame(code, opaque, body, **more))
        return await self.read()

    async def read_end(self) -> bytes:
        """Read until the peer closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass  # the peer closed first


@contextlib.asynccontextmanager
async def peer(port: int) -> AsyncIterator[RawPeer]:
    raw = await RawPeer.connect(port)
    try:
        yield raw
    finally:
        await raw.close()
