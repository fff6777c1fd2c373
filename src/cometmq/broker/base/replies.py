"""Responses to sends and pulls, formatted directly as bytes with the JSON header of Apache's 4.9 broker.

A successful response to a send must have MSG_REGION in its `extFields`, because the Java client reads that
field without checking that it exists (docs/reference/remoting.md, Sending). A client accepts a JSON response
even if its request was in the binary serialisation (docs/reference/remoting.md, Serialisation of answers).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence

import msgspec

from cometmq.protocol.codes import VERSION_4_9_7
from cometmq.protocol.frame import RESPONSE_FLAG, Frame
from cometmq.protocol.headers import SendMessageResponseHeader
from cometmq.remoting import Connection
from cometmq.store import TickMessage


class Sender(msgspec.Struct, frozen=True, gc=False):
    """The sender of a message, to whose request the broker must respond."""

    connection: Connection
    opaque: bytes  # The request's number, in decimal digits
    queue_id: int
    waits: bool  # Whether to respond only when the message is as durable as the broker promises
    more: bytes = b""  # Further ext fields of the response, see `transaction_field` and `recall_field`


_lengths = struct.Struct(">II").pack
_TAIL = b'},"flag":1,"language":"JAVA","opaque":%d%b,"serializeTypeCurrentRPC":"JSON","version":' + (
    b"%d}" % VERSION_4_9_7
)
_SEND = (
    b'{"code":%d,"extFields":{"MSG_REGION":%b,"TRACE_ON":"%b","msgId":"%b","queueId":"%d","queueOffset":"%d"%b'
    + _TAIL
)
# The template of a success response. It is filled in two steps: first with the values that all responses
# share, then with those of one message.
_OK = (
    b'{"code":0,"extFields":{"MSG_REGION":%b,"TRACE_ON":"%b","msgId":"%b%%016X","queueId":"%%d",'
    b'"queueOffset":"%%d"%%b},"flag":1,"language":"JAVA","opaque":%%b,"serializeTypeCurrentRPC":"JSON","version":'
    b"%d}"
)
_PULL = (
    b'{"code":%d,"extFields":{"maxOffset":"%d","minOffset":"%d","nextBeginOffset":"%d",'
    + b'"suggestWhichBrokerId":"%d"'
    + _TAIL
)

# For each header size below 512, the first 8 bytes of a frame without a body: the length of the rest of the
# frame, and the length of the header.
_WORDS = [_lengths(4 + size, size) for size in range(512)]


def frame_of(header: bytes, body_size: int = 0) -> bytes:
    """Return a JSON frame up to its body, whose `body_size` bytes the caller sends next."""
    size = len(header)
    return _lengths(4 + size + body_size, size) + header


def recall_field(handle: str) -> bytes:
    """Return the encoded ext field for the recall handle of a message with a delivery time, or b""."""
    return b',"recallHandle":"%b"' % handle.encode() if handle else b""


def transaction_field(unique_key: bytes) -> bytes:
    """Return the encoded ext field for a half message's transaction id, which is its unique key, or b""."""
    return _id_field(b"transactionId", unique_key)


def first_id_field(unique_key: bytes) -> bytes:
    """Return the encoded ext field for the unique key of the message that a duplicate repeats, or b""."""
    return _id_field(b"firstMsgId", unique_key)


def _id_field(name: bytes, unique_key: bytes) -> bytes:
    text = unique_key.decode("utf-8", "replace")
    return b',"%b":%b' % (name, json.dumps(text).encode()) if text else b""


class SendReplies:
    """Formats the responses to sends: requests 10, 310 and 320."""

    __slots__ = ("_before", "_ids_prefix", "_ok", "_region", "_trace")

    def __init__(self, region: str, trace_on: bool) -> None:
        self._ids_prefix = b""
        self.configure(region, trace_on)

    def configure(self, region: str, trace_on: bool) -> None:
        """Set `regionId` and `traceOn`, which responses contain so that clients can trace messages."""
        self._region = json.dumps(region).encode().replace(b"%", b"%%")
        self._trace = b"true" if trace_on else b"false"
        self._fill_in()

    def _fill_in(self) -> None:
        """Put the values that all responses share into the response templates."""
        self._before = _SEND.replace(b"%b", self._region, 1).replace(b"%b", self._trace, 1)
        self._ok = _OK % (self._region, self._trace, self._ids_prefix, VERSION_4_9_7)

    def use_host(self, store_host: bytes) -> None:
        """Set the broker's address, with which all message ids begin. It has 8 or 20 bytes, as in records."""
        self._ids_prefix = store_host.hex().upper().encode()
        self._fill_in()

    def message_id(self, physical_offset: int) -> bytes:
        """Return the message id (address and log position) of a record of this broker."""
        return b"%b%016X" % (self._ids_prefix, physical_offset)

    def message_ids(self, physical_offsets: Sequence[int]) -> bytes:
        """Return the message ids of a batch, joined by commas. They are formatted in one step, for speed."""
        positions = struct.pack(f">{len(physical_offsets)}q", *physical_offsets).hex(",", 8).upper().encode()
        return self._ids_prefix + positions.replace(b",", b"," + self._ids_prefix)

    def answer(self, messages: Iterable[TickMessage]) -> None:
        """Send a success response for each of these messages, none of which is part of a batch."""
        template = self._ok
        for message in messages:
            sender: Sender = message.sender
            if sender.connection.partner is not None and not sender.more:
                sender.connection.answer(self._frame(sender, message))
                continue
            header = template % (
                message.physical_offset, sender.queue_id, message.queue_offset, sender.more, sender.opaque
            )  # fmt: skip
            size = len(header)
            sender.connection.write(_WORDS[size] + header if size < 512 else frame_of(header))

    def _frame(self, sender: Sender, message: TickMessage) -> Frame:
        """Return the response for a client in memory."""
        header = SendMessageResponseHeader(
            self.message_id(message.physical_offset).decode(), sender.queue_id, message.queue_offset
        )
        return Frame(code=0, opaque=int(sender.opaque), flag=RESPONSE_FLAG, typed=header)

    def reply(
        self,
        code: int,
        opaque: int,
        ids: bytes,
        queue_id: int,
        queue_offset: int,
        more: bytes = b"",
    ) -> bytes:
        """Return a response with ids of stored messages, which may have missed their flush or replication."""
        return frame_of(self._before % (code, ids, queue_id, queue_offset, more, opaque, b""))


def pull_reply(
    code: int,
    opaque: int,
    remark: bytes,
    offsets: tuple[int, int, int],
    suggested_broker: int = 0,
    body_size: int = 0,
) -> bytes:
    """Return the beginning of a pull's response. `offsets`: next to pull, the queue's minimum and maximum."""
    next_begin, minimum, maximum = offsets
    more = b',"remark":"%b"' % remark
    return frame_of(_PULL % (code, maximum, minimum, next_begin, suggested_broker, opaque, more), body_size)
