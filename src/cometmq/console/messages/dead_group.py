"""The dead letters of a group: chosen, looked at, sent again, exported."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from nicegui import ui
from nicegui.element import Element

from cometmq.admin import Admin, DeadLetterView, Resend, Resending, Selection
from cometmq.admin.dead_letters import view as dead_letter_view
from cometmq.console.frame.actions import Action, NotAllowed, PartlyDone, Progress, act, check_allowed
from cometmq.console.frame.asking import Asking
from cometmq.console.frame.body import preview
from cometmq.console.frame.export import csv_file, json_lines
from cometmq.console.frame.forms import Form
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, path_of
from cometmq.console.messages.search import ID_MAX, KEY_MAX, NAME_MAX
from cometmq.errors import CometError
from cometmq.message import MessageExt

if TYPE_CHECKING:
    from cometmq.console.app import Console

SHOWN_MAX = 500
"""Letters of a preview; the list makes pages of them."""
PREVIEW = 256
"""Bytes of each body that a preview keeps."""
SELECT_S = 20.0
"""A selection that finds little reads much: it ends then."""
EXPORT_MAX = 10_000
EXPORT_BYTES_MAX = 16 << 20
SQL_MAX = 2000
RATE, RATE_MAX = 50, 10_000
LIMIT, LIMIT_MAX = 1000, 100_000
IDS_MAX = 16


@dataclass(frozen=True)
class Letters:
    """What a selection found. more: it may have more: the count, the bytes or the time was used up."""

    found: list[MessageExt]
    more: bool


class NothingChosen(CometError):
    """An action on chosen letters, and none is."""

    said: str

    def __str__(self) -> str:
        return self.said


class OneAtATime(NothingChosen):
    """An export while another one of the session goes on: each is 16 MiB of memory and more."""


async def select(
    admin: Admin, wanted: Selection, most: int, *, keep: int | None = None, within_s: float = SELECT_S
) -> Letters:
    """The dead letters of a selection, as far as `most`, EXPORT_BYTES_MAX and the time go. keep: bytes of
    each body. Raises what Admin.dead_letters does."""
    found: list[MessageExt] = []
    size = 0
    try:
        async with asyncio.timeout(within_s), aclosing(admin.dead_letters(wanted)) as letters:  # type: ignore[type-var]
            async for letter in letters:
                if len(found) >= most or size >= EXPORT_BYTES_MAX:
                    return Letters(found, more=True)
                if keep is not None:
                    letter.body = letter.body[:keep]
                size += len(letter.body)
                found.append(letter)
    except TimeoutError:
        return Letters(found, more=True)
    return Letters(found, more=False)


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/dead/{group:path}", "dead.title", under="/dead")
    async def letters(view: View, group: str) -> None:
        view.title(view.t("dead.of_group", group=group))
        with ui.element("div").classes("list-tools"):
            view.link(view.t("dead.to_group"), path_of("groups", group))
        asking = Asking(view, lambda place: _find(view, asking, place, group))
        asking.moment("begin", "dead.begin")
        asking.moment("end", "dead.end")
        asking.text("topic", "dead.topic", NAME_MAX)
        asking.text("key", "messages.key", KEY_MAX)
        asking.text("ids", "dead.ids", IDS_MAX * (ID_MAX + 1))
        asking.text("sql", "dead.sql", SQL_MAX).props["placeholder"] = "TAGS = 'A' AND amount > 5"
        asking.begin("messages.find", at_once=True)


def selection(asking: Asking, group: str) -> Selection:
    """What the fields say. Raises ConfigError for a time that ends before it begins."""
    return Selection(
        group=group,
        ids=frozenset(asking.value("ids").replace(",", " ").split()),
        topic=asking.value("topic") or None,
        key=asking.value("key") or None,
        begin_ms=asking.time("begin"),
        end_ms=asking.time("end"),
        sql=asking.value("sql") or None,
    )


async def _find(view: View, asking: Asking, place: Element, group: str) -> None:
    wanted = selection(asking, group)
    question = select(view.admin, wanted, SHOWN_MAX, keep=PREVIEW)
    await view.fill(place, question, lambda found: _draw(view, wanted, found))


def _draw(view: View, wanted: Selection, found: Letters) -> None:
    rows = [dead_letter_view(each) for each in found.found]
    if found.more:
        view.note(view.t("dead.more", n=f"{len(rows):,}"), "problem")
    listing: Listing[DeadLetterView]

    async def chosen() -> None:
        await resend(view, *_chosen(view, wanted, listing.chosen))

    async def everything() -> None:
        await resend(view, wanted, f"{len(rows):,}{'+' if found.more else ''}")

    if view.may_change and rows:
        with ui.element("div").classes("actions"):
            view.button("dead.resend", chosen, icon="replay")
            view.button("dead.resend_all", everything, icon="replay")
    if rows:
        with ui.element("div").classes("list-tools"):
            view.button("dead.as_json", lambda: export(view, wanted, "jsonl"), icon="download")
            view.button("dead.as_csv", lambda: export(view, wanted, "csv"), icon="download")
    listing = Listing(
        view, _columns(), lambda row: row.offset_msg_id, empty="dead.none", choose=view.may_change
    )
    listing.update(rows)


def _columns() -> list[Column[DeadLetterView]]:
    return [
        Column("died", "dead.died", lambda row: row.store_timestamp, "time"),
        Column(
            "msg", "messages.id", lambda row: row.msg_id, searched=True,
            link=lambda row: path_of("messages", row.offset_msg_id),
        ),
        Column("topic", "dead.topic", lambda row: row.original_topic, searched=True),
        Column("tag", "messages.tag", lambda row: row.tags or "", searched=True),
        Column("keys", "messages.keys", lambda row: " ".join(row.keys), searched=True),
        Column("tries", "dead.tries", lambda row: row.reconsume_times, "number"),
        Column("resent", "dead.resent", lambda row: row.resend_times, "number"),
        Column("size", "messages.size", lambda row: row.store_size, "size"),
        Column("body", "messages.body", lambda row: preview(row.body.encode()), searched=True),
    ]  # fmt: skip


def _chosen(view: View, wanted: Selection, chosen: Sequence[DeadLetterView]) -> tuple[Selection, str]:
    """The selection of rows alone, which reads no more than the time between them. Raises NothingChosen."""
    if not chosen:
        raise NothingChosen(view.t("dead.choose"))
    times = [each.store_timestamp for each in chosen]
    return (
        Selection(
            group=wanted.group, ids=frozenset(each.offset_msg_id for each in chosen),
            begin_ms=min(times), end_ms=max(times) + 1,
        ),
        f"{len(chosen):,}",
    )  # fmt: skip


# -- sending again


async def resend(view: View, wanted: Selection, count: str) -> None:
    """Ask where to and how fast, then send letters again. count: how many, as it is said."""
    group = wanted.group
    form = Form(view, view.t("dead.resend_of", group=group, n=count), [view.t("dead.resend_says")])
    ways = {"group": view.t("dead.way_group"), "topic": view.t("dead.way_topic")}
    way = form.choice("dead.way", ways, "group")
    rate = form.number("dead.rate", RATE, 1, RATE_MAX)
    limit = form.number("dead.limit", LIMIT, 1, LIMIT_MAX)
    again = form.choice("dead.again", {"": view.t("common.no"), "again": view.t("common.yes")}, "")
    if not await form.asked():
        return
    how = Resending(
        to_topic=way.value == "topic", rate=float(rate.value or 1), limit=int(limit.value or 1),
        again=bool(again.value),
    )  # fmt: skip

    async def work(progress: Progress) -> str:
        states: Counter[Resend] = Counter()
        problem = ""
        most = min(len(wanted.ids), int(limit.value or 1)) if wanted.ids else 0
        resent = view.admin.resend(wanted, how)
        async with aclosing(resent), aclosing(progress.until_stopped(resent)) as results:  # type: ignore[type-var]
            async for result in results:
                states[result.state] += 1
                problem = result.problem or problem
                done = states.total()
                progress.outcome |= {state.value: str(count) for state, count in states.items()}
                progress.say(_summary(view, states), done / most if most else None)
                check_allowed(view, "dead.resend", group)  # whoever may no longer do it sends no more
        if progress.stopped:
            raise PartlyDone(view.t("dead.stopped", summary=_summary(view, states)))
        if states[Resend.FAILED]:
            failed = view.t("dead.failed", n=states[Resend.FAILED], problem=problem)
            raise PartlyDone(f"{_summary(view, states)}. {failed}")
        return _summary(view, states)

    says = [
        view.t("dead.will_topic" if how.to_topic else "dead.will_group", n=count, group=group),
        view.t("dead.will_how", rate=f"{how.rate:,.0f}", limit=f"{how.limit:,}"),
    ]
    given = {**msgspec.structs.asdict(wanted), **msgspec.structs.asdict(how)}
    given["ids"] = " ".join(sorted(wanted.ids)[:IDS_MAX])
    details = {name: str(value)[:SQL_MAX] for name, value in given.items() if value not in (None, "", False)}
    await act(
        view,
        Action(
            name="dead.resend",
            target=group,
            work=work,
            says=says,
            details={**details, "count": count},
            refresh=["dead letters", "progress"],
        ),
    )


def _summary(view: View, states: Counter[Resend]) -> str:
    return view.t(
        "dead.summary", sent=f"{states[Resend.RESENT]:,}", skipped=f"{states[Resend.SKIPPED]:,}",
        failed=f"{states[Resend.FAILED]:,}",
    )  # fmt: skip


# -- files


async def export(view: View, wanted: Selection, kind: str) -> None:
    """Have the browser save the letters of a selection. kind: `jsonl` or `csv`."""
    session = view.session
    if session.exporting:
        raise OneAtATime(view.t("dead.export_waits"))
    session.exporting = True
    try:
        view.say("dead.exporting")
        letters = await select(view.admin, wanted, EXPORT_MAX)
        found = [dead_letter_view(each) for each in letters.found]
        data = await asyncio.to_thread(csv_file if kind == "csv" else json_lines, found)
    finally:
        session.exporting = False
    if not view.console.sessions.valid(session):
        raise NotAllowed(view.t("people.over"))
    details = {"count": str(len(found)), "kind": kind}
    view.console.audit.must_add(session.name, session.address, "export", wanted.group, details, "ok")
    media = "text/csv" if kind == "csv" else "application/jsonl"
    with view.client:
        ui.download.content(data, f"dead-letters.{kind}", media)
    if letters.more:
        view.complain(view.t("dead.export_more", n=f"{len(found):,}"))
