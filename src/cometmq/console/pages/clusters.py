"""The clusters of the console: which there are, and by which name servers they are found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nicegui import ui

from cometmq.console.clusters import (
    MAX_NAME,
    MAX_NAMESRV,
    NAME,
    STARTED,
    ClusterError,
    Clusters,
)
from cometmq.console.frame.actions import Action, Progress, act
from cometmq.console.frame.forms import Form
from cometmq.console.frame.listing import Listing, RowAction
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column


@dataclass(frozen=True)
class Row:
    """A cluster of the console."""

    name: str
    namesrv: str
    signed: bool
    standard: bool


def rows_of(clusters: Clusters) -> list[Row]:
    """Return all clusters, that of the start first."""
    return [
        Row(each.name, each.namesrv, each.signed, each.name == clusters.standard)
        for each in clusters.connections.values()
    ]


def section(view: View) -> None:
    """Show the list, and to administrators what changes it."""
    clusters = view.console.clusters
    with view.section("clusters.title"):
        view.note(view.t("clusters.says"))
        if view.may_change:
            with ui.element("div").classes("list-tools"):
                view.button("clusters.add", lambda: put(view, None), icon="add")
        actions = [
            RowAction[Row]("change", "clusters.change", lambda row: put(view, row)),
            RowAction[Row]("standard", "clusters.make_standard", lambda row: make_standard(view, row)),
            RowAction[Row]("remove", "clusters.remove", lambda row: remove(view, row)),
        ]
        listing = Listing(
            view,
            [
                Column[Row]("cluster", "clusters.name", lambda row: row.name, searched=True),
                Column[Row]("namesrv", "clusters.namesrv", lambda row: row.namesrv, searched=True),
                Column[Row]("signed", "clusters.signed", lambda row: row.signed, "flag"),
                Column[Row]("standard", "clusters.standard", lambda row: row.standard, "flag"),
            ],
            lambda row: row.name,
            name="clusters",
            actions=actions if view.may_change else (),
        )
        listing.update(rows_of(clusters))


async def put(view: View, row: Row | None) -> None:
    """Add a cluster, or give one other name servers."""
    clusters = view.console.clusters
    if row is not None and row.name == STARTED:
        raise ClusterError(view.t("clusters.started"))
    form = Form(view, view.t("clusters.add" if row is None else "clusters.change"), [view.t("clusters.form")])

    def legal(said: str) -> str | None:
        return None if NAME.fullmatch(said.strip()) else view.t("clusters.bad_name", most=MAX_NAME)

    field = form.text("clusters.name", most=MAX_NAME, needed=True, check=legal) if row is None else None
    addrs = form.text(
        "clusters.namesrv", row.namesrv if row is not None else "", most=MAX_NAMESRV, needed=True
    )
    yes_or_no = {"no": view.t("clusters.signed_no"), "yes": view.t("clusters.signed_yes")}
    account = form.choice("clusters.account", yes_or_no, "yes" if row is not None and row.signed else "no")
    if not await form.asked():
        return
    signed = account.value == "yes"
    name = row.name if row is not None else str(field.value).strip() if field is not None else ""
    if row is None and name in clusters.connections:
        raise ClusterError(view.t("clusters.there", name=name))
    namesrv = str(addrs.value).strip()
    await _do(
        view, "cluster.add" if row is None else "cluster.change", name,
        [view.t("clusters.will_put", name=name, namesrv=namesrv), f"{yes_or_no[account.value]}."],
        lambda: clusters.put(name, namesrv, new=row is None, signed=signed), namesrv,
        signed=str(signed).lower(),
    )  # fmt: skip


async def make_standard(view: View, row: Row) -> None:
    """Have browsers that have chosen no cluster show this one."""
    said = [view.t("clusters.will_standard", name=row.name)]
    do = partial(view.console.clusters.make_standard, row.name)
    await _do(view, "cluster.standard", row.name, said, do, row.namesrv)


async def remove(view: View, row: Row) -> None:
    """Show a cluster no longer; nothing changes in the cluster itself."""
    if row.name == STARTED:
        raise ClusterError(view.t("clusters.started"))
    said = [view.t("clusters.will_remove", name=row.name)]
    do = partial(view.console.clusters.remove, row.name)
    await _do(view, "cluster.remove", row.name, said, do, row.namesrv)


async def _do(
    view: View, name: str, target: str, said: Sequence[str], do: Callable[[], Awaitable[None]],
    namesrv: str, **details: str,
) -> None:  # fmt: skip
    async def work(_progress: Progress) -> None:
        await do()

    action = Action(
        name=name, target=target, says=said, work=work, details={"namesrv": namesrv, **details},
        then="/names", of_console=True,
    )  # fmt: skip
    await act(view, action)
