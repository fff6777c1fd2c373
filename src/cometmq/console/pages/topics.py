"""The list of topics, and making one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nicegui import ui

from cometmq.admin import TopicSettings
from cometmq.console.cluster import Found, TopicRow
from cometmq.console.frame.actions import Action, Progress, act
from cometmq.console.frame.charts import missing_note
from cometmq.console.frame.forms import Form
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, ListState, path_of
from cometmq.console.pages.places import ask_new, clusters_of
from cometmq.protocol.codes import MAX_TOPIC_LENGTH

if TYPE_CHECKING:
    from cometmq.console.app import Console

KINDS = {
    "normal": "topics.normal", "retry": "topics.retry", "dead": "topics.dead", "system": "topics.system",
}  # fmt: skip
QUEUES_MAX = 65_535
MESSAGE_TYPES = ("", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED")
PERMS = {"6": "RW-", "4": "R--", "2": "-W-"}


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/topics", "topics.title", menu=40, icon="topic")
    async def topics(view: View) -> None:
        view.title(view.t("topics.title"))
        if view.may_change:
            with ui.element("div").classes("actions"):
                view.button("topics.create", lambda: create(view), icon="add")
        feed = view.cluster.topics()
        kinds = {name: view.t(key) for name, key in KINDS.items()}
        kind = ui.select(kinds, label=view.t("topics.kind"), value=_kind(view))
        kind.props("dense outlined options-dense").style("width: 220px; margin-bottom: 8px")
        listing = Listing(
            view, _columns(), lambda row: row.name, default=ListState(sort="name"), empty="topics.none"
        )

        def pick(found: Found[TopicRow]) -> list[TopicRow]:
            missing.clear()
            with missing:
                missing_note(view, found.missing)
            return [row for row in found.rows if row.kind == _kind(view)]

        def choose() -> None:
            view.query["kind"] = str(kind.value)
            view.note_query()
            if feed.latest.value is not None:
                listing.update(pick(feed.latest.value))

        kind.on_value_change(choose)
        missing = ui.element("div")
        await listing.follow(feed, pick)


def _kind(view: View) -> str:
    asked = view.query.get("kind", "normal")
    return asked if asked in KINDS else "normal"


def _columns() -> list[Column[TopicRow]]:
    return [
        Column(
            "name",
            "topics.name",
            lambda row: row.name,
            link=lambda row: path_of("topics", row.name),
            searched=True,
        ),
        Column("type", "topics.type", lambda row: row.message_type, searched=True),
        Column("brokers", "topics.brokers", lambda row: len(row.configs), "number"),
        Column("read", "topics.read_queues", lambda row: row.read_queues, "number"),
        Column("write", "topics.write_queues", lambda row: row.write_queues, "number"),
        Column("perm", "topics.perm", lambda row: row.perm, "perm"),
    ]


async def create(view: View) -> None:
    """Ask for a new topic and make it."""
    clusters = await clusters_of(view.admin)
    form = Form(view, view.t("topics.create"), [view.t("topics.create_says")])
    name, cluster = ask_new(view, form, "topics.name", MAX_TOPIC_LENGTH, clusters)
    queues = form.number("topics.queues", 8, 1, QUEUES_MAX)
    perm = form.choice("topics.perm", PERMS, "6")
    types = {each: each or view.t("topics.no_type") for each in MESSAGE_TYPES}
    kind = form.choice("topics.type", types, "")
    if not await form.asked():
        return
    topic, count = str(name.value), int(queues.value or 0)
    settings = TopicSettings(
        topic=topic, read_queue_nums=count, write_queue_nums=count, perm=int(perm.value),
        attributes=f"+message.type={kind.value}" if kind.value else None,
    )  # fmt: skip

    async def work(progress: Progress) -> None:
        async for addr in view.admin.create_topic(settings, cluster=cluster.value):
            progress.say(view.t("topics.made_at", addr=addr))

    await act(
        view,
        Action(
            name="topic.create",
            target=topic,
            work=work,
            refresh=["topics"],
            then=path_of("topics", topic),
            says=[view.t("topics.will_create", name=topic, cluster=cluster.value, n=count)],
            details={"cluster": str(cluster.value), "settings": str(settings)},
        ),
    )
