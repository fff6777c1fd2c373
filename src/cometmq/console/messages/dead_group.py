"""The dead letters of a group: search, resending, export."""

from __future__ import annotations

import asyncio
import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from nicegui import ui
from nicegui.element import Element

from cometmq.admin import Admin, DeadLetterView, Resend, Resending, Selection
from cometmq.admin.dead_letters import view as dead_letter_view
from cometmq.console.base.errors import ConsoleError, NotAllowed, PartlyDone
from cometmq.console.messages.search import MAX_ID_LENGTH, MAX_KEY_LENGTH, MAX_TOPIC_LENGTH
from cometmq.console.widgets.actions import Action, ActionProgress, check_permission
from cometmq.console.widgets.body import preview
from cometmq.console.widgets.forms import Form, SearchFields
from cometmq.console.widgets.listing import Listing
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, path_of
from cometmq.console.widgets.services import page
from cometmq.message import MessageExt

MAX_SHOWN = 500
"""Maximum number of dead letters that a search returns; the list divides them into pages."""
PREVIEW_BYTES = 256
"""Number of bytes of each body that the result of a search keeps."""
SELECT_TIMEOUT_S = 20.0
"""Maximum duration of a search, in seconds. A search with few results may read many messages."""
MAX_EXPORTED = 10_000
MAX_EXPORT_BYTES = 16 << 20
MAX_SQL_LENGTH = 2000
DEFAULT_RATE, MAX_RATE = 50, 10_000
DEFAULT_LIMIT, MAX_LIMIT = 1000, 100_000
MAX_IDS = 16
CSV_COLUMNS = (
    "topic", "originalTopic", "msgId", "offsetMsgId", "originMsgId", "tags", "keys", "bornHost",
    "bornTimestamp", "storeTimestamp", "reconsumeTimes", "resendTimes", "properties", "body", "bodyEncoding",
)  # fmt: skip
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""A spreadsheet evaluates a cell that begins with one of these strings as a formula.

