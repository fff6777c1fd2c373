"""Every error that CometMQ raises on purpose.

All derive from CometError, carry what they know as attributes, and survive pickling (Spark sends them between
processes). `Transient` marks those where the same call may succeed later or elsewhere, `Terminal` those where
it will not until somebody changes something.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, dataclass_transform

from cometmq.text import printable, seconds

__all__ = [
    "BeingHandled", "BodyError", "BodyTooLarge", "BrokerError", "ClientStateError", "CometError",
    "ConfigError", "ConnectError", "FrameError", "HeaderError", "MessageIllegal", "NoRouteError",
    "ProtocolError", "RaftMessageError", "RaftRefused", "RecordError", "RemotingError", "ReplyTimeout",
    "RequestNotSent", "RequestTimeout", "SendFailed", "SqlError", "StoreCorrupt", "StoreError", "Terminal",
    "Transient", "YamlError",
]  # fmt: skip

_VALUE_LIMIT = 120


def shown(value: object) -> str:
    """A value as an error text shows it: quoted and never long."""
    text = repr(value)
    return text if len(text) <= _VALUE_LIMIT else f"{text[:_VALUE_LIMIT]}... ({len(text)} characters)"


class SendTries(NamedTuple):
    """What became of the tries of a send. outcomes: broker name and what happened, try by try."""

    topic: str
    took_s: float
    outcomes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        tries = "; ".join(f"{broker}: {outcome}" for broker, outcome in self.outcomes)
        times = f"{len(self.outcomes)} times to topic {self.topic} in {self.took_s * 1000:.0f} ms"
        return f"sent {times}, always failed: {tries}"


@dataclass_transform(eq_default=False)
class CometError(Exception):
    """Root of all errors of this package. Those that declare fields are dataclasses."""

    tries: ClassVar[SendTries | None] = None
    """Of an error that ended a send, after one try or several; None for all others."""
    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if inspect.get_annotations(cls):
            dataclass(eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        # Unpickling calls the class with these.
        self.args = tuple(getattr(self, name) for name in self.__match_args__)


class Transient:
    """Mixin: trying again, perhaps elsewhere, can help."""


class Terminal:
    """Mixin: trying again without a change cannot help."""


# -- the wire


class ProtocolError(CometError, Terminal):
    """Bytes that are not what the protocol says."""


class FrameError(ProtocolError):
    """A frame that cannot be read at all: the connection it came on is to be closed."""

    problem: str


class HeaderError(ProtocolError):
    """A field of a command's header is missing or cannot be read: the request is answered with an error."""

    field: str
    value: object
    problem: str

    def __str__(self) -> str:
        if self.value is None:
            return f"field {self.field}: {self.problem}"
        return f"field {self.field} is {shown(self.value)}: {self.problem}"


class RaftMessageError(HeaderError):
    """A message between members of a raft group that no member of the group would send."""


class BodyError(ProtocolError):
    """A body (JSON or binary) that cannot be read. `field` is the path to the place, "" for the whole."""

    what: str
    problem: str
    field: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.field}: {self.problem}" if self.field else f"{self.what}: {self.problem}"


class BodyTooLarge(BodyError):
    """A body that says it is, or turns out, larger than `limit` bytes when decompressed. `setting`: what
    raises the limit, if anything does."""

    def __init__(self, what: str, limit: int, setting: str = "") -> None:
        raised_by = f" ({setting} raises the limit)" if setting else ""
        super().__init__(what, f"it is larger than {limit} bytes when decompressed{raised_by}")
        self.args = (what, limit, setting)  # what pickling hands back to this __init__
        self.limit = limit
        self.setting = setting


class RecordError(ProtocolError):
    """Bytes that are no commit-log record. `pos` is the position of the record in the buffer."""

    def __init__(self, pos: int, field: str, problem: str) -> None:
        super().__init__(pos, field, problem)
        self.pos = pos
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"record at {self.pos}: {self.field}: {self.problem}"


# -- settings and use


class ConfigError(CometError, Terminal):
    """A setting that cannot be used. `where` is the place that it came from (file and line), if known."""

    key: str
    value: str
    expected: str
    where: str = ""

    def __str__(self) -> str:
        text = f"{self.key} = {shown(self.value)}: expected {self.expected}"
        return f"{self.where}: {text}" if self.where else text


