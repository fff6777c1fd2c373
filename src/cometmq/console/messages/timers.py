"""Messages that wait for their time: listed by the broker page by page, and taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import msgspec
from nicegui import ui

from cometmq.admin import Admin
from cometmq.admin.waiting import Place, TimerPage, timer_page
from cometmq.console.frame.actions import Action, Progress, act
from cometmq.console.frame.charts import missing_note
from cometmq.console.frame.listing import Listing, RowAction
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, ListState, path_of
from cometmq.errors import CometError
from cometmq.message import WaitingMessage
from cometmq.protocol.codes import MAX_TOPIC_LENGTH

if TYPE_CHECKING:
    from cometmq.console.app import Console

INTERVAL_S = 10.0
LEAVES_S = 1.0
"""A message that was taken back leaves the broker's list within so long."""
PAGE = 200
"""Messages that are asked for at once."""
KEY_MAX, AFTER_MAX = 250, 4096


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/timers", "timers.title", menu=100, icon="alarm")
    async def timers(view: View) -> None:
        view.title(view.t("timers.title"))
        view.note(view.t("timers.says"))
        topic = view.query.get("topic", "")[:MAX_TOPIC_LENGTH]
        key = view.query.get("key", "")[:KEY_MAX]
        after = places_of(view.query.get("after", ""))
        _search(view, topic, key)
        name = ("timers", topic, key, msgspec.json.encode(after))
        more = ui.element("div").props("aria-live=polite")
        cancel = [
            RowAction[WaitingMessage]("cancel", "timers.cancel", lambda row: take_back(view, row, name))
        ]
        listing = Listing(
            view, _columns(), _id_of, default=ListState(sort="at"), empty="timers.none",
            actions=cancel if view.may_change else (),
        )  # fmt: skip
        feed = view.feeds.feed(name, partial(ask, view.admin, topic, key, after), INTERVAL_S)

        def pick(found: TimerPage) -> list[WaitingMessage]:
            more.clear()
            with more:
                _where(view, found, key, later=bool(after))
            return found.rows

        await listing.follow(feed, pick)


def places_of(said: str) -> dict[str, Place]:
    """The places of an address; none for what is none."""
    try:
        return msgspec.json.decode(said, type=dict[str, Place]) if said and len(said) <= AFTER_MAX else {}
    except msgspec.MsgspecError:
        return {}


async def ask(admin: Admin, topic: str, key: str, after: Mapping[str, Place]) -> TimerPage:
    """A page of those of a topic, or all; with a key those that have it."""
    if not key:
        return await timer_page(admin, topic or None, after=after, size=PAGE)
    missing: dict[str, CometError] = {}
    rows, more = await admin.timers_with_key(key, topic or None, missing=missing)
    return TimerPage(rows, {}, more, len(rows), {name: str(error) for name, error in missing.items()})


def _search(view: View, topic: str, key: str) -> None:
    with ui.element("div").classes("list-tools"):
        names = ui.input(view.t("timers.topic"), value=topic)
        names.props(f"dense outlined maxlength={MAX_TOPIC_LENGTH}")
        keys = ui.input(view.t("timers.key"), value=key).props(f"dense outlined maxlength={KEY_MAX}")

        def show() -> None:
            asked = {"topic": str(names.value or "").strip(), "key": str(keys.value or "").strip()}
            query = urlencode({name: value for name, value in asked.items() if value})
            view.open("/timers" + (f"?{query}" if query else ""))

        for field in (names, keys):
            field.on("keydown.enter", show)
        view.button("timers.show", show, icon="search")


def _where(view: View, found: TimerPage, key: str, *, later: bool) -> None:
    """What of all there is stands in the list, and the way to the rest."""
    missing_note(view, found.missing)
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
        Column(
            "topic", "timers.topic", lambda row: row.topic, searched=True,
            link=lambda row: path_of("topics", row.topic),
        ),
        Column("message", "timers.id", lambda row: row.message.msg_id, searched=True),
        Column("tag", "timers.tag", lambda row: row.message.tags or "", searched=True),
        Column("keys", "timers.keys", lambda row: " ".join(row.message.keys), searched=True),
        Column("level", "timers.level", lambda row: row.delay_level or "", "text"),
        Column("size", "timers.size", lambda row: len(row.message.body), "size"),
        Column("broker", "timers.broker", lambda row: row.message.broker_name, searched=True),
    ]  # fmt: skip


def _id_of(row: WaitingMessage) -> str:
    return f"{row.message.broker_name} {row.message.physical_offset}"


async def take_back(view: View, row: WaitingMessage, feed: Hashable) -> None:
    """Have a message not delivered. feed: the key of the list's."""
    handle = row.recall_handle
    if handle is None:
        view.complain(view.t("timers.no_handle"))
        return

    async def work(_progress: Progress) -> str:
        gone = await view.admin.recall(handle)
        await asyncio.sleep(LEAVES_S)
        return view.t("timers.cancelled", id=gone)

    at = view.shown("time", row.deliver_at_ms)
    await act(
        view,
        Action(
            name="timer.cancel",
            target=row.message.msg_id,
            work=work,
            says=[view.t("timers.will", id=row.message.msg_id, topic=row.topic, at=at)],
            details={"topic": row.topic, "at": str(row.deliver_at_ms)},
            refresh=[feed],
        ),
    )
