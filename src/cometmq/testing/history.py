"""Histories of client operations, one JSON object per line, for `check_history`.

An operation begins with an event of type `invoke` and ends with an event of type `ok`, `fail` (the operation
certainly had no effect) or `unknown` (it may have had an effect, as after a timeout or a killed process). An
operation without an end counts as unknown. The fields of the end supplement those of the beginning.

    {"type": "invoke", "op": "send", "process": "p1", "id": 7, "at": 0.5, "message": "m7", "topic": "T"}
    {"type": "ok", "op": "send", "process": "p1", "id": 7, "at": 0.6, "queue": "broker-a:0", "offset": 3}
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec

from cometmq.errors import CometError

Op = Literal["send", "end", "cancel", "read", "handle", "dead", "commit", "reset", "bounds", "own", "settled"]
Result = Literal["ok", "fail", "unknown"]


class HistoryError(CometError):
    """A line of a history is not a valid event.

    Attributes:
        line: Number of the line, counted from 1.
        problem: Description of the error.
    """

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line} of the history: {problem}")
        self.line = line
        self.problem = problem

    def __reduce__(self) -> tuple[type[HistoryError], tuple[int, str]]:
        return type(self), (self.line, self.problem)


class Facts(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Facts about an operation. Each kind of operation has its own fields.

    send       message, topic; key: the message is part of a strict order; due: earliest delivery time;
               half: the message is part of a transaction; with ok: queue, offset
    end        message, outcome: a transaction was committed or rolled back
    cancel     message: a delayed message was cancelled
    read       message, topic, queue, offset, group: a message was pulled, whether or not it was handled
    handle     group, message; topic, queue, offset of the stored message; key of a strict order: a listener
               was called. ok: handled; fail: to be redelivered; unknown: the process died
    dead       group, message: a dead letter was found
    commit     group, topic, queue, offset: the group's offset was stored, or read from the broker
    reset      group, topic, queue: an operator moved the group's offset
    bounds     topic, queue, min, max: the broker reported the min offset and the max offset (the last + 1)
    own        group, topic, queue: lasts from the assignment of a queue to a member until its revocation
               (unknown: until the member died)
    settled    group, topic, queues; members if broadcasting: lasts while no member joins or leaves
    """

    message: str = ""
    topic: str = ""
    queue: str = ""
    offset: int | None = None
    group: str = ""
    key: str = ""
    due: float | None = None
    half: bool = False
    outcome: Literal["", "commit", "rollback"] = ""
    min: int = 0
    max: int = 0
    queues: tuple[str, ...] = ()
    members: tuple[str, ...] = ()


