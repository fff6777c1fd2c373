"""What goes over the port of a raft member: its greeting, then frames of messages. No I/O in here.

Our own, with a version of its own: i4 length, and so many bytes of MessagePack. The first frame of a
connection is the greeting; each later one is an array of messages (cometmq.raft) of one tick. What is
answered comes over the receiver's own connection. The entries of a message are its `payload`, as they lie in
the log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from cometmq.errors import ProtocolError
from cometmq.protocol.addresses import parse_address
from cometmq.raft import AnyMessage, AppendRequest

MAGIC = "CometMQ raft"
VERSION = 1
LONGEST_FRAME = 64 << 20
"""Bytes. A frame carries what `LogView.fit` allows, and one record may be as long as 32 MiB."""
MOST_MESSAGES = 1024
"""Of a frame. A tick has a few for each member."""

_LENGTH = struct.Struct(">I")
_LONGEST_GREETING = 4096


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """Who has connected. addr: where members reach it; broker_addr: where its broker is asked. begins: of a
    member without anything, the members of the group that it would begin, in order; else none."""

    magic: str
    version: int
    group: str
    sender: str
    addr: str
    broker_addr: str
    begins: tuple[str, ...] = ()


_encode = msgspec.msgpack.encode
_greeting = msgspec.msgpack.Decoder(Greeting)
_messages: msgspec.msgpack.Decoder[list[AnyMessage]] = msgspec.msgpack.Decoder(
    Annotated[list[AnyMessage], msgspec.Meta(max_length=MOST_MESSAGES)]
)


def greeting(group: str, sender: str, addr: str, broker_addr: str, begins: tuple[str, ...] = ()) -> bytes:
    """The first frame of a connection, which says who speaks."""
    data = _encode(Greeting(MAGIC, VERSION, group, sender, addr, broker_addr, begins))
    return _LENGTH.pack(len(data)) + data


def parts(messages: Sequence[AnyMessage]) -> Iterator[list[AnyMessage]]:
    """These, so that those of a part fit into a frame."""
    part: list[AnyMessage] = []
    size = 0
    for message in messages:
        length = len(message.payload or b"") if isinstance(message, AppendRequest) else 0
        if part and size + length > LONGEST_FRAME // 4:
            yield part
            part, size = [], 0
        part.append(message)
        size += length
    yield part


def frame(messages: Sequence[AnyMessage]) -> bytes:
    """One frame with all of these."""
    data = _encode(messages)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Takes the messages of one connection out of its bytes."""

    def __init__(self, group: str, me: str) -> None:
        """group: what the other side must belong to; me: who it must not be."""
        self.greeting: Greeting | None = None
        """Who is at the other end, once it has said so."""
        self._group = group
        self._me = me
        self._rest = bytearray()

    @property
    def unread(self) -> int:
        """Bytes of a frame that has not come whole."""
        return len(self._rest)

    def feed(self, data: bytes) -> Iterator[AnyMessage]:
        """The messages that have come whole. Raises ProtocolError for what no member of the group sends."""
        rest = self._rest
        rest += data
        at = 0
        try:
            while len(rest) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(rest, at)
                if length > (_LONGEST_GREETING if self.greeting is None else LONGEST_FRAME):
                    raise ProtocolError(f"a frame of a raft member has {length} bytes")
                end = at + _LENGTH.size + length
                if len(rest) < end:
                    break
                body = bytes(rest[at + _LENGTH.size : end])
                at = end
                if self.greeting is None:
                    self._greeted(body)
                else:
                    yield from self._decoded(body, self.greeting.sender)
        finally:
            del rest[:at]

    def _greeted(self, body: bytes) -> None:
        try:
            found = _greeting.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not the greeting of a raft member: {error}") from None
        if (found.magic, found.version) != (MAGIC, VERSION):
            raise ProtocolError(f"version {found.version} of {found.magic!r} is not known here: {VERSION} is")
        if found.group != self._group or not found.sender:
            raise ProtocolError(f"member {found.sender!r} of group {found.group!r} is not of {self._group!r}")
        if found.sender == self._me:
            raise ProtocolError(
                f"another one calls itself {self._me}, at {found.addr[:80]}: each member has a dLegerSelfId "
                "of its own, and dLegerPeers must name their addresses rightly"
            )
        for addr in (found.addr, found.broker_addr):
            if parse_address(addr) is None:
                raise ProtocolError(f"member {found.sender!r} cannot be reached at {addr[:40]!r}")
        self.greeting = found

    def _decoded(self, body: bytes, sender: str) -> list[AnyMessage]:
        try:
            messages = _messages.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not messages of a raft member: {error}") from None
        for message in messages:
            if message.sender != sender:
                raise ProtocolError(f"member {sender!r} speaks for {message.sender!r}")
        return messages
