"""Errors that CometMQ raises.

All errors derive from CometError, carry their details as attributes, and can be pickled, because Spark sends
them between processes. An error is `Transient` if the same call may succeed later or at another server, and
`Terminal` if it fails until the cause is removed.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self, dataclass_transform

from cometmq.protocol.codes import response_name
from cometmq.text import printable, seconds, shortened

__all__ = [
    "BeingHandled", "BodyError", "BodyTooLarge", "BrokerError", "ClientStateError", "CometError",
    "ConfigError", "ConnectError", "FrameError", "HeaderError", "MessageIllegal", "MessageNotFound",
    "NoRouteError", "ProtocolError", "RaftMessageError", "RaftRefused", "RecordError", "RemotingError",
    "ReplyTimeout", "RequestNotSent", "RequestTimeout", "SendFailed", "SqlError", "StoreCorrupt",
    "StoreError", "Terminal", "TooManySends", "Transient", "YamlError",
]  # fmt: skip


def shown(value: object) -> str:
    """Return a value for an error text, quoted and shortened."""
    return shortened(repr(value), 120)


class SendTries(NamedTuple):
    """The attempts to send a message.

    For each attempt, `outcomes` holds the name of the broker and a description of the outcome.
    """

    topic: str
    took_s: float
    outcomes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        tries = "; ".join(f"{broker}: {outcome}" for broker, outcome in self.outcomes)
        times = f"{len(self.outcomes)} times to topic {self.topic} in {self.took_s * 1000:.0f} ms"
        return f"sent {times}, always failed: {tries}"


@dataclass_transform(eq_default=False)
class CometError(Exception):
    """Base class of all errors of this package. Subclasses with fields are dataclasses."""

    tries: ClassVar[SendTries | None] = None
    """The attempts of the send that ended with this error. None for errors of other calls."""
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if inspect.get_annotations(cls):
            dataclass(eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        # Unpickling an error calls its class with the values in `args`, so `args` must hold all fields.
        self.args = tuple(getattr(self, name) for name in self.__match_args__)


class Transient:
    """Mixin for errors after which the same call may succeed, perhaps at another server."""


class Terminal:
    """Mixin for errors after which the same call fails again until the cause is removed."""


# -- protocol


class ProtocolError(CometError, Terminal):
    """Received bytes violate the protocol."""


class FrameError(ProtocolError):
    """A frame is unreadable. The connection on which it was received must be closed."""

    problem: str


class HeaderError(ProtocolError):
    """A field of a command's header is missing or invalid. The request is answered with an error."""

    field: str
    value: object
    problem: str

    def __str__(self) -> str:
        if self.value is None:
            return f"field {self.field}: {self.problem}"
        return f"field {self.field} is {shown(self.value)}: {self.problem}"


class RaftMessageError(HeaderError):
    """A message between members of a raft group is invalid."""


class BodyError(ProtocolError):
    """A JSON or binary body is invalid. `field` is the path of the invalid field, "" for the whole body."""

    what: str
    problem: str
    field: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.field}: {self.problem}" if self.field else f"{self.what}: {self.problem}"


class BodyTooLarge(BodyError):
    """A body has more than `limit` bytes after decompression.

    `setting` names the setting that determines the limit, if there is one.
    """

    def __init__(self, what: str, limit: int, setting: str = "") -> None:
        raised_by = f" ({setting} raises the limit)" if setting else ""
        super().__init__(what, f"it is larger than {limit} bytes when decompressed{raised_by}")
        self.args = (what, limit, setting)  # the arguments with which unpickling calls __init__
        self.limit = limit
        self.setting = setting


class RecordError(ProtocolError):
    """Bytes are not a valid commit-log record. `pos` is the position of the record in the buffer."""

    def __init__(self, pos: int, field: str, problem: str) -> None:
        super().__init__(pos, field, problem)
        self.pos = pos
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"record at {self.pos}: {self.field}: {self.problem}"


# -- settings and use


class ConfigError(CometError, Terminal):
    """A setting is invalid. `where` is its source (file and line), if known."""

    key: str
    value: str
    expected: str
    where: str = ""

    def __str__(self) -> str:
        text = f"{self.key} = {shown(self.value)}: expected {self.expected}"
        return f"{self.where}: {text}" if self.where else text


class ClientStateError(CometError, Terminal):
    """A call is not permitted in the object's state: not started, started twice, or already closed."""

    problem: str


class MessageNotFound(CometError, Terminal):
    """No message has the requested id. `problem` describes where the client searched for the message."""

    msg_id: str
    problem: str

    def __str__(self) -> str:
        return f"no message with id {self.msg_id} {self.problem}"


class BeingHandled(CometError, Transient):
    """Another consumer is processing a message with the same idempotency key (see client.idempotency).

    The broker redelivers the message later.
    """

    key: str

    def __str__(self) -> str:
        return f"the message with key {shown(self.key)} is being handled elsewhere, or was taken over"


class MessageIllegal(CometError, Terminal):
    """A message, or the name of a topic or group, is invalid: every broker would reject it."""

    problem: str
    topic: str = ""
    field: str = ""

    def __str__(self) -> str:
        return self.problem


class SqlError(CometError, Terminal):
    """An SQL92 filter cannot be compiled. `column` is the position in its text, counted from 1."""

    column: int
    problem: str

    def __str__(self) -> str:
        return f"column {self.column}: {self.problem}"


