"""The lists of consumer groups and of producers, and the creation of groups."""

from __future__ import annotations

from dataclasses import dataclass

from nicegui import ui

from cometmq.admin import operations
from cometmq.admin.operations import Operation
from cometmq.admin.rates import Lag
from cometmq.console.base.cluster_feeds import ClusterLags, GroupRow, ProducerRow
from cometmq.console.base.feeds import Reading
from cometmq.console.pages.targets import cluster_choice, name_field
from cometmq.console.widgets.actions import run_operation
from cometmq.console.widgets.forms import Form
from cometmq.console.widgets.listing import Listing, kind_choice
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState, path_of
from cometmq.console.widgets.services import page
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.codes import MAX_GROUP_LENGTH, version_name

KINDS = {"own": "groups.own", "system": "groups.system"}
MAX_RETRIES = 1_000_000


@dataclass(frozen=True)
class GroupLine:
    """A group in the list.

    `lag` and `rate` are None if no broker has reported them for the group.
    """

    row: GroupRow
    lag: Lag | None
    rate: float | None

    @property
    def config(self) -> SubscriptionGroupConfig | None:
        """The group's settings, or None for a group that has only offsets or a retry topic."""
        return next(iter(self.row.configs.values()), None)


@page("/groups", "groups.title", menu=50, icon="groups")
async def groups_page(view: View) -> None:
    view.title(view.t("groups.title"))
    if view.may_change:
        with ui.element("div").classes("actions"):
            view.button("groups.create", lambda: create(view), icon="add")
    kind = kind_choice(view, "groups.kind", KINDS, lambda: listing.refresh())
    listing = Listing(
        view, _columns(), lambda line: line.row.name, empty="groups.none",
        default=ListState(sort="behind", descending=True),
        classes=lambda line: {"enabled": "bad"} if line.config and not line.config.consume_enable else {},
    )  # fmt: skip
    lags = view.cluster.lags()
    await view.first_reading(lags)
    await listing.follow(
        view.cluster.groups(),
        lambda found: lines(found.rows, lags.latest, system=kind() == "system"),
        notes=lambda found: view.missing_brokers(
            {**(lags.latest.value.missing if lags.latest.value is not None else {}), **found.missing}
        ),
    )
    view.show_age(lags, "groups.progress_age")
    view.watch(lags, lambda _reading: listing.refresh())


def lines(rows: list[GroupRow], lags: Reading[ClusterLags], *, system: bool) -> list[GroupLine]:
    """Return the lines of the list of groups: only system groups if `system` is true, else only other groups.

    The lag and the rate in a line are None if they are not known.
    """
    behind = lags.value.groups if lags.value is not None else {}
    rates = lags.value.group_rates if lags.value is not None else {}
    return [GroupLine(row, behind.get(row.name), rates.get(row.name)) for row in rows if row.system == system]


def _columns() -> list[Column[GroupLine]]:
    return [
        Column("name", "groups.name", lambda line: line.row.name, searched=True,
               link=lambda line: path_of("groups", line.row.name)),
        Column("behind", "groups.behind", lambda line: line.lag.behind if line.lag else None, "number"),
        Column("rate", "groups.rate", lambda line: line.rate, "rate"),
        Column("last", "groups.last", lambda line: line.lag.last_ms if line.lag else None, "ago"),
        Column("queues", "groups.queues", lambda line: line.lag.queues if line.lag else None, "number"),
        Column("retries", "groups.retries",
               lambda line: line.config.retry_max_times if line.config else None, "number"),
        Column("enabled", "groups.enabled",
               lambda line: line.config.consume_enable if line.config else None, "flag"),
        Column("brokers", "groups.brokers", lambda line: len(line.row.configs), "number"),
    ]  # fmt: skip


async def create(view: View) -> None:
    """Ask the user for a new group and create it."""
    form = Form(view, view.t("groups.create"), [view.t("groups.create_says")])
    name = name_field(view, form, "groups.name", MAX_GROUP_LENGTH)
    cluster = await cluster_choice(view, form)
    retries = form.number("groups.retries", 16, -1, MAX_RETRIES)
    if not await form.submitted():
        return
    group = str(name.value)
    config = SubscriptionGroupConfig(group_name=group, retry_max_times=int(retries.value or 0))

    async def operation() -> Operation:
        at = dict.fromkeys(await view.admin.master_addrs(str(cluster.value)), config)
        return operations.update_group(view.admin, group, at, name="group.create")

    await run_operation(
        view, operation,
        [view.t("groups.will_create", name=group, cluster=cluster.value)],
        {"cluster": str(cluster.value), "retryMaxTimes": str(config.retry_max_times)},
        refresh=["groups"], then=path_of("groups", group),
    )  # fmt: skip


def client_kind(grpc_type: str | None) -> str:
    """Return the protocol of a client and, for gRPC, its type."""
    return f"gRPC {grpc_type}" if grpc_type else "remoting"


@page("/producers", "producers.title", menu=60, icon="outbox")
async def producers_page(view: View) -> None:
    view.title(view.t("producers.title"))
    columns: list[Column[ProducerRow]] = [
        Column("group", "producers.group", lambda row: row.group, searched=True),
        Column("client", "group.client", lambda row: row.client.client_id, searched=True),
        Column("addr", "group.addr", lambda row: row.client.remote_ip, searched=True),
        Column("kind", "group.kind", lambda row: client_kind(row.client.grpc_type), searched=True),
        Column("language", "producers.language", lambda row: row.client.language),
        Column("version", "group.version", lambda row: version_name(row.client.version)),
        Column("brokers", "producers.brokers", lambda row: ", ".join(row.brokers), searched=True),
        Column("last", "producers.last", lambda row: row.client.last_update_timestamp, "ago"),
    ]
    listing = Listing(
        view, columns, lambda row: f"{row.group} {row.client.client_id}", empty="producers.none",
        default=ListState(sort="group"),
    )  # fmt: skip
    await listing.follow(
        view.cluster.producers(),
        lambda found: found.rows,
        notes=lambda found: view.missing_brokers(found.missing),
    )
