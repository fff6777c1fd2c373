"""The list of groups that have dead letters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cometmq.admin import Admin
from cometmq.console.base.cluster_feeds import ClusterRows, TopicRow
from cometmq.console.base.clusters import ClusterConnection
from cometmq.console.widgets.listing import Listing
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState, path_of
from cometmq.console.widgets.services import page
from cometmq.protocol.codes import DLQ_PREFIX

INTERVAL_S = 60.0
MAX_COUNTED_GROUPS = 500
"""Maximum number of groups whose dead letters are counted, because each group needs a request."""


@dataclass(frozen=True)
class DeadLetterCount:
    """The number of stored dead letters of a group. If `count` is None, `problem` is the reason."""

    group: str
    count: int | None = None
    last_ms: int | None = None
    problem: str = ""


async def ask(admin: Admin, topics: ClusterRows[TopicRow]) -> ClusterRows[DeadLetterCount]:
    """Return all groups with a dead-letter topic. Only the first MAX_COUNTED_GROUPS have a count."""
    names = [row.name.removeprefix(DLQ_PREFIX) for row in topics.rows if row.kind == "dead"]
    counts = {each.group: each for each in await admin.dead_letter_counts(names[:MAX_COUNTED_GROUPS])}
    rows = []
    for name in names:
        found = counts.get(name)
        if found is None or found.problem:
            rows.append(DeadLetterCount(name, problem=found.problem if found is not None else ""))
        else:
            rows.append(DeadLetterCount(name, found.count, found.last_update_timestamp))
    return ClusterRows(rows, topics.missing)


async def _ask_all(connection: ClusterConnection) -> ClusterRows[DeadLetterCount]:
    topics = await connection.cluster.topics().fresh()
    if topics.value is None:
        raise topics.problem or AssertionError("an answer or a problem")
    return await ask(connection.admin, topics.value)


@page("/dead", "dead.title", menu=80, icon="report")
async def dead_letters_page(view: View) -> None:
    view.title(view.t("dead.title"))
    view.note(view.t("dead.says"))
    columns: list[Column[DeadLetterCount]] = [
        Column("group", "dead.group", lambda row: row.group, searched=True,
               link=lambda row: path_of("dead", row.group)),
        Column("count", "dead.count", lambda row: row.count, "number"),
        Column("last", "dead.last", lambda row: row.last_ms, "ago"),
        Column("problem", "dead.problem", lambda row: row.problem),
    ]  # fmt: skip
    listing = Listing(
        view, columns, lambda row: row.group, default=ListState(sort="count", descending=True),
        empty="dead.no_groups", classes=lambda _row: {"problem": "bad"},
    )  # fmt: skip

    def notes(found: ClusterRows[DeadLetterCount]) -> None:
        view.missing_brokers(found.missing)
        if len(found.rows) > MAX_COUNTED_GROUPS:
            view.note(view.t("dead.counted", n=MAX_COUNTED_GROUPS))

    feed = view.feeds.feed("dead letters", partial(_ask_all, view.connection), INTERVAL_S)
    await listing.follow(feed, lambda found: found.rows, notes=notes)