class ClientStateError(CometError, Terminal):
    """A call that does not fit the state of the object: not started, already closed, started twice."""

    problem: str


class MessageNotFound(CometError, Terminal):
    """No message has this id; problem: where it was looked for."""

    msg_id: str
    problem: str

    def __str__(self) -> str:
        return f"no message with id {self.msg_id} {self.problem}"


class BeingHandled(CometError, Transient):
    """A message whose key somebody else works on just now (see client.idempotency); it comes again later."""

    key: str

    def __str__(self) -> str:
        return f"the message with key {shown(self.key)} is being handled elsewhere, or was taken over"


class MessageIllegal(CometError, Terminal):
    """A message (or a topic or group name) that no broker would take."""

    problem: str
    topic: str = ""
    field: str = ""

    def __str__(self) -> str:
        return self.problem


class SqlError(CometError, Terminal):
    """An SQL92 filter that cannot be compiled. column: where in its text, from 1 on."""

    column: int
    problem: str

    def __str__(self) -> str:
        return f"column {self.column}: {self.problem}"


class YamlError(CometError, Terminal):
    """A YAML file that cannot be read. line: where in it, from 1 on."""

    line: int
    problem: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.problem}"


# -- the other side


class BrokerError(CometError):
    """A server answered with a code that means failure.

    code: the response code; name: its name (found by itself if not given); remark: the server's own words;
    broker_addr: who answered; topic and key: of the message, where the request was about one; hint: what may
    help.
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
            # Here and not above: codes.py raises errors of this module.
            from cometmq.protocol.codes import response_name

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
    """The request did not get to a server, or no answer came back. `addr` is the server's "host:port"."""

    addr: str


class ConnectError(RemotingError):
    """No connection could be made."""

    addr: str
    problem: str = ""

    def __str__(self) -> str:
        return f"cannot connect to {printable(self.addr)}" + (f": {self.problem}" if self.problem else "")


class SendFailed(RemotingError):
    """The connection broke before the answer came. `cause_of` is the request's code, or what went wrong in
    words."""

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
    """No answer within the time allowed. The request may still have been carried out."""

    addr: str
    code: int
    timeout_s: float = 0.0

    def __str__(self) -> str:
        within = f" within {seconds(self.timeout_s)}" if self.timeout_s else " in time"
        return f"no answer from {self.addr} to request {int(self.code)}{within}"


class ReplyTimeout(CometError, Transient):
    """A request was sent, and no consumer replied in time: perhaps it was handled, perhaps not yet.

    msg_id: of the request; correlation_id: by which its reply would be known.
    """

    topic: str
    msg_id: str
    correlation_id: str
    timeout_s: float

    def __str__(self) -> str:
        within = seconds(self.timeout_s)
        return f"no reply to message {self.msg_id} of topic {self.topic} within {within}"


class RequestNotSent(CometError, Transient):
    """The time of a request was over before it could be sent."""

    topic: str
    timeout_s: float

    def __str__(self) -> str:
        return f"the request to topic {self.topic} could not be sent within {seconds(self.timeout_s)}"


class NoRouteError(CometError, Transient):
    """No name server knows brokers for a topic. `asked` is who was asked and what each answered."""

    topic: str
    asked: Sequence[tuple[str, str]] = ()
    hint: str = ""

    def __str__(self) -> str:
        asked = "; ".join(f"{addr} answered '{printable(answer)}'" for addr, answer in self.asked)
        text = f"no route to topic {self.topic}: " + (asked or "no name server was asked")
        return f"{text}. {self.hint[0].upper()}{self.hint[1:]}" if self.hint else text


class RaftRefused(CometError, Transient):
    """A member of a raft group cannot do what was asked. leader: who perhaps can, "" if none is known."""

    problem: str
    leader: str = ""

    def __str__(self) -> str:
        return f"{self.problem} (the leader is {printable(self.leader)})" if self.leader else self.problem


# -- files


class StoreError(CometError):
    """The store cannot do what was asked."""

    problem: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


class StoreCorrupt(StoreError, Terminal):
    """A file of the store does not hold what it must."""


class CommandError(CometError):
    """Raised by a handler: the request is answered with this code and remark."""

    code: int
    remark: str
    ext: dict[str, str] | None = None

    def __str__(self) -> str:
        return f"{self.code}: {self.remark}"
