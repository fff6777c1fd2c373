"""The clusters of the console and their name servers, as a section of the page of name servers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from nicegui import ui

from cometmq.console.base.clusters import (
    MAX_NAME_LENGTH,
    MAX_NAMESRV_LENGTH,
    NAME,
    STARTED,
    ClusterConnection,
    ClusterError,
)
from cometmq.console.widgets.actions import Action
from cometmq.console.widgets.forms import Form
from cometmq.console.widgets.listing import Listing, RowAction
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column


def section(view: View) -> None:
    """Add the list of clusters; administrators also get the actions that change it."""
    clusters = view.services.clusters
    with view.section("clusters.title"):
        view.note(view.t("clusters.says"))
        for problem in clusters.problems:
            view.note(problem, "problem")
        if view.may_change:
            with ui.element("div").classes("list-tools"):
                view.button("clusters.add", lambda: put(view, None), icon="add")
        columns: list[Column[ClusterConnection]] = [
            Column("cluster", "clusters.name", lambda row: row.name, searched=True),
            Column("namesrv", "clusters.namesrv", lambda row: row.namesrv, searched=True),
            Column("signed", "clusters.signed", lambda row: row.signed, "flag"),
            Column("standard", "clusters.standard", lambda row: row.name == clusters.standard, "flag"),
        ]
        actions: list[RowAction[ClusterConnection]] = [
            RowAction("change", "clusters.change", lambda row: put(view, row)),
            RowAction("standard", "clusters.make_standard", lambda row: make_standard(view, row)),
            RowAction("remove", "clusters.remove", lambda row: remove(view, row)),
        ]
        listing = Listing(
            view, columns, lambda row: row.name, name="clusters", actions=actions if view.may_change else ()
        )
        listing.update(list(clusters.connections.values()))


async def put(view: View, row: ClusterConnection | None) -> None:
    """Ask the user for the values of a cluster, and add the cluster or change its name servers.

    `row` is the cluster to change, or None for a new cluster.
    """
    clusters = view.services.clusters
    if row is not None and row.name == STARTED:
        raise ClusterError(view.t("clusters.started"))
    form = Form(view, view.t("clusters.add" if row is None else "clusters.change"), [view.t("clusters.form")])

    def check(text: str) -> str | None:
        valid = NAME.fullmatch(text.strip())
        return None if valid else view.t("clusters.bad_name", most=MAX_NAME_LENGTH)

    field = None
    if row is None:
        field = form.text("clusters.name", max_length=MAX_NAME_LENGTH, required=True, check=check)
    addrs = form.text(
        "clusters.namesrv", row.namesrv if row is not None else "", max_length=MAX_NAMESRV_LENGTH,
        required=True,
    )  # fmt: skip
    accounts = {"no": view.t("clusters.signed_no"), "yes": view.t("clusters.signed_yes")}
    account = form.choice("clusters.account", accounts, "yes" if row is not None and row.signed else "no")
    if not await form.submitted():
        return
    signed = account.value == "yes"
    name = row.name if row is not None else str(field.value).strip() if field is not None else ""
    if row is None and name in clusters.connections:
        raise ClusterError(view.t("clusters.there", name=name))
    namesrv = str(addrs.value).strip()
    await _execute(
        view, "cluster.add" if row is None else "cluster.change", name,
        [view.t("clusters.will_put", name=name, namesrv=namesrv), f"{accounts[account.value]}."],
        lambda: clusters.put(name, namesrv, shown=row, signed=signed), namesrv,
        signed=str(signed).lower(),
    )  # fmt: skip


async def make_standard(view: View, row: ClusterConnection) -> None:
    """Make a cluster the default."""
    effects = [view.t("clusters.will_standard", name=row.name)]
    change = partial(view.services.clusters.make_standard, row)
    await _execute(view, "cluster.standard", row.name, effects, change, row.namesrv)


async def remove(view: View, row: ClusterConnection) -> None:
    """Remove a cluster from the console; the cluster itself does not change."""
    if row.name == STARTED:
        raise ClusterError(view.t("clusters.started"))
    effects = [view.t("clusters.will_remove", name=row.name)]
    change = partial(view.services.clusters.remove, row)
    await _execute(view, "cluster.remove", row.name, effects, change, row.namesrv)


async def _execute(
    view: View, name: str, target: str, effects: Sequence[str], change: Callable[[], Awaitable[None]],
    namesrv: str, **details: str,
) -> None:  # fmt: skip
    await Action(
        name, target, effects, lambda _progress: change(), {"namesrv": namesrv, **details}, then="/names",
        of_console=True,
    ).run(view)  # fmt: skip
