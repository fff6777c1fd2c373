"""Open transactions, and transactions for which a broker no longer sends checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cometmq.admin.waiting import MAX_HALF_MESSAGES, HalfMessage, HalfMessages, given_up, half_messages
from cometmq.console.widgets.actions import Action, ActionProgress
from cometmq.console.widgets.listing import Listing, RowAction
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState, path_of
from cometmq.console.widgets.services import page

INTERVAL_S = 20.0


@page("/transactions", "transactions.title", menu=110, icon="sync_alt")
async def transactions_page(view: View) -> None:
    view.title(view.t("transactions.title"))

    def notes(found: HalfMessages, partly: str) -> None:
        view.missing_brokers(found.missing)
        if found.partly:
            view.note(view.t(partly, n=f"{MAX_HALF_MESSAGES:,}"))

    with view.section("transactions.open"):
        view.note(view.t("transactions.open_says"))
        pending = Listing(
            view, _columns("transactions.begun", lambda row: row.message.born_timestamp_ms), _id_of,
            default=ListState(sort="at"), empty="transactions.none",
        )  # fmt: skip
        feed = view.feeds.feed("half messages", partial(half_messages, view.admin), INTERVAL_S)
        await pending.follow(
            feed, lambda found: found.rows, notes=lambda found: notes(found, "transactions.partly")
        )
    with view.section("transactions.given_up"):
        view.note(view.t("transactions.given_up_says"))
        actions: list[RowAction[HalfMessage]] = [
            RowAction("again", "transactions.again", lambda row: check_again(view, row))
        ]
        abandoned = Listing(
            view, _columns("transactions.ended", lambda row: row.message.store_timestamp_ms), _id_of,
            default=ListState(sort="at", descending=True), empty="transactions.none_given_up",
            name="up", actions=actions if view.may_change else (),
        )  # fmt: skip
        feed = view.feeds.feed("given up", partial(given_up, view.admin), INTERVAL_S)
        await abandoned.follow(
            feed, lambda found: found.rows, notes=lambda found: notes(found, "transactions.newest")
        )


def _columns(title: str, at: Callable[[HalfMessage], int]) -> list[Column[HalfMessage]]:
    return [
        Column("at", title, at, "ago"),
        Column("topic", "transactions.topic", lambda row: row.topic, searched=True,
               link=lambda row: path_of("topics", row.topic) if row.topic else None),
        Column("group", "transactions.group", lambda row: row.group, searched=True),
        Column("checks", "transactions.checks", lambda row: row.checks, "number"),
        Column("message", "transactions.id", lambda row: row.message.msg_id, searched=True),
        Column("keys", "transactions.keys", lambda row: " ".join(row.message.keys), searched=True),
        Column("from", "transactions.from", lambda row: row.message.born_host),
        Column("broker", "transactions.broker", lambda row: row.message.broker_name, searched=True),
    ]  # fmt: skip


def _id_of(row: HalfMessage) -> str:
    return row.message.offset_msg_id


async def check_again(view: View, row: HalfMessage) -> None:
    """Make the broker send checks again for a transaction that has had the maximum number of checks."""

    async def work(_progress: ActionProgress) -> None:
        await view.admin.resume_check(row.message.offset_msg_id)

    await Action(
        "transaction.resume", row.message.msg_id,
        [view.t("transactions.will", id=row.message.msg_id, group=row.group)], work,
        {"topic": row.topic, "group": row.group}, refresh=["half messages", "given up"],
    ).run(view)  # fmt: skip
