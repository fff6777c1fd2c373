"""The protocol between raft members, without I/O: a handshake, then frames of messages.

The format is CometMQ's own and has its own version. A frame is a 4-byte length, then that many bytes of
MessagePack. The first frame of a connection is the handshake; each later frame is an array of messages
(cometmq.raft) of one event-loop tick. The receiver sends its responses over its own connection. The `payload`
of a message holds log entries in the same encoding as the log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

import msgspec

from cometmq.errors import ProtocolError
from cometmq.protocol.addresses import parse_address
from cometmq.raft import AnyMessage, AppendRequest

MAGIC = "CometMQ raft"
VERSION = 1
MAX_FRAME_BYTES = 64 << 20
"""More than a message with a single record, which may have 32 MiB."""
MAX_MESSAGES_PER_FRAME = 1024
"""The maximum number of messages in a frame. An event-loop tick has only a few for each member."""

_LENGTH = struct.Struct(">I")
_MAX_HANDSHAKE_BYTES = 4096


class Handshake(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of a connection, which describes its sender.

    Attributes:
        addr: The address at which other members reach the sender.
        broker_addr: The address of the sender's broker.
        begins: The sorted members of the group that the sender would create, if the sender has no state yet.
            Otherwise empty.
    """

    magic: str
    version: int
    group: str
    sender: str
    addr: str
    broker_addr: str
    begins: tuple[str, ...] = ()


T = TypeVar("T")
_handshake = msgspec.msgpack.Decoder(Handshake)
_messages: msgspec.msgpack.Decoder[list[AnyMessage]] = msgspec.msgpack.Decoder(
    Annotated[list[AnyMessage], msgspec.Meta(max_length=MAX_MESSAGES_PER_FRAME)]
)


def handshake(group: str, sender: str, addr: str, broker_addr: str, begins: tuple[str, ...] = ()) -> bytes:
    """Return the encoded handshake, with which each connection begins."""
    return _packed(Handshake(MAGIC, VERSION, group, sender, addr, broker_addr, begins))


def parts(messages: Sequence[AnyMessage]) -> Iterator[list[AnyMessage]]:
    """Split messages into lists that fit into one frame each."""
    part: list[AnyMessage] = []
    size = 0
    for message in messages:
        length = len(message.payload or b"") if isinstance(message, AppendRequest) else 0
        if part and size + length > MAX_FRAME_BYTES // 4:
            yield part
            part, size = [], 0
        part.append(message)
        size += length
    yield part


def frame(messages: Sequence[AnyMessage]) -> bytes:
    """Return one frame that contains all `messages`."""
    return _packed(messages)


def _packed(content: object) -> bytes:
    data = msgspec.msgpack.encode(content)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Decodes the frames that arrive on one connection.

    The sender must belong to `group` and have another name than this member, `me`.
    """

    def __init__(self, group: str, me: str) -> None:
        self.handshake: Handshake | None = None
        """The sender's handshake, or None before it has arrived."""
        self._group = group
        self._me = me
        self._rest = bytearray()

    @property
    def unread(self) -> int:
        """The number of received bytes that do not form a complete frame yet."""
        return len(self._rest)

    def feed(self, data: bytes) -> Iterator[AnyMessage]:
        """Decode received bytes. Yield the messages that are now complete.

        Raises ProtocolError if no correct member of the group would send this data.
        """
        rest = self._rest
        rest += data
        at = 0
        try:
            while len(rest) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(rest, at)
                if length > (_MAX_HANDSHAKE_BYTES if self.handshake is None else MAX_FRAME_BYTES):
                    raise ProtocolError(f"a frame of {length} bytes from a raft member is too long")
                end = at + _LENGTH.size + length
                if len(rest) < end:
                    break
                body = bytes(rest[at + _LENGTH.size : end])
                at = end
                if self.handshake is None:
                    self._check_handshake(_decoded(_handshake, body, "handshake of"))
                    continue
                messages = _decoded(_messages, body, "messages from")
                for message in messages:
                    if message.sender != (sender := self.handshake.sender):
                        other = message.sender
                        raise ProtocolError(f"member {sender!r} sent a message in the name of {other!r}")
                yield from messages
        finally:
            del rest[:at]

    def _check_handshake(self, found: Handshake) -> None:
        if (found.magic, found.version) != (MAGIC, VERSION):
            raise ProtocolError(
                f"unsupported version {found.version} of {found.magic!r}: {VERSION} is supported"
            )
        if found.group != self._group or not found.sender:
            raise ProtocolError(
                f"member {found.sender!r} of group {found.group!r} is not a member of group {self._group!r}"
            )
        if found.sender == self._me:
            raise ProtocolError(
                f"another member has the name {self._me}, at {found.addr[:80]}: give each member its "
                "own dLegerSelfId, and its own address in dLegerPeers"
            )
        for addr in (found.addr, found.broker_addr):
            if parse_address(addr) is None:
                raise ProtocolError(f"member {found.sender!r} cannot be reached at {addr[:40]!r}")
        self.handshake = found


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes, what: str) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"invalid {what} a raft member: {error}") from None
