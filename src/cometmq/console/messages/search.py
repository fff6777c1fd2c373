"""Finding messages: by topic and time, by key, by id."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from nicegui import ui
from nicegui.element import Element

from cometmq.admin import Admin, Newest, ReadRange
from cometmq.console.frame.asking import Asking
from cometmq.console.frame.body import preview
from cometmq.console.frame.charts import missing_note
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, path_of
from cometmq.errors import CometError
from cometmq.message import MessageExt

if TYPE_CHECKING:
    from cometmq.console.app import Console

WINDOW = 500
"""Messages that are read for one look at a topic; the list makes pages of them."""
KEY_HITS_MAX = 64
NAME_MAX = 255
KEY_MAX = 1000
ID_MAX = 64
PREVIEW_BYTES = 256
ALWAYS_MS = 2**63 - 1
KINDS = {"topic": "messages.by_topic", "key": "messages.by_key", "id": "messages.by_id"}
HINTS = {"topic": "messages.hint_topic", "key": "messages.hint_key", "id": "messages.hint_id"}
NEEDS = {"topic": "messages.needs_topic", "key": "messages.needs_key", "id": "messages.needs_id"}


def messages_of(topic: str) -> str:
    """The path of the page that shows the newest messages of a topic."""
    return f"{path_of('messages')}?{urlencode({'topic': topic})}"


def message_path(message: MessageExt) -> str:
    """The path of a message's page, by the id that says where it lies."""
    return path_of("messages", message.offset_msg_id)


def message_columns() -> list[Column[MessageExt]]:
    """The columns of messages in lists."""
    return [
        Column("stored", "messages.stored", lambda row: row.store_timestamp_ms, "time"),
        Column("msg", "messages.id", lambda row: row.msg_id, link=message_path, searched=True),
        Column("tag", "messages.tag", lambda row: row.tags or "", searched=True),
        Column("keys", "messages.keys", lambda row: " ".join(row.keys), searched=True),
        Column("queue", "messages.queue", lambda row: f"{row.broker_name}:{row.queue_id}"),
        Column("offset", "messages.offset", lambda row: row.queue_offset, "number"),
        Column("size", "messages.size", lambda row: row.store_size, "size"),
        Column("body", "messages.body", lambda row: preview(row.body), searched=True),
    ]


def cut(found: list[MessageExt]) -> None:
    """Leave of bodies what a list shows: it is kept as long as its page is open."""
    for each in found:
        each.body = each.body[:PREVIEW_BYTES]


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/messages", "messages.title", menu=70, icon="mail")
    async def messages(view: View) -> None:
        view.title(view.t("messages.title"))
        asking = Asking(view, lambda place: _find(view, asking, place))
        kind = asking.choice("by", "messages.by", {name: view.t(key) for name, key in KINDS.items()})
        asking.text("topic", "messages.topic", NAME_MAX)
        key = asking.text("key", "messages.key", KEY_MAX)
        msg_id = asking.text("id", "messages.any_id", ID_MAX)
        times = [asking.moment("begin", "messages.begin"), asking.moment("end", "messages.end")]
        hint = view.note("")

        def show() -> None:
            key.set_visibility(kind.value == "key")
            msg_id.set_visibility(kind.value == "id")
            for each in times:
                each.set_visibility(kind.value != "id")
            hint.say(view.t(HINTS[kind.value]))

        kind.on_value_change(show)
        show()
        asking.begin("messages.find", at_once=any(view.query.get(name) for name in ("topic", "key", "id")))


async def _find(view: View, asking: Asking, place: Element) -> None:
    topic, kind = asking.value("topic"), asking.value("by")
    wanted = asking.value("id" if kind == "id" else "key")
    if (kind != "id" and not topic) or (kind != "topic" and not wanted):
        place.clear()
        with place:
            view.empty(NEEDS[kind])
        return
    begin_ms, end_ms = asking.time("begin"), asking.time("end")
    if kind == "topic":
        await _show_newest(view, place, topic, begin_ms, end_ms)
        return
    missing: dict[str, CometError] = {}
    if kind == "key":
        question = view.admin.messages_by_key(
            topic, wanted, KEY_HITS_MAX, begin_ms=begin_ms or 0,
            end_ms=ALWAYS_MS if end_ms is None else end_ms, missing=missing,
        )  # fmt: skip
    else:
        question = by_id(view.admin, wanted, topic, missing)

    def draw(found: list[MessageExt]) -> None:
        cut(found)
        missing_note(view, missing)
        if kind == "key" and len(found) >= KEY_HITS_MAX:
            view.note(view.t("messages.key_most", n=KEY_HITS_MAX), "problem")
        listing = Listing(view, message_columns(), lambda row: row.offset_msg_id, empty="messages.none")
        listing.update(found)

    await view.fill(place, question, draw)


async def by_id(
    admin: Admin, msg_id: str, topic: str, missing: dict[str, CometError] | None = None
) -> list[MessageExt]:
    """All messages of an id in a topic, else the one that it names. missing: as of Admin.messages_by_key.
    Raises MessageNotFound, IdError."""
    if topic and (found := await admin.messages_by_unique_key(topic, msg_id, missing=missing)):
        return found
    return [await admin.message_by_id(msg_id, topic or None)]


async def _show_newest(
    view: View, place: Element, topic: str, begin_ms: int | None, end_ms: int | None
) -> None:
    """The page of a topic's messages that the address names: the newest, or those before a time."""
    said = view.query.get("before", "")
    before = int(said) if said.isascii() and said.isdigit() and len(said) < 15 else ALWAYS_MS
    bound = min(before, ALWAYS_MS if end_ms is None else end_ms)
    wanted = ReadRange(
        topic=topic, begin_ms=begin_ms, end_ms=None if bound == ALWAYS_MS else bound, count=WINDOW
    )

    async def turn(before_ms: int | None) -> None:
        others = {name: value for name, value in view.query.items() if name not in ("before", "page")}
        view.query = others if before_ms is None else {**others, "before": str(before_ms)}
        view.note_query()
        await _show_newest(view, place, topic, begin_ms, end_ms)

    def draw(found: Newest) -> None:
        missing_note(view, found.missing)
        view.note(view.t("messages.newest", n=f"{len(found.messages):,}", all=f"{found.stored:,}"))
        with ui.element("div").classes("list-tools"):
            if before != ALWAYS_MS:
                view.button("messages.newer", lambda: turn(None), icon="first_page")
            if found.before_ms is not None:
                view.button("messages.older", lambda: turn(found.before_ms), icon="chevron_right")
        listing = Listing(view, message_columns(), lambda row: row.offset_msg_id, empty="messages.none")
        listing.update(found.messages)

    await view.fill(place, view.admin.newest(wanted), draw)
