"""The list of topics, and the creation of topics."""

from __future__ import annotations

from nicegui import ui

from cometmq.admin import TopicSettings, operations
from cometmq.admin.operations import Operation
from cometmq.console.base.cluster_feeds import TopicRow
from cometmq.console.pages.targets import cluster_choice, name_field
from cometmq.console.widgets.actions import run_operation
from cometmq.console.widgets.forms import Form
from cometmq.console.widgets.listing import Listing, kind_choice
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState, path_of
from cometmq.console.widgets.services import page
from cometmq.protocol.codes import MAX_TOPIC_LENGTH

KINDS = {
    "normal": "topics.normal", "retry": "topics.retry", "dead": "topics.dead", "system": "topics.system",
}  # fmt: skip
MAX_QUEUES = 65_535
MESSAGE_TYPES = ("", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "MIXED")
PERMS = {"6": "RW-", "4": "R--", "2": "-W-"}


@page("/topics", "topics.title", menu=40, icon="topic")
async def topics_page(view: View) -> None:
    view.title(view.t("topics.title"))
    if view.may_change:
        with ui.element("div").classes("actions"):
            view.button("topics.create", lambda: create(view), icon="add")
    kind = kind_choice(view, "topics.kind", KINDS, lambda: listing.refresh())
    columns: list[Column[TopicRow]] = [
        Column("name", "topics.name", lambda row: row.name, link=lambda row: path_of("topics", row.name),
               searched=True),
        Column("type", "topics.type", lambda row: row.message_type, searched=True),
        Column("brokers", "topics.brokers", lambda row: len(row.configs), "number"),
        Column("read", "topics.read_queues", lambda row: row.read_queues, "number"),
        Column("write", "topics.write_queues", lambda row: row.write_queues, "number"),
        Column("perm", "topics.perm", lambda row: row.perm, "perm"),
    ]  # fmt: skip
    listing = Listing(
        view, columns, lambda row: row.name, default=ListState(sort="name"), empty="topics.none"
    )
    await listing.follow(
        view.cluster.topics(),
        lambda found: [row for row in found.rows if row.kind == kind()],
        notes=lambda found: view.missing_brokers(found.missing),
    )


async def create(view: View) -> None:
    """Ask the user for a new topic and create it."""
    form = Form(view, view.t("topics.create"), [view.t("topics.create_says")])
    name = name_field(view, form, "topics.name", MAX_TOPIC_LENGTH)
    cluster = await cluster_choice(view, form)
    queues = form.number("topics.queues", 8, 1, MAX_QUEUES)
    perm = form.choice("topics.perm", PERMS, "6")
    types = {each: each or view.t("topics.no_type") for each in MESSAGE_TYPES}
    kind = form.choice("topics.type", types, "")
    if not await form.submitted():
        return
    topic, count = str(name.value), int(queues.value or 0)
    settings = TopicSettings(
        topic=topic, read_queue_nums=count, write_queue_nums=count, perm=int(perm.value),
        attributes=f"+message.type={kind.value}" if kind.value else None,
    )  # fmt: skip

    async def operation() -> Operation:
        at = dict.fromkeys(await view.admin.master_addrs(str(cluster.value)), settings)
        return operations.update_topic(view.admin, topic, at, name="topic.create")

    await run_operation(
        view, operation,
        [view.t("topics.will_create", name=topic, cluster=cluster.value, n=count)],
        {"cluster": str(cluster.value), "settings": str(settings)},
        refresh=["topics"], then=path_of("topics", topic),
    )  # fmt: skip
