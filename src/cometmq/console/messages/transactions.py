"""Transactions that nobody has ended yet, and those that their broker has given up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nicegui import ui

from cometmq.admin.waiting import MAX_HALF_MESSAGES, HalfMessage, HalfMessages, given_up, half_messages
from cometmq.console.frame.actions import Action, Progress, act
from cometmq.console.frame.charts import missing_note
from cometmq.console.frame.listing import Listing, RowAction
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, ListState, path_of

if TYPE_CHECKING:
    from cometmq.console.app import Console

INTERVAL_S = 20.0


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/transactions", "transactions.title", menu=110, icon="sync_alt")
    async def transactions(view: View) -> None:
        view.title(view.t("transactions.title"))
        with view.section("transactions.open"):
            view.note(view.t("transactions.open_says"))
            notice = ui.element("div")
            listing = Listing(
                view, _columns("transactions.begun", lambda row: row.message.born_timestamp_ms), _id_of,
                default=ListState(sort="at"), empty="transactions.none",
            )  # fmt: skip
            feed = view.feeds.feed("half messages", partial(half_messages, view.admin), INTERVAL_S)
            await listing.follow(feed, lambda found: _rows(view, notice, found, "transactions.partly"))
        with view.section("transactions.given_up"):
            view.note(view.t("transactions.given_up_says"))
            notice_up = ui.element("div")
            again = [RowAction[HalfMessage]("again", "transactions.again", lambda row: ask_again(view, row))]
            old = Listing(
                view, _columns("transactions.ended", lambda row: row.message.store_timestamp_ms), _id_of,
                default=ListState(sort="at", descending=True), empty="transactions.none_given_up",
                name="up", actions=again if view.may_change else (),
            )  # fmt: skip
            ups = view.feeds.feed("given up", partial(given_up, view.admin), INTERVAL_S)
            await old.follow(ups, lambda found: _rows(view, notice_up, found, "transactions.newest"))


def _rows(view: View, notice: ui.element, found: HalfMessages, partly: str) -> list[HalfMessage]:
    notice.clear()
    with notice:
        missing_note(view, found.missing)
        if found.partly:
            view.note(view.t(partly, n=f"{MAX_HALF_MESSAGES:,}"))
    return found.rows


def _columns(title: str, at: Callable[[HalfMessage], int]) -> list[Column[HalfMessage]]:
    return [
        Column("at", title, at, "ago"),
        Column(
            "topic", "transactions.topic", lambda row: row.topic, searched=True,
            link=lambda row: path_of("topics", row.topic) if row.topic else None,
        ),
        Column("group", "transactions.group", lambda row: row.group, searched=True),
        Column("checks", "transactions.checks", lambda row: row.checks, "number"),
        Column("message", "transactions.id", lambda row: row.message.msg_id, searched=True),
        Column("keys", "transactions.keys", lambda row: " ".join(row.message.keys), searched=True),
        Column("from", "transactions.from", lambda row: row.message.born_host),
        Column("broker", "transactions.broker", lambda row: row.message.broker_name, searched=True),
    ]  # fmt: skip


def _id_of(row: HalfMessage) -> str:
    return row.message.offset_msg_id


async def ask_again(view: View, row: HalfMessage) -> None:
    """Have the producer asked about a transaction that was given up."""

    async def work(_progress: Progress) -> None:
        await view.admin.resume_check(row.message.offset_msg_id)

    await act(
        view,
        Action(
            name="transaction.resume",
            target=row.message.msg_id,
            work=work,
            refresh=["half messages", "given up"],
            says=[view.t("transactions.will", id=row.message.msg_id, group=row.group)],
            details={"topic": row.topic, "group": row.group},
        ),
    )
