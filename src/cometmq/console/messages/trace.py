"""The trace of a message: its sends and its consumption on one timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import urlencode

from nicegui import ui
from nicegui.element import Element

from cometmq.admin import TraceView
from cometmq.console.messages.search import (
    MAX_ID_LENGTH,
    MAX_KEY_HITS,
    MAX_KEY_LENGTH,
    MAX_TOPIC_LENGTH,
    show_messages,
)
from cometmq.console.messages.timeline import MAX_SPANS, Bar, Span, bars, spans
from cometmq.console.widgets.forms import SearchFields
from cometmq.console.widgets.listing import Listing
from cometmq.console.widgets.page import View, text_element
from cometmq.console.widgets.rows import Column, path_of
from cometmq.console.widgets.services import page
from cometmq.errors import CometError
from cometmq.message import MessageExt
from cometmq.protocol.codes import TRACE_TOPIC

KINDS = {"send": "trace.send", "call": "trace.call", "check": "trace.check", "recall": "trace.recall"}
MAX_BATCH_IDS = 32
"""Maximum number of ids in a batch of Java's client, which separates the ids by commas."""


@page("/trace", "trace.title", menu=75, icon="timeline")
async def trace_page(view: View) -> None:
    view.title(view.t("trace.title"))
    fields = SearchFields(view, lambda place: _find(view, fields, place))
    fields.text("id", "messages.id", MAX_BATCH_IDS * MAX_ID_LENGTH)
    fields.text("topic", "messages.topic", MAX_TOPIC_LENGTH)
    fields.text("key", "messages.key", MAX_KEY_LENGTH)
    fields.text("trace", "trace.topic", MAX_TOPIC_LENGTH).props["placeholder"] = TRACE_TOPIC
    view.note(view.t("trace.hint"))
    fields.add_button("messages.find", search_now=bool(view.query.get("id") or view.query.get("key")))


async def _find(view: View, fields: SearchFields, place: Element) -> None:
    msg_id, topic, key = (fields.value(name) for name in ("id", "topic", "key"))
    trace_topic = fields.value("trace") or TRACE_TOPIC
    missing: dict[str, CometError] = {}
    if msg_id and msg_id.count(",") < MAX_BATCH_IDS:
        traces = view.admin.traces(msg_id, trace_topic, missing=missing)
        await view.load(place, traces, lambda found: _draw(view, found, missing))
    elif topic and key:
        question = view.admin.messages_by_key(topic, key, MAX_KEY_HITS, missing=missing)
        await view.load(place, question, lambda found: _choose(view, found, trace_topic, missing))
    else:
        place.clear()
        with place:
            view.empty("trace.needs")


def _choose(view: View, found: list[MessageExt], trace_topic: str, missing: Mapping[str, CometError]) -> None:
    """Add the messages with a key, each with a link to its trace."""

    def path(row: MessageExt) -> str:
        query = {"id": row.msg_id, **({} if trace_topic == TRACE_TOPIC else {"trace": trace_topic})}
        return f"{path_of('trace')}?{urlencode(query)}"

    view.missing_brokers(missing)
    view.note(view.t("trace.of_key"))
    show_messages(view, found, Column("trace", "trace.title", lambda _row: view.t("trace.look"), link=path))


def _draw(view: View, found: list[TraceView], missing: Mapping[str, CometError]) -> None:
    view.missing_brokers(missing)
    all_spans = spans(found)
    if not all_spans:
        view.empty("trace.none")
        return
    if len(all_spans) >= MAX_SPANS:
        view.note(view.t("trace.most", n=MAX_SPANS), "problem")
    _line(view, all_spans)
    begin: Column[Span] = Column("begin", "trace.begin", lambda row: row.begin_ms, "time")
    state: Column[Span] = Column("state", "trace.state", lambda row: _state(view, row), searched=True)
    client: Column[Span] = Column("client", "trace.client", lambda row: row.client, searched=True)
    cost: Column[Span] = Column("cost", "trace.cost", lambda row: row.cost_ms, "number")
    store_host: Column[Span] = Column("at", "trace.store_host", lambda row: row.store_host)
    group: Column[Span] = Column("group", "trace.group", lambda row: _group(view, row), searched=True)
    sends = [
        begin, group, state, cost,
        Column("topic", "messages.topic", lambda row: row.topic,
               link=lambda row: path_of("topics", row.topic) if row.topic else None),
        Column("what", "trace.what", lambda row: row.what),
        Column("tag", "messages.tag", lambda row: row.tags),
        Column("keys", "messages.keys", lambda row: row.keys),
        store_host,
        Column("which", "trace.offset_id", lambda row: row.offset_msg_id,
               link=lambda row: path_of("messages", row.offset_msg_id) if row.offset_msg_id else None),
        client,
    ]  # fmt: skip
    checks = [
        begin, group, state,
        Column("check", "trace.from_check", lambda row: row.what == "check", "flag"),
        Column("which", "trace.transaction", lambda row: row.msg_id),
        store_host, client,
    ]  # fmt: skip
    calls = [
        replace(group, link=lambda row: path_of("groups", row.group) if row.group else None), begin,
        Column("end", "trace.end", lambda row: row.end_ms, "time"), cost, state,
        Column("tries", "trace.tries", lambda row: row.tries, "number"), client,
    ]  # fmt: skip
    _table(view, "trace.sends", sends, [each for each in all_spans if each.kind in ("send", "recall")], "s")
    _table(view, "trace.checks", checks, [each for each in all_spans if each.kind == "check"], "t")
    calls_found = [each for each in all_spans if each.kind == "call"]
    _table(view, "trace.calls", calls, calls_found, "c", always=True)


def _table(
    view: View, title: str, columns: list[Column[Span]], rows: list[Span], name: str, *, always: bool = False
) -> None:
    """Add a section with a table. Without rows, the section is only added if `always` is set."""
    if not rows and not always:
        return
    numbers = {id(row): str(number) for number, row in enumerate(rows)}
    with view.section(title):
        Listing(
            view, columns, lambda row: numbers[id(row)], name=name, empty="trace.no_calls",
            classes=lambda row: {"state": {True: "good", False: "bad", None: "warn"}[row.good]},
        ).update(rows)  # fmt: skip


# -- timeline


def _line(view: View, found: list[Span]) -> None:
    drawn, first_ms, last_ms = bars(found)
    view.note(
        view.t(
            "trace.span", begin=view.format("time", first_ms), end=view.format("time", last_ms),
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
        text_element("span", f"{view.t(KINDS[span.kind])}  {_group(view, span)}").classes("who")
        with ui.element("span").classes("lane").props("aria-hidden=true"):
            # The minimum width keeps short spans visible.
            ui.element("span").classes(f"bar-{looks}").style(
                f"left: min({bar.left}%, calc(100% - 6px)); width: max({bar.width}%, 6px)"
            )
        cost = "" if span.cost_ms is None else view.t("trace.ms", n=f"{span.cost_ms:,}")
        text_element("span", f"{_state(view, span)}  {cost}").classes(f"how {looks}")


def _group(view: View, span: Span) -> str:
    return span.group or view.t("trace.no_group")


def _state(view: View, span: Span) -> str:
    return span.state or view.t("trace.open")
