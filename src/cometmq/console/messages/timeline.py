"""The traces of a message as time spans: sends, calls of listeners, and checks of its transaction.

A value that a trace does not contain is None; times are never estimated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cometmq.admin import TraceView
from cometmq.protocol.traces import ConsumeCode, EndTransaction, MessageType, Pub, Recall, SubAfter, SubBefore

MAX_SPANS = 500
"""Maximum number of a message's time spans that the page shows."""


@dataclass(frozen=True)
class Span:
    """A time span of a message.

    Attributes:
        kind: `send`, `call`, `check` or `recall`.
        begin_ms: Start in milliseconds since 1970. If the span has no duration, start and end are equal.
        state: Name of the result in the trace; None if the trace contains no result.
        good: Whether the result is a success; None if that is unknown.
        tries: Number of retries before this call.
    """

    kind: str
    group: str | None
    begin_ms: int | None
    end_ms: int | None
    cost_ms: int | None
    state: str | None
    good: bool | None
    client: str
    tries: int = 0
    store_host: str = ""
    topic: str = ""
    msg_id: str = ""
    tags: str = ""
    keys: str = ""
    what: str = ""
    offset_msg_id: str = ""


def spans(views: Iterable[TraceView]) -> list[Span]:
    """Return the time spans of a message: sends first, then all others sorted by group and time."""
    found: list[Span] = []
    begun: dict[tuple[str, str], TraceView] = {}
    ended: dict[tuple[str, str], TraceView] = {}
    for view in views:
        trace = view.trace
        if isinstance(trace, SubBefore):
            begun.setdefault((trace.request_id, trace.msg_id), view)
        elif isinstance(trace, SubAfter):
            ended.setdefault((trace.request_id, trace.msg_id), view)
        elif isinstance(trace, Pub):
            found.append(_send(view, trace))
        elif isinstance(trace, EndTransaction):
            found.append(_check(view, trace))
        else:
            found.append(_recall(view, trace))
    keys = list(begun) + [key for key in ended if key not in begun]
    found += [_call(begun.get(key), ended.get(key)) for key in keys]
    order = {"send": 0, "check": 1, "recall": 2, "call": 3}
    found.sort(key=lambda each: (order[each.kind], each.group or "", _time(each) or 0))
    return found[:MAX_SPANS]


def _time(span: Span) -> int | None:
    return span.begin_ms if span.begin_ms is not None else span.end_ms


def _send(view: TraceView, trace: Pub) -> Span:
    return Span(
        kind="send", group=trace.group, begin_ms=trace.timestamp_ms,
        end_ms=trace.timestamp_ms + max(0, trace.cost_ms), cost_ms=trace.cost_ms,
        state="SUCCESS" if trace.success else "FAILED", good=trace.success,
        client=trace.client_host or view.client_host, store_host=trace.store_host or "",
        topic=trace.topic or "", msg_id=trace.msg_id, tags=trace.tags or "", keys=trace.keys or "",
        what=_name(MessageType, trace.message_type), offset_msg_id=trace.offset_msg_id or "",
    )  # fmt: skip


def _check(view: TraceView, trace: EndTransaction) -> Span:
    good = {"COMMIT_MESSAGE": True, "ROLLBACK_MESSAGE": False}.get(trace.state)
    return Span(
        kind="check", group=trace.group, begin_ms=trace.timestamp_ms, end_ms=trace.timestamp_ms, cost_ms=None,
        state=trace.state, good=good, client=view.client_host, store_host=trace.store_host or "",
        topic=trace.topic or "", msg_id=trace.transaction_id or trace.msg_id, tags=trace.tags or "",
        keys=trace.keys or "", what="check" if trace.from_check else "end",
    )  # fmt: skip


def _recall(view: TraceView, trace: Recall) -> Span:
    return Span(
        kind="recall", group=trace.group, begin_ms=trace.timestamp_ms, end_ms=trace.timestamp_ms,
        cost_ms=None, state="SUCCESS" if trace.success else "FAILED", good=trace.success,
        client=view.client_host, topic=trace.topic or "", msg_id=trace.msg_id,
    )  # fmt: skip


def _call(before: TraceView | None, after: TraceView | None) -> Span:
    """Return the time span of a listener call from its two trace records, one of which may be None."""
    begun = before.trace if before is not None and isinstance(before.trace, SubBefore) else None
    ended = after.trace if after is not None and isinstance(after.trace, SubAfter) else None
    client = before or after
    begin_ms = begun.timestamp_ms if begun is not None else None
    end_ms = cost_ms = state = good = None
    if ended is not None:
        cost_ms, good = ended.cost_ms, ended.success
        state = _name(ConsumeCode, ended.context_code) if ended.context_code else None
        state = state or ("SUCCESS" if ended.success else "FAILED")
        end_ms = ended.timestamp_ms
        if end_ms is None and begin_ms is not None:
            end_ms = begin_ms + max(0, ended.cost_ms)
        if begin_ms is not None and end_ms is not None:
            end_ms = max(begin_ms, end_ms)  # the reported end is too early if the client's clock was set back
    return Span(
        kind="call",
        group=(begun.group if begun is not None else None) or (ended.group if ended is not None else None),
        begin_ms=begin_ms, end_ms=end_ms, cost_ms=cost_ms, state=state, good=good,
        client=client.client_host if client is not None else "",
        tries=begun.retry_times if begun is not None else 0,
        msg_id=client.trace.msg_id if client is not None else "",
    )  # fmt: skip


def _name(kind: type[MessageType | ConsumeCode], number: int) -> str:
    """Return the name of the enum member with a number, or the number as text if there is no such member."""
    try:
        return kind(number).name
    except ValueError:
        return str(number)


@dataclass(frozen=True)
class Bar:
    """A time span of a message, and its position and width in percent of the timeline."""

    span: Span
    left: float
    width: float


def bars(found: Sequence[Span]) -> tuple[list[Bar], int, int]:
    """Return a bar for each time span with a known time, and the first and the last millisecond of all bars.

    A time span without an end becomes a bar without width. Without any bar, both times are 0.
    """
    known = [(each, begin) for each in found if (begin := _time(each)) is not None]
    if not known:
        return [], 0, 0
    first = min(begin for _, begin in known)
    last = max(max(begin, each.end_ms or begin) for each, begin in known)
    whole = max(1, last - first)
    return (
        [
            Bar(
                each,
                round((begin - first) * 100 / whole, 3),
                round((max(begin, each.end_ms or begin) - begin) * 100 / whole, 3),
            )
            for each, begin in known
        ],
        first,
        last,
    )
