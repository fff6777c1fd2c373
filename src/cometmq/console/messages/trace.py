"""The trace of a message: where it was sent and consumed, on one line of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from nicegui import ui
from nicegui.element import Element

from cometmq.admin import TraceView
from cometmq.console.frame.asking import Asking
from cometmq.console.frame.charts import missing_note
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View, text_element
from cometmq.console.frame.rows import Column, path_of
from cometmq.console.messages.search import ID_MAX, KEY_HITS_MAX, KEY_MAX, NAME_MAX, cut, message_columns
from cometmq.console.messages.timeline import ROWS_MAX, Bar, Span, bars, spans
from cometmq.errors import CometError
from cometmq.message import MessageExt
from cometmq.protocol.codes import TRACE_TOPIC

if TYPE_CHECKING:
    from cometmq.console.app import Console

KINDS = {"send": "trace.send", "call": "trace.call", "check": "trace.check", "recall": "trace.recall"}
BATCH_MAX = 32
"""Ids of a batch of Java's, joined by commas, that are looked for."""


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/trace", "trace.title", menu=75, icon="timeline")
    async def trace(view: View) -> None:
        view.title(view.t("trace.title"))
        asking = Asking(view, lambda place: _find(view, asking, place))
        asking.text("id", "messages.id", BATCH_MAX * ID_MAX)
        asking.text("topic", "messages.topic", NAME_MAX)
        asking.text("key", "messages.key", KEY_MAX)
        asking.text("trace", "trace.topic", NAME_MAX).props["placeholder"] = TRACE_TOPIC
        view.note(view.t("trace.hint"))
        asking.begin("messages.find", at_once=bool(view.query.get("id") or view.query.get("key")))


async def _find(view: View, asking: Asking, place: Element) -> None:
    msg_id, topic, key = (asking.value(name) for name in ("id", "topic", "key"))
    traced_in = asking.value("trace") or TRACE_TOPIC
    missing: dict[str, CometError] = {}
    if msg_id and msg_id.count(",") < BATCH_MAX:
        traces = view.admin.traces(msg_id, traced_in, missing=missing)
        await view.fill(place, traces, lambda found: _draw(view, found, missing))
    elif topic and key:
        question = view.admin.messages_by_key(topic, key, KEY_HITS_MAX, missing=missing)
        await view.fill(place, question, lambda found: _choose(view, found, traced_in, missing))
    else:
        place.clear()
        with place:
            view.empty("trace.needs")


def _choose(view: View, found: list[MessageExt], traced_in: str, missing: Mapping[str, CometError]) -> None:
    """The messages of a key, each with a link to its trace."""
    own = "" if traced_in == TRACE_TOPIC else traced_in

    def path(row: MessageExt) -> str:
        query = {"id": row.msg_id, **({"trace": own} if own else {})}
        return f"{path_of('trace')}?{urlencode(query)}"

    columns = [
        Column[MessageExt]("trace", "trace.title", lambda _row: view.t("trace.look"), link=path),
        *message_columns(),
    ]
    cut(found)
    missing_note(view, missing)
    view.note(view.t("trace.of_key"))
    Listing(view, columns, lambda row: row.offset_msg_id, empty="messages.none").update(found)


def _draw(view: View, found: list[TraceView], missing: Mapping[str, CometError]) -> None:
    missing_note(view, missing)
    all_spans = spans(found)
    if not all_spans:
        view.empty("trace.none")
        return
    if len(all_spans) >= ROWS_MAX:
        view.note(view.t("trace.most", n=ROWS_MAX), "problem")
    _line(view, all_spans)
    sends = [each for each in all_spans if each.kind in ("send", "recall")]
    if sends:
        with view.section("trace.sends"):
            _table(view, _send_columns(view), sends, "s")
    checks = [each for each in all_spans if each.kind == "check"]
    if checks:
        with view.section("trace.checks"):
            _table(view, _check_columns(view), checks, "t")
    with view.section("trace.calls"):
        calls = [each for each in all_spans if each.kind == "call"]
        _table(view, _call_columns(view), calls, "c")


# -- the line of time