A formula in a message could send data from the spreadsheet to an attacker.
"""


@dataclass(frozen=True)
class DeadLetters:
    """The result of a search. `more` is True if a limit of messages, bytes or time has ended the search."""

    messages: list[MessageExt]
    more: bool


class NothingSelected(ConsoleError):
    """The user has started an action on selected dead letters without selecting any."""


class ExportInProgress(ConsoleError):
    """Another export of the session is in progress.

    Only one export is permitted, because each takes more than 16 MiB of memory.
    """


async def select(
    admin: Admin, selection: Selection, limit: int, *, keep: int | None = None,
    timeout_s: float = SELECT_TIMEOUT_S,
) -> DeadLetters:  # fmt: skip
    """Return the dead letters of a selection, until a limit is reached.

    The limits are `limit` messages, MAX_EXPORT_BYTES of bodies and `timeout_s`. `keep` is the number of bytes
    to keep of each body; None keeps all. Raises the errors of Admin.dead_letters.
    """
    found: list[MessageExt] = []
    size = 0
    try:
        async with (
            asyncio.timeout(timeout_s),
            aclosing(admin.dead_letters(selection)) as letters,  # type: ignore[type-var]
        ):
            async for letter in letters:
                if len(found) >= limit or size >= MAX_EXPORT_BYTES:
                    return DeadLetters(found, more=True)
                if keep is not None:
                    letter.body = letter.body[:keep]
                size += len(letter.body)
                found.append(letter)
    except TimeoutError:
        return DeadLetters(found, more=True)
    return DeadLetters(found, more=False)


@page("/dead/{group:path}", "dead.title", under="/dead")
async def dead_letters_of_group_page(view: View, group: str) -> None:
    view.title(view.t("dead.of_group", group=group))
    with ui.element("div").classes("list-tools"):
        view.link(view.t("dead.to_group"), path_of("groups", group))

    async def find(place: Element) -> None:
        selection = Selection(
            group=group,
            ids=frozenset(fields.value("ids").replace(",", " ").split()),
            topic=fields.value("topic") or None,
            key=fields.value("key") or None,
            begin_ms=fields.time("begin"),
            end_ms=fields.time("end"),
            sql=fields.value("sql") or None,
        )
        question = select(view.admin, selection, MAX_SHOWN, keep=PREVIEW_BYTES)
        await view.load(place, question, lambda found: _draw(view, selection, found))

    fields = SearchFields(view, find)
    fields.moment("begin", "dead.begin")
    fields.moment("end", "dead.end")
    fields.text("topic", "dead.topic", MAX_TOPIC_LENGTH)
    fields.text("key", "messages.key", MAX_KEY_LENGTH)
    fields.text("ids", "dead.ids", MAX_IDS * (MAX_ID_LENGTH + 1))
    fields.text("sql", "dead.sql", MAX_SQL_LENGTH).props["placeholder"] = "TAGS = 'A' AND amount > 5"
    fields.add_button("messages.find", search_now=True)


def _draw(view: View, selection: Selection, found: DeadLetters) -> None:
    rows = [dead_letter_view(each) for each in found.messages]
    if found.more:
        view.note(view.t("dead.more", n=f"{len(rows):,}"), "problem")

    async def resend_selected() -> None:
        await resend(view, *_selection_of(view, selection, listing.selected))

    count = f"{len(rows):,}{'+' if found.more else ''}"
    if view.may_change and rows:
        with ui.element("div").classes("actions"):
            view.button("dead.resend", resend_selected, icon="replay")
            view.button("dead.resend_all", lambda: resend(view, selection, count), icon="replay")
    if rows:
        with ui.element("div").classes("list-tools"):
            view.button("dead.as_json", lambda: export(view, selection, "jsonl"), icon="download")
            view.button("dead.as_csv", lambda: export(view, selection, "csv"), icon="download")
    listing = Listing(
        view, _columns(), lambda row: row.offset_msg_id, empty="dead.none", selectable=view.may_change
    )
    listing.update(rows)


def _columns() -> list[Column[DeadLetterView]]:
    return [
        Column("died", "dead.died", lambda row: row.store_timestamp, "time"),
        Column("msg", "messages.id", lambda row: row.msg_id, searched=True,
               link=lambda row: path_of("messages", row.offset_msg_id)),
        Column("topic", "dead.topic", lambda row: row.original_topic, searched=True),
        Column("tag", "messages.tag", lambda row: row.tags or "", searched=True),
        Column("keys", "messages.keys", lambda row: " ".join(row.keys), searched=True),
        Column("tries", "dead.tries", lambda row: row.reconsume_times, "number"),
        Column("resent", "dead.resent", lambda row: row.resend_times, "number"),
        Column("size", "messages.size", lambda row: row.store_size, "size"),
        Column("body", "messages.body", lambda row: preview(row.body.encode()), searched=True),
    ]  # fmt: skip


def _selection_of(view: View, selection: Selection, rows: Sequence[DeadLetterView]) -> tuple[Selection, str]:
    """Return a selection that consists of the given rows, and the number of rows as a text.

    The selection's time range is that of the rows' store times. Raises NothingSelected if there are no rows.
    """
    if not rows:
        raise NothingSelected(view.t("dead.choose"))
    times = [each.store_timestamp for each in rows]
    ids = frozenset(each.offset_msg_id for each in rows)
    chosen = Selection(group=selection.group, ids=ids, begin_ms=min(times), end_ms=max(times) + 1)
    return chosen, f"{len(rows):,}"


# -- resending


async def resend(view: View, selection: Selection, count: str) -> None:
    """Ask for the target and the rate, then resend dead letters. `count` is their number as a text."""
    group = selection.group
    form = Form(view, view.t("dead.resend_of", group=group, n=count), [view.t("dead.resend_says")])
    targets = {"group": view.t("dead.way_group"), "topic": view.t("dead.way_topic")}
    target = form.choice("dead.way", targets, "group")
    rate = form.number("dead.rate", DEFAULT_RATE, 1, MAX_RATE)
    limit = form.number("dead.limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    again = form.yes_no("dead.again", False)
    if not await form.submitted():
        return
    most = int(limit.value or 1)
    resending = Resending(
        to_topic=target.value == "topic", rate=float(rate.value or 1), limit=most,
        again=again.value == "yes",
    )  # fmt: skip

    async def work(progress: ActionProgress) -> str:
        states: Counter[Resend] = Counter()
        problem = ""
        total = min(len(selection.ids), most) if selection.ids else 0
        resent = view.admin.resend(selection, resending)
        async with aclosing(resent), aclosing(progress.until_stopped(resent)) as results:  # type: ignore[type-var]
            async for result in results:
                states[result.state] += 1
                problem = result.problem or problem
                progress.outcome |= {state.value: str(count) for state, count in states.items()}
                progress.report(_summary(view, states), states.total() / total if total else None)
                # The user may have lost the permission meanwhile. The error then stops the action.
                check_permission(view, "dead.resend", group)
        if progress.stopped:
            raise PartlyDone(view.t("dead.stopped", summary=_summary(view, states)))
        if states[Resend.FAILED]:
            failed = view.t("dead.failed", n=states[Resend.FAILED], problem=problem)
            raise PartlyDone(f"{_summary(view, states)}. {failed}")
        return _summary(view, states)

    effects = [
        view.t("dead.will_topic" if resending.to_topic else "dead.will_group", n=count, group=group),
        view.t("dead.will_how", rate=f"{resending.rate:,.0f}", limit=f"{most:,}"),
    ]
    given = {**msgspec.structs.asdict(selection), **msgspec.structs.asdict(resending)}
    given["ids"] = " ".join(sorted(selection.ids)[:MAX_IDS])
    details = {
        name: str(value)[:MAX_SQL_LENGTH] for name, value in given.items() if value not in (None, "", False)
    }
    await Action(
        "dead.resend", group, effects, work, {**details, "count": count}, refresh=["dead letters", "lags"]
    ).run(view)


def _summary(view: View, states: Counter[Resend]) -> str:
    return view.t(
        "dead.summary", sent=f"{states[Resend.RESENT]:,}", skipped=f"{states[Resend.SKIPPED]:,}",
        failed=f"{states[Resend.FAILED]:,}",
    )  # fmt: skip


# -- export


async def export(view: View, selection: Selection, kind: str) -> None:
    """Let the browser download the dead letters of a selection. `kind` is `jsonl` or `csv`."""
    session = view.session
    if session.exporting:
        raise ExportInProgress(view.t("dead.export_waits"))
    session.exporting = True
    try:
        view.notify(view.t("dead.exporting"))
        letters = await select(view.admin, selection, MAX_EXPORTED)
        found = [dead_letter_view(each) for each in letters.messages]
        data = await asyncio.to_thread(csv_file if kind == "csv" else json_lines, found)
    finally:
        session.exporting = False
    if not view.services.sessions.is_valid(session):
        raise NotAllowed(view.t("users.over"))
    details = {"count": str(len(found)), "kind": kind}
    view.services.audit.record(session.name, session.address, "export", selection.group, details, "ok")
    media = "text/csv" if kind == "csv" else "application/jsonl"
    with view.client:
        ui.download.content(data, f"dead-letters.{kind}", media)
    if letters.more:
        view.notify_error(view.t("dead.export_more", n=f"{len(found):,}"))


def json_lines(letters: Iterable[DeadLetterView]) -> bytes:
    """Return the dead letters as lines, each of which is a JSON object with all fields."""
    return b"".join(msgspec.json.encode(each) + b"\n" for each in letters)


def csv_file(letters: Iterable[DeadLetterView]) -> bytes:
    """Return the dead letters as a CSV file with a header row. Times are in ms, properties are JSON.

    A text that a spreadsheet would evaluate is preceded by an apostrophe.
    """
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(CSV_COLUMNS)
    for each in letters:
        row = (
            each.topic, each.original_topic, each.msg_id, each.offset_msg_id, each.origin_msg_id, each.tags,
            " ".join(each.keys), each.born_host, each.born_timestamp, each.store_timestamp,
            each.reconsume_times, each.resend_times, msgspec.json.encode(each.properties).decode(), each.body,
            each.body_encoding,
        )  # fmt: skip
        writer.writerow([harmless(cell) for cell in row])
    return file.getvalue().encode("utf-8", "replace")


def harmless(cell: str | int | None) -> str | int:
    """Return the content of a cell in a form that no spreadsheet evaluates."""
    if not isinstance(cell, str):
        return "" if cell is None else cell
    cell = cell.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return f"'{cell}" if cell.lstrip(" \v\f\ufeff").startswith(_FORMULA_STARTS) else cell