class YamlError(CometError, Terminal):
    """A YAML file is invalid. `line` is the line in the file, counted from 1."""

    line: int
    problem: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.problem}"


# -- responses and connections


class BrokerError(CometError):
    """A server answered a request with an error code.

    Attributes:
        code: Response code.
        name: Name of the response code. Default: derived from `code`.
        remark: Error text of the server.
        broker_addr: Address ("host:port") of the server.
        topic: Topic of the message, if the request was about a message.
        key: Unique key of the message, if the request was about a message.
        hint: Possible remedy.
    """

    code: int
    name: str = ""
    remark: str = ""
    broker_addr: str = ""
    topic: str = ""
    key: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            self.name = response_name(self.code)
        super().__post_init__()

    def __str__(self) -> str:
        parts = [f"{self.name} ({self.code})"]
        if self.broker_addr:
            parts.append(f"from {self.broker_addr}")
        if self.topic:
            parts.append(f"for topic {self.topic}")
        if self.key:
            parts.append(f"message {self.key}")
        text = " ".join(parts)
        if self.remark:
            text += f": {self.remark}"
        return f"{text} ({self.hint})" if self.hint else text


class RemotingError(CometError, Transient):
    """A request was not delivered, or its response was not received. `addr` is the server's "host:port"."""

    addr: str


class ConnectError(RemotingError):
    """A connection could not be established."""

    addr: str
    problem: str = ""

    def __str__(self) -> str:
        return f"cannot connect to {printable(self.addr)}" + (f": {self.problem}" if self.problem else "")


class SendFailed(RemotingError):
    """The connection broke before the response.

    `cause_of` is the code of the request or a description of the request.
    """

    def __init__(self, addr: str, cause_of: int | str = "") -> None:
        super().__init__(addr)
        self.args = (addr, cause_of)
        self.code = cause_of if isinstance(cause_of, int) else None
        self.problem = cause_of if isinstance(cause_of, str) else ""

    def __str__(self) -> str:
        if self.code is not None:
            return f"the connection to {self.addr} was lost before request {int(self.code)} was answered"
        return f"the connection to {self.addr} was lost" + (f": {self.problem}" if self.problem else "")


class RequestTimeout(RemotingError):
    """No response was received within the timeout. The server may have executed the request."""

    addr: str
    code: int
    timeout_s: float = 0.0

    def __str__(self) -> str:
        within = f" within {seconds(self.timeout_s)}" if self.timeout_s else " in time"
        return f"no answer from {self.addr} to request {int(self.code)}{within}"


class ReplyTimeout(CometError, Transient):
    """A request message was sent, but no consumer replied within the timeout.

    A consumer may have processed the request nevertheless.

    Attributes:
        msg_id: Message id of the request.
        correlation_id: Id that connects the request and its reply.
    """

    topic: str
    msg_id: str
    correlation_id: str
    timeout_s: float

    def __str__(self) -> str:
        within = seconds(self.timeout_s)
        return f"no reply to message {self.msg_id} of topic {self.topic} within {within}"


class RequestNotSent(CometError, Transient):
    """The timeout of a request message ended before the message could be sent."""

    topic: str
    timeout_s: float

    def __str__(self) -> str:
        return f"the request to topic {self.topic} could not be sent within {seconds(self.timeout_s)}"


class TooManySends(CometError, Transient):
    """A callback of an asynchronous send began another send while `limit` sends were in progress.

    `limit` is twice `max_in_flight`. Outside of callbacks, a send waits instead of raising this error.
    """

    limit: int

    def __str__(self) -> str:
        return f"{self.limit} asynchronous sends are in progress or in their callbacks"


class NoRouteError(CometError, Transient):
    """No name server has a route to a topic.

    `asked` holds the address and the response of each name server.
    """

    topic: str
    asked: Sequence[tuple[str, str]] = ()
    hint: str = ""

    def __str__(self) -> str:
        asked = "; ".join(
            printable(answer) if addr in answer else f"{addr} answered '{printable(answer)}'"
            for addr, answer in self.asked
        )
        text = f"no route to topic {self.topic}: " + (asked or "no name server was asked")
        return f"{text}. {self.hint[0].upper()}{self.hint[1:]}" if self.hint else text


class RaftRefused(CometError, Transient):
    """A member of a raft group rejected a request.

    `leader` names the member that may accept the request, "" if it is unknown.
    """

    problem: str
    leader: str = ""

    def __str__(self) -> str:
        return f"{self.problem} (the leader is {printable(self.leader)})" if self.leader else self.problem


# -- files


class StoreError(CometError):
    """An operation on a store failed. `problem` is the reason."""

    problem: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


class StoreInUse(StoreError):
    """Another process, or another store of this process, uses the store or one of its directories."""


class StoreCorrupt(StoreError, Terminal):
    """A file of the store is corrupt."""


class CommandError(CometError):
    """An error whose code and remark are the answer to a request. Request handlers raise it."""

    code: int
    remark: str
    ext: dict[str, str] | None = None

    @classmethod
    def failed(cls, remark: str) -> Self:
        """Return an error with the code SYSTEM_ERROR, for failures that have no code of their own."""
        return cls(1, remark)

    def __str__(self) -> str:
        return f"{self.code}: {self.remark}"
