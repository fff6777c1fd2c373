"""The messages of a call inside its data: a flag byte, a length of 4 bytes, and the message itself."""

from __future__ import annotations

import struct

from cometmq.grpc.rpc.status import GrpcStatus, RpcError

PREFIX = 5  # Bytes before a message

_pack_prefix = struct.Struct(">BI").pack
_prefix_at = struct.Struct(">BI").unpack_from


def frame_message(message: bytes) -> bytes:
    """Return an uncompressed message with its prefix."""
    return _pack_prefix(0, len(message)) + message


class MessageReader:
    """Splits the data of one call into messages.

    Args:
        limit: The maximum size of a message in bytes.
    """

    __slots__ = ("_buffer", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    @property
    def buffered(self) -> int:
        """The number of bytes kept of an incomplete message."""
        return len(self._buffer)

    def read(self, data: bytes) -> list[bytes]:
        """Return the messages that the next part of the data completes. Raises RpcError."""
        buffer: bytes | bytearray = data
        if not self._buffer and len(data) >= PREFIX and PREFIX + self._size_at(data, 0) == len(data):
            return [data[PREFIX:]]
        if self._buffer:
            self._buffer += data
            buffer = self._buffer
        pos = 0
        found = []
        while len(buffer) - pos >= PREFIX:
            stop = pos + PREFIX + self._size_at(buffer, pos)
            if stop > len(buffer):
                break
            with memoryview(buffer) as view:
                found.append(bytes(view[pos + PREFIX : stop]))
            pos = stop
        if buffer is self._buffer:
            del self._buffer[:pos]
        else:
            self._buffer += buffer[pos:]
        return found

    def _size_at(self, buffer: bytes | bytearray, pos: int) -> int:
        flag, size = _prefix_at(buffer, pos)
        if flag == 1:
            raise RpcError(GrpcStatus.UNIMPLEMENTED, "a message is compressed, which is not supported")
        if flag:
            raise RpcError(GrpcStatus.INTERNAL, f"the flag byte of a message is {flag}, not 0")
        if size > self._limit:
            problem = f"a message of {size} bytes is larger than the limit of {self._limit} bytes"
            raise RpcError(GrpcStatus.RESOURCE_EXHAUSTED, problem)
        return int(size)