class Event(Facts, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An event: one line of a history.

    Attributes:
        type: "invoke" for the beginning of an operation; "ok", "fail" or "unknown" for its end.
        op: Kind of the operation.
        process: Name of the process (or thread, or consumer) that performs the operation.
        id: Number of the operation, unique within its process.
        at: Time in seconds, by a clock that all processes share.
    """

    type: Literal["invoke", "ok", "fail", "unknown"]
    op: Op
    process: str
    id: int
    at: float


class Operation(Facts, kw_only=True, omit_defaults=True):
    """An operation, assembled from its two events. `ended` is None if the history has no event of its end."""

    op: Op
    process: str
    began: float
    ended: float | None = None
    result: Result = "unknown"


NEEDED: dict[str, tuple[str, ...]] = {
    "send": ("message", "topic"),
    "end": ("message", "outcome"),
    "cancel": ("message",),
    "read": ("message", "topic", "queue", "offset"),
    "handle": ("message", "group"),
    "dead": ("message", "group"),
    "commit": ("group", "topic", "queue", "offset"),
    "reset": ("group", "topic", "queue"),
    "bounds": ("topic", "queue"),
    "own": ("group", "topic", "queue"),
    "settled": ("group", "topic", "queues"),
}
FACTS = tuple(Facts.__struct_fields__)
_decode = msgspec.json.Decoder(Event).decode
_encode = msgspec.json.Encoder().encode


def operations(lines: Iterable[str | bytes]) -> list[Operation]:
    """Return the operations of a history in the order in which they began.

    Args:
        lines: Events as JSON. Empty lines are ignored.

    Raises:
        HistoryError: A line is not a valid event, or an operation's beginning or a required field is missing.
    """
    found: list[Operation] = []
    open_ones: dict[tuple[str, int], Operation] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise HistoryError(number, str(error)) from error
        at = (event.process, event.id)
        facts = {name: getattr(event, name) for name in FACTS}
        if event.type == "invoke":
            if at in open_ones:
                raise HistoryError(number, f"operation {event.id} of {event.process} has already begun")
            operation = Operation(op=event.op, process=event.process, began=event.at, **facts)
            open_ones[at] = operation
            found.append(operation)
            continue
        ended = open_ones.pop(at, None)
        if ended is None or ended.op != event.op:
            raise HistoryError(number, f"{event.op} {event.id} of {event.process} ends, but has not begun")
        if event.at < ended.began:
            raise HistoryError(number, f"{event.op} {event.id} of {event.process} ends before it begins")
        ended.ended, ended.result = event.at, event.type
        for name, value in facts.items():
            if value != Facts.__struct_defaults__[FACTS.index(name)]:
                setattr(ended, name, value)
        missing = [name for name in NEEDED[ended.op] if getattr(ended, name) in ("", None, ())]
        if missing:
            raise HistoryError(number, f"a {ended.op} has {' and '.join(missing)}")
    found.sort(key=lambda operation: operation.began)
    return found


class History:
    """A recorder of client operations, for any number of threads.

        history = History()
        sending = history.begin("send", message="m7", topic="T")
        history.ok(sending, queue="broker-a:0", offset=3)
        check_history(history.lines()).verify()

    The parameter `at` of the methods is the time of the event in seconds. Default: now.

    Args:
        process: Name of the process whose operations are recorded, unless a call names another one.
        clock: Function that returns the current time in seconds. All processes that write one history must
            share the clock.
    """

    def __init__(self, process: str = "test", clock: Callable[[], float] = time.time) -> None:
        self.process = process
        self._clock = clock
        self._events: list[Event] = []
        self._ids = itertools.count()
        self._open: dict[int, tuple[Op, str]] = {}
        self._lock = threading.Lock()

    def begin(self, op: Op, *, process: str = "", at: float | None = None, **facts: Any) -> int:
        """Record the beginning of an operation.

        Args:
            op: Kind of the operation, such as "send" or "handle".
            process: Name of the process. Default: the history's process.
            at: Time in seconds. Default: now.
            facts: Values of the operation's fields, as `cometmq.testing.history.Facts` lists them.

        Returns:
            Number of the operation, for `ok`, `fail` or `unknown`.
        """
        with self._lock:
            number = next(self._ids)
            self._open[number] = op, process or self.process
            self._add("invoke", number, at, facts)
            return number

    def ok(self, number: int, *, at: float | None = None, **facts: Any) -> None:
        """Record that an operation succeeded.

        `facts` are further fields, such as the offset of a sent message.
        """
        self._end("ok", number, at, facts)

    def fail(self, number: int, *, at: float | None = None, **facts: Any) -> None:
        """Record that an operation certainly had no effect."""
        self._end("fail", number, at, facts)

    def unknown(self, number: int, *, at: float | None = None, **facts: Any) -> None:
        """Record that an operation may have had an effect, as after a timeout."""
        self._end("unknown", number, at, facts)

    def note(self, op: Op, *, process: str = "", at: float | None = None, **facts: Any) -> None:
        """Record an operation that succeeded immediately. The parameters are those of `begin`."""
        self.ok(self.begin(op, process=process, at=at, **facts), at=at)

    def died(self, process: str) -> None:
        """Record that a process died, so the outcome of each of its unfinished operations is unknown."""
        with self._lock:
            for number in [number for number, (_, whose) in self._open.items() if whose == process]:
                self._add("unknown", number, None, {})
                del self._open[number]

    def lines(self) -> Iterator[bytes]:
        """Return the events recorded so far, one JSON object each, for `check_history` or a file."""
        with self._lock:
            events = list(self._events)
        return map(_encode, events)

    def _end(self, kind: Result, number: int, at: float | None, facts: dict[str, Any]) -> None:
        with self._lock:
            self._add(kind, number, at, facts)
            del self._open[number]

    def _add(
        self, kind: Literal["invoke"] | Result, number: int, at: float | None, facts: dict[str, Any]
    ) -> None:
        op, process = self._open[number]
        at = self._clock() if at is None else at
        self._events.append(Event(type=kind, op=op, process=process, id=number, at=at, **facts))
