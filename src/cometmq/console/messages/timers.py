"""Messages that wait for their delivery time: the list, which brokers return in pages, and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from functools import partial
from urllib.parse import urlencode

import msgspec
from nicegui import ui
from nicegui.element import Element

from cometmq.admin import Admin, operations
from cometmq.admin.waiting import Place, TimerPage, timer_page
from cometmq.console.widgets.actions import Action
from cometmq.console.widgets.forms import SearchFields
from cometmq.console.widgets.listing import Listing, RowAction
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState, path_of
from cometmq.console.widgets.services import page
from cometmq.errors import CometError
from cometmq.message import WaitingMessage
from cometmq.protocol.codes import MAX_TOPIC_LENGTH

INTERVAL_S = 10.0
REMOVAL_S = 1.0
"""Time, in seconds, after which a broker has removed a cancelled message from its list of timer messages."""
PAGE_SIZE = 200
"""Maximum number of messages per request."""
MAX_KEY_LENGTH, MAX_AFTER_LENGTH = 250, 4096


@page("/timers", "timers.title", menu=100, icon="alarm")
async def timers_page(view: View) -> None:
    view.title(view.t("timers.title"))
    view.note(view.t("timers.says"))

    async def search(_place: Element) -> None:
        query = urlencode(view.query)
        view.open("/timers" + (f"?{query}" if query else ""))

    fields = SearchFields(view, search)
    fields.text("topic", "timers.topic", MAX_TOPIC_LENGTH)
    fields.text("key", "timers.key", MAX_KEY_LENGTH)
    fields.add_button("timers.show")
    topic, key = fields.value("topic"), fields.value("key")
    after = places_of(view.query.get("after", ""))
    feed_key = ("timers", topic, key, msgspec.json.encode(after))
    actions: list[RowAction[WaitingMessage]] = [
        RowAction("cancel", "timers.cancel", lambda row: cancel(view, row, feed_key))
    ]
    listing = Listing(
        view, _columns(), lambda row: f"{row.message.broker_name} {row.message.physical_offset}",
        default=ListState(sort="at"), empty="timers.none", actions=actions if view.may_change else (),
    )  # fmt: skip
    feed = view.feeds.feed(feed_key, partial(ask, view.admin, topic, key, after), INTERVAL_S)
    await listing.follow(
        feed, lambda found: found.rows, notes=lambda found: _notes(view, found, key, later=bool(after))
    )


def places_of(text: str) -> dict[str, Place]:
    """Return for each broker the position after which a page of the list begins.

    `text` is the parameter in the page's address that contains these positions as JSON. The result is empty
    if the text is empty, too long or malformed.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, Place]) if 0 < len(text) <= MAX_AFTER_LENGTH else {}
    except msgspec.MsgspecError:
        return {}


async def ask(admin: Admin, topic: str, key: str, after: Mapping[str, Place]) -> TimerPage:
    """Return timer messages that wait for their delivery time, of one topic, or of all if `topic` is empty.

    If `key` is empty, these are the messages of one page of the list, which begins after the positions in
    `after`. Otherwise they are the messages with the key.
    """
    if not key:
        return await timer_page(admin, topic or None, after=after, size=PAGE_SIZE)
    missing: dict[str, CometError] = {}
    rows, more = await admin.timers_with_key(key, topic or None, missing=missing)
    return TimerPage(rows, {}, more, len(rows), {name: str(error) for name, error in missing.items()})


def _notes(view: View, found: TimerPage, key: str, *, later: bool) -> None:
    """Show how many of the waiting messages the list contains, and links to other pages of the list."""
    view.missing_brokers(found.missing)
    if key:
        view.note(view.t("timers.key_more" if found.more else "timers.key_all"))
        return
    view.note(view.t("timers.waiting", n=f"{len(found.rows):,}", all=f"{found.waiting:,}"))
    others = {name: view.query[name] for name in ("topic",) if name in view.query}
    with ui.element("div").classes("list-tools"):
        if later:
            view.link(view.t("timers.first"), f"/timers?{urlencode(others)}")
        if found.more:
            places = msgspec.json.encode(found.after).decode()
            view.link(view.t("timers.next"), f"/timers?{urlencode({**others, 'after': places})}")


def _columns() -> list[Column[WaitingMessage]]:
    return [
        Column("at", "timers.at", lambda row: row.deliver_at_ms, "time"),
        Column("topic", "timers.topic", lambda row: row.topic, searched=True,
               link=lambda row: path_of("topics", row.topic)),
        Column("message", "timers.id", lambda row: row.message.msg_id, searched=True),
        Column("tag", "timers.tag", lambda row: row.message.tags or "", searched=True),
        Column("keys", "timers.keys", lambda row: " ".join(row.message.keys), searched=True),
        Column("level", "timers.level", lambda row: row.delay_level or ""),
        Column("size", "timers.size", lambda row: len(row.message.body), "size"),
        Column("broker", "timers.broker", lambda row: row.message.broker_name, searched=True),
    ]  # fmt: skip


async def cancel(view: View, row: WaitingMessage, feed_key: Hashable) -> None:
    """Cancel the delivery of a message. `feed_key` is the key of the list's feed."""
    handle = row.recall_handle
    if handle is None:
        view.notify_error(view.t("timers.no_handle"))
        return

    msg_id, at = row.message.msg_id, view.format("time", row.deliver_at_ms)
    cancelled = await Action.of(
        await operations.cancel_timers(view.admin, [handle]),
        [view.t("timers.will", id=msg_id, topic=row.topic, at=at)],
        {"topic": row.topic, "at": str(row.deliver_at_ms)},
        result=lambda ids: view.t("timers.cancelled", id=ids[0]),
    ).run(view)
    if cancelled:
        await asyncio.sleep(REMOVAL_S)
        view.feeds.refresh(feed_key)
