"""Histories of what clients did, one JSON object a line, for `check_history`.

An operation begins with a line of type `invoke` and ends with `ok`, `fail` (it has certainly not happened) or
`unknown` (it may have happened: a time-out, a killed process). One without an end counts as unknown. The
end's fields complete those of the beginning.

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
    """A line of a history that means nothing. line: its number, from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line} of the history: {problem}")
        self.line = line
        self.problem = problem

    def __reduce__(self) -> tuple[type[HistoryError], tuple[int, str]]:
        return type(self), (self.line, self.problem)


class Facts(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is known of an operation.

    send       message, topic; key: of a strict order; due: not before; half: in a transaction; ok: queue,
               offset
    end        message, outcome: a transaction's end
    cancel     message: of one that is due later
    read       message, topic, queue, offset, group: a pull; it says nothing of what was done with it
    handle     group, message; topic, queue, offset where it was stored, key in a strict order: a listener's
               call. ok: done; fail: it shall come again; unknown: the process died
    dead       group, message: a dead letter that was found
    commit     group, topic, queue, offset: a group's offset as it was stored, or as the broker said
    reset      group, topic, queue: an operator moved the offset
    bounds     topic, queue, min, max: first offset and the one behind the last, as the broker said
    own        group, topic, queue: begins when a member takes a queue up, ends when it lets it go (unknown:
               when it died)
    settled    group, topic, queues; members if broadcasting: while it lasts nobody comes or goes
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
    """A line. at: seconds, by a clock that all processes share. id: of the operation, unique in its
    process."""

    type: Literal["invoke", "ok", "fail", "unknown"]
    op: Op
    process: str
    id: int
    at: float


class Operation(Facts, kw_only=True, omit_defaults=True):
    """An invoke and its end. ended: None if the history ends first."""

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
    """The operations of a history, in the order of their beginnings. Raises HistoryError."""
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
                raise HistoryError(number, f"operation {event.id} of {event.process} has begun already")
            operation = Operation(op=event.op, process=event.process, began=event.at, **facts)
            open_ones[at] = operation
            found.append(operation)
            continue
        ended = open_ones.pop(at, None)
        if ended is None or ended.op != event.op:
            raise HistoryError(number, f"{event.op} {event.id} of {event.process} ends and has not begun")
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
    """Records a history; from any thread. `lines` gives it to `check_history`, or to a file. at: the time of
    what is recorded, if it is not now.

    history = History()
    sending = history.begin("send", message="m7", topic="T")
    history.ok(sending, queue="broker-a:0", offset=3)
    """

    def __init__(self, process: str = "test", clock: Callable[[], float] = time.time) -> None:
        self.process = process
        self._clock = clock
        self._events: list[Event] = []
        self._ids = itertools.count()
        self._open: dict[int, tuple[Op, str]] = {}
        self._lock = threading.Lock()

    def begin(self, op: Op, *, process: str = "", at: float | None = None, **facts: Any) -> int:
        """An operation begins; returns its id. facts: fields of `Facts`."""
        with self._lock:
            number = next(self._ids)
            self._open[number] = op, process or self.process
            self._add("invoke", number, at, facts)
            return number

    def ok(self, number: int, *, at: float | None = None, **facts: Any) -> None:
        """It was done."""
        self._end("ok", number, at, facts)

    def fail(self, number: int, *, at: float | None = None, **facts: Any) -> None:
        """It was certainly not done."""
        self._end("fail", number, at, facts)

    def unknown(self, number: int, *, at: float | None = None, **facts: Any) -> None:
        """It may have been done."""
        self._end("unknown", number, at, facts)

    def note(self, op: Op, *, process: str = "", at: float | None = None, **facts: Any) -> None:
        """An operation that takes no time, and succeeded."""
        self.ok(self.begin(op, process=process, at=at, **facts), at=at)

    def died(self, process: str) -> None:
        """All that the process had begun is unknown from now on."""
        with self._lock:
            for number in [number for number, (_, whose) in self._open.items() if whose == process]:
                self._add("unknown", number, None, {})
                del self._open[number]

    def lines(self) -> Iterator[bytes]:
        """The events so far, one JSON object each."""
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
