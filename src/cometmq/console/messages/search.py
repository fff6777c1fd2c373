"""The search for messages: by topic and time, by key, by id."""

from __future__ import annotations

from urllib.parse import urlencode

from nicegui import ui
from nicegui.element import Element

from cometmq.admin import Admin, Newest, ReadRange
from cometmq.console.widgets.body import preview
from cometmq.console.widgets.forms import SearchFields
from cometmq.console.widgets.listing import Listing
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, path_of
from cometmq.console.widgets.services import page
from cometmq.errors import CometError
from cometmq.message import MessageExt

MAX_NEWEST = 500
"""Maximum number of a topic's messages that are read together; the list divides them into pages."""
MAX_KEY_HITS = 64
MAX_TOPIC_LENGTH = 255
MAX_KEY_LENGTH = 1000
MAX_ID_LENGTH = 64
PREVIEW_BYTES = 256
"""Number of bytes of each body that a list keeps while its page is open."""
END_OF_TIME_MS = 2**63 - 1
KINDS = {"topic": "messages.by_topic", "key": "messages.by_key", "id": "messages.by_id"}
HINTS = {"topic": "messages.hint_topic", "key": "messages.hint_key", "id": "messages.hint_id"}
NEEDS = {"topic": "messages.needs_topic", "key": "messages.needs_key", "id": "messages.needs_id"}


def messages_of(topic: str) -> str:
    """Return the path of the page with the newest messages of a topic."""
    return f"{path_of('messages')}?{urlencode({'topic': topic})}"


def message_columns() -> list[Column[MessageExt]]:
    """Return the columns of a list of messages."""
    return [
        Column("stored", "messages.stored", lambda row: row.store_timestamp_ms, "time"),
        Column("msg", "messages.id", lambda row: row.msg_id, searched=True,
               link=lambda row: path_of("messages", row.offset_msg_id)),
        Column("tag", "messages.tag", lambda row: row.tags or "", searched=True),
        Column("keys", "messages.keys", lambda row: " ".join(row.keys), searched=True),
        Column("queue", "messages.queue", lambda row: f"{row.broker_name}:{row.queue_id}"),
        Column("offset", "messages.offset", lambda row: row.queue_offset, "number"),
        Column("size", "messages.size", lambda row: row.store_size, "size"),
        Column("body", "messages.body", lambda row: preview(row.body), searched=True),
    ]  # fmt: skip


def show_messages(view: View, found: list[MessageExt], *first: Column[MessageExt]) -> None:
    """Add a list of messages. `first` has additional columns, which precede those of message_columns."""
    for each in found:
        each.body = each.body[:PREVIEW_BYTES]
    columns = [*first, *message_columns()]
    Listing(view, columns, lambda row: row.offset_msg_id, empty="messages.none").update(found)


@page("/messages", "messages.title", menu=70, icon="mail")
async def search_page(view: View) -> None:
    view.title(view.t("messages.title"))
    fields = SearchFields(view, lambda place: _find(view, fields, place))
    kind = fields.choice("by", "messages.by", KINDS)
    fields.text("topic", "messages.topic", MAX_TOPIC_LENGTH)
    key = fields.text("key", "messages.key", MAX_KEY_LENGTH)
    msg_id = fields.text("id", "messages.any_id", MAX_ID_LENGTH)
    times = [fields.moment("begin", "messages.begin"), fields.moment("end", "messages.end")]
    hint = view.note("")

    def show() -> None:
        key.set_visibility(kind.value == "key")
        msg_id.set_visibility(kind.value == "id")
        for each in times:
            each.set_visibility(kind.value != "id")
        hint.set_text(view.t(HINTS[kind.value]))

    kind.on_value_change(show)
    show()
    fields.add_button(
        "messages.find", search_now=any(view.query.get(name) for name in ("topic", "key", "id"))
    )


async def _find(view: View, fields: SearchFields, place: Element) -> None:
    topic, kind = fields.value("topic"), fields.value("by")
    value = fields.value("id" if kind == "id" else "key")
    if (kind != "id" and not topic) or (kind != "topic" and not value):
        place.clear()
        with place:
            view.empty(NEEDS[kind])
        return
    begin_ms, end_ms = fields.time("begin"), fields.time("end")
    if kind == "topic":
        await _show_newest(view, place, topic, begin_ms, end_ms)
        return
    missing: dict[str, CometError] = {}
    if kind == "key":
        question = view.admin.messages_by_key(
            topic, value, MAX_KEY_HITS, begin_ms=begin_ms or 0,
            end_ms=END_OF_TIME_MS if end_ms is None else end_ms, missing=missing,
        )  # fmt: skip
    else:
        question = by_id(view.admin, value, topic, missing)

    def draw(found: list[MessageExt]) -> None:
        view.missing_brokers(missing)
        if kind == "key" and len(found) >= MAX_KEY_HITS:
            view.note(view.t("messages.key_most", n=MAX_KEY_HITS), "problem")
        show_messages(view, found)

    await view.load(place, question, draw)


async def by_id(
    admin: Admin, msg_id: str, topic: str, missing: dict[str, CometError] | None = None
) -> list[MessageExt]:
    """Return all messages in a topic whose unique id is `msg_id`.

    If there are none, or if `topic` is empty, return the message whose offset id is `msg_id`.

    Args:
        admin: The admin client.
        msg_id: A unique id or an offset id.
        topic: The topic, or "".
        missing: Receives the error of each broker that fails, by broker name. None: the first error is
            raised.

    Raises:
        MessageNotFound: No broker has the message.
        IdError: `msg_id` is not a message id.
    """
    if topic and (found := await admin.messages_by_unique_key(topic, msg_id, missing=missing)):
        return found
    return [await admin.message_by_id(msg_id, topic or None)]


async def _show_newest(
    view: View, place: Element, topic: str, begin_ms: int | None, end_ms: int | None
) -> None:
    """Show the newest messages of a topic, or the newest before the time in the page's address."""
    text = view.query.get("before", "")
    before = int(text) if text.isascii() and text.isdigit() and len(text) < 15 else END_OF_TIME_MS
    bound = min(before, END_OF_TIME_MS if end_ms is None else end_ms)
    wanted = ReadRange(
        topic=topic, begin_ms=begin_ms, end_ms=None if bound == END_OF_TIME_MS else bound, count=MAX_NEWEST
    )

    async def show_before(before_ms: int | None) -> None:
        others = {name: value for name, value in view.query.items() if name not in ("before", "page")}
        view.set_query(others if before_ms is None else {**others, "before": str(before_ms)})
        await _show_newest(view, place, topic, begin_ms, end_ms)

    def draw(found: Newest) -> None:
        view.missing_brokers(found.missing)
        view.note(view.t("messages.newest", n=f"{len(found.messages):,}", all=f"{found.stored:,}"))
        with ui.element("div").classes("list-tools"):
            if before != END_OF_TIME_MS:
                view.button("messages.newer", lambda: show_before(None), icon="first_page")
            if found.before_ms is not None:
                view.button("messages.older", lambda: show_before(found.before_ms), icon="chevron_right")
        show_messages(view, found.messages)

    await view.load(place, view.admin.newest(wanted), draw)