def _line(view: View, found: list[Span]) -> None:
    drawn, first_ms, last_ms = bars(found)
    view.note(
        view.t(
            "trace.span", begin=view.shown("time", first_ms), end=view.shown("time", last_ms),
            n=f"{last_ms - first_ms:,}",
        )
    )  # fmt: skip
    with ui.element("ol").classes("timeline"):
        for bar in drawn:
            _bar(view, bar)


def _bar(view: View, bar: Bar) -> None:
    span = bar.span
    looks = {True: "ok", False: "failed", None: "open"}[span.good]
    with ui.element("li"):
        text_element("span", f"{view.t(KINDS[span.kind])}  {_who(view, span)}").classes("who")
        with ui.element("span").classes("lane").props("aria-hidden=true"):
            # Numbers of ours: left of the whole, and at least so wide that it is seen.
            ui.element("span").classes(f"bar-{looks}").style(
                f"left: min({bar.left}%, calc(100% - 6px)); width: max({bar.width}%, 6px)"
            )
        text_element("span", f"{_state(view, span)}  {_cost(view, span)}").classes(f"how {looks}")


def _who(view: View, span: Span) -> str:
    return span.who or view.t("trace.no_group")


def _state(view: View, span: Span) -> str:
    return span.state or view.t("trace.open")


def _cost(view: View, span: Span) -> str:
    return "" if span.cost_ms is None else view.t("trace.ms", n=f"{span.cost_ms:,}")


# -- tables


def _table(view: View, columns: list[Column[Span]], rows: list[Span], name: str) -> None:
    numbered = {id(row): str(number) for number, row in enumerate(rows)}
    listing = Listing(
        view, columns, lambda row: numbered[id(row)], name=name, empty="trace.no_calls",
        classes=lambda row: {"state": {True: "good", False: "bad", None: "warn"}[row.good]},
    )  # fmt: skip
    listing.update(rows)


def _common(view: View) -> tuple[Column[Span], Column[Span], Column[Span]]:
    return (
        Column("begin", "trace.begin", lambda row: row.begin_ms, "time"),
        Column("state", "trace.state", lambda row: _state(view, row), searched=True),
        Column("client", "trace.client", lambda row: row.client, searched=True),
    )


def _group_column(view: View, path: str | None) -> Column[Span]:
    return Column(
        "group", "trace.group", lambda row: _who(view, row), searched=True,
        link=(lambda row: path_of(path, row.who) if row.who else None) if path else None,
    )  # fmt: skip


def _send_columns(view: View) -> list[Column[Span]]:
    begin, state, client = _common(view)
    return [
        begin,
        _group_column(view, None),
        state,
        Column("cost", "trace.cost", lambda row: row.cost_ms, "number"),
        Column("topic", "messages.topic", lambda row: row.topic, link=_topic_path),
        Column("what", "trace.what", lambda row: row.what),
        Column("tag", "messages.tag", lambda row: row.tags),
        Column("keys", "messages.keys", lambda row: row.keys),
        Column("at", "trace.store_host", lambda row: row.store_host),
        Column("which", "trace.offset_id", lambda row: row.offset_msg_id, link=_message_path),
        client,
    ]


def _topic_path(row: Span) -> str | None:
    return path_of("topics", row.topic) if row.topic else None


def _message_path(row: Span) -> str | None:
    return path_of("messages", row.offset_msg_id) if row.offset_msg_id else None


def _check_columns(view: View) -> list[Column[Span]]:
    begin, state, client = _common(view)
    return [
        begin,
        _group_column(view, None),
        state,
        Column("check", "trace.from_check", lambda row: row.what == "check", "flag"),
        Column("which", "trace.transaction", lambda row: row.msg_id),
        Column("at", "trace.store_host", lambda row: row.store_host),
        client,
    ]


def _call_columns(view: View) -> list[Column[Span]]:
    begin, state, client = _common(view)
    return [
        _group_column(view, "groups"),
        begin,
        Column("end", "trace.end", lambda row: row.end_ms, "time"),
        Column("cost", "trace.cost", lambda row: row.cost_ms, "number"),
        state,
        Column("tries", "trace.tries", lambda row: row.tries, "number"),
        client,
    ]
