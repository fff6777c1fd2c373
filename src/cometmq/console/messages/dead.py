"""The groups that have dead letters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nicegui import ui

from cometmq.admin import Admin
from cometmq.console.cluster import Found, TopicRow
from cometmq.console.clusters import ClusterConnection
from cometmq.console.frame.charts import missing_note
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, ListState, path_of
from cometmq.protocol.codes import DLQ_PREFIX

if TYPE_CHECKING:
    from cometmq.console.app import Console

INTERVAL_S = 60.0
COUNTED_MAX = 500
"""Groups whose letters are counted: a request each."""


@dataclass(frozen=True)
class Row:
    """A group. count: letters that are stored, None where that is not known; problem says why."""

    group: str
    count: int | None = None
    last_ms: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class Groups:
    """What is known of all groups. missing: broker name -> why it does not answer."""

    rows: list[Row]
    missing: dict[str, str]


async def ask(admin: Admin, topics: Found[TopicRow]) -> Groups:
    """The groups with a dead-letter topic, and what the first COUNTED_MAX have stored there."""
    names = [row.name.removeprefix(DLQ_PREFIX) for row in topics.rows if row.kind == "dead"]
    counts = {each.group: each for each in await admin.dead_letter_counts(names[:COUNTED_MAX])}
    rows = []
    for name in names:
        found = counts.get(name)
        if found is None or found.problem:
            rows.append(Row(name, problem=found.problem if found is not None else ""))
        else:
            rows.append(Row(name, found.count, found.last_update_timestamp))
    return Groups(rows, topics.missing)


def pages(console: Console) -> None:
    """Put the page in."""

    async def all_groups(connection: ClusterConnection) -> Groups:
        topics = await connection.cluster.topics().fresh()
        if topics.value is None:
            raise topics.problem or AssertionError("an answer or a problem")
        return await ask(connection.admin, topics.value)

    @console.page("/dead", "dead.title", menu=80, icon="report")
    async def dead(view: View) -> None:
        view.title(view.t("dead.title"))
        view.note(view.t("dead.says"))
        missing = ui.element("div")
        columns: list[Column[Row]] = [
            Column(
                "group", "dead.group", lambda row: row.group, searched=True,
                link=lambda row: path_of("dead", row.group),
            ),
            Column("count", "dead.count", lambda row: row.count, "number"),
            Column("last", "dead.last", lambda row: row.last_ms, "ago"),
            Column("problem", "dead.problem", lambda row: row.problem),
        ]  # fmt: skip
        listing = Listing(
            view, columns, lambda row: row.group, default=ListState(sort="count", descending=True),
            empty="dead.no_groups", classes=lambda _row: {"problem": "bad"},
        )  # fmt: skip

        def pick(found: Groups) -> list[Row]:
            missing.clear()
            with missing:
                missing_note(view, found.missing)
                if len(found.rows) > COUNTED_MAX:
                    view.note(view.t("dead.counted", n=COUNTED_MAX))
            return found.rows

        await listing.follow(
            view.feeds.feed("dead letters", partial(all_groups, view.connection), INTERVAL_S), pick
        )
