"""The list of consumer groups: how far each is, and its settings at a glance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nicegui import ui

from cometmq.console.cluster import Found, GroupRow, Lag
from cometmq.console.cluster import Progress as GroupsProgress
from cometmq.console.frame.actions import Action, Progress, act
from cometmq.console.frame.charts import missing_note
from cometmq.console.frame.forms import Form
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.live import Reading
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, ListState, path_of
from cometmq.console.pages.places import ask_new, clusters_of
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.codes import MAX_GROUP_LENGTH

if TYPE_CHECKING:
    from cometmq.console.app import Console

KINDS = {"own": "groups.own", "system": "groups.system"}
RETRIES_MAX = 1_000_000


@dataclass(frozen=True)
class GroupLine:
    """A group of the list. lag, rate: None where not known: one without offsets has 0 in 0 queues."""

    row: GroupRow
    lag: Lag | None
    rate: float | None

    @property
    def config(self) -> SubscriptionGroupConfig | None:
        """The group's settings, None for a group that has only offsets or a retry topic."""
        return next(iter(self.row.configs.values()), None)


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/groups", "groups.title", menu=50, icon="groups")
    async def groups(view: View) -> None:
        view.title(view.t("groups.title"))
        if view.may_change:
            with ui.element("div").classes("actions"):
                view.button("groups.create", lambda: create(view), icon="add")
        kind = ui.select(
            {name: view.t(key) for name, key in KINDS.items()}, label=view.t("groups.kind"), value=_kind(view)
        )
        kind.props("dense outlined options-dense").style("width: 220px; margin-bottom: 8px")
        listing = Listing(
            view, _columns(), lambda line: line.row.name, empty="groups.none",
            default=ListState(sort="behind", descending=True),
            classes=lambda line: {"enabled": "bad"} if line.config and not line.config.consume_enable else {},
        )  # fmt: skip
        feed, progress = view.cluster.groups(), view.cluster.progress()
        missing = ui.element("div")

        def pick(found: Found[GroupRow]) -> list[GroupLine]:
            missing.clear()
            with missing:
                known = progress.latest.value
                missing_note(view, {**(known.missing if known is not None else {}), **found.missing})
            return lines(found.rows, progress.latest, system=_kind(view) == "system")

        def again(_reading: object = None) -> None:
            if feed.latest.value is not None:
                listing.update(pick(feed.latest.value))

        def choose() -> None:
            view.query["kind"] = str(kind.value)
            view.note_query()
            again()

        kind.on_value_change(choose)
        await view.first(progress)
        await listing.follow(feed, pick)
        view.source(progress, "groups.progress_age")
        view.watch(progress, again)


def lines(rows: list[GroupRow], progress: Reading[GroupsProgress], *, system: bool) -> list[GroupLine]:
    """The rows with what is known of how far they are."""
    return [_line(row, progress.value) for row in rows if row.system == system]


def _line(row: GroupRow, known: GroupsProgress | None) -> GroupLine:
    if known is None:
        return GroupLine(row, None, None)
    if (lag := known.groups.get(row.name)) is not None:
        return GroupLine(row, lag, known.group_rates.get(row.name))
    return GroupLine(row, None, None) if known.missing else GroupLine(row, Lag(), 0.0)


def _kind(view: View) -> str:
    asked = view.query.get("kind", "own")
    return asked if asked in KINDS else "own"


def _columns() -> list[Column[GroupLine]]:
    return [
        Column(
            "name", "groups.name", lambda line: line.row.name, searched=True,
            link=lambda line: path_of("groups", line.row.name),
        ),
        Column("behind", "groups.behind", lambda line: line.lag.behind if line.lag else None, "number"),
        Column("rate", "groups.rate", lambda line: line.rate, "rate"),
        Column("last", "groups.last", lambda line: line.lag.last_ms if line.lag else None, "ago"),
        Column("queues", "groups.queues", lambda line: line.lag.queues if line.lag else None, "number"),
        Column(
            "retries", "groups.retries",
            lambda line: line.config.retry_max_times if line.config else None, "number",
        ),
        Column(
            "enabled", "groups.enabled",
            lambda line: line.config.consume_enable if line.config else None, "flag",
        ),
        Column("brokers", "groups.brokers", lambda line: len(line.row.configs), "number"),
    ]  # fmt: skip


async def create(view: View) -> None:
    """Ask for a new group and make it."""
    clusters = await clusters_of(view.admin)
    form = Form(view, view.t("groups.create"), [view.t("groups.create_says")])
    name, cluster = ask_new(view, form, "groups.name", MAX_GROUP_LENGTH, clusters)
    retries = form.number("groups.retries", 16, -1, RETRIES_MAX)
    if not await form.asked():
        return
    config = SubscriptionGroupConfig(group_name=str(name.value), retry_max_times=int(retries.value or 0))

    async def work(progress: Progress) -> None:
        async for addr in view.admin.update_group(config, cluster=str(cluster.value)):
            progress.say(view.t("topics.made_at", addr=addr))

    await act(
        view,
        Action(
            name="group.create",
            target=config.group_name,
            work=work,
            refresh=["groups"],
            then=path_of("groups", config.group_name),
            says=[view.t("groups.will_create", name=config.group_name, cluster=cluster.value)],
            details={"cluster": str(cluster.value), "retryMaxTimes": str(config.retry_max_times)},
        ),
    )
