"""The name servers: their state, the number of brokers that each one lists, and their settings."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial

from cometmq.admin import Admin, UnknownNameError
from cometmq.console.pages import clusters
from cometmq.console.widgets.listing import Listing
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, path_of
from cometmq.console.widgets.services import page
from cometmq.console.widgets.settings import setting_rows, settings_list
from cometmq.errors import CometError

INTERVAL_S = 10.0


@dataclass(frozen=True)
class NameServer:
    """The state of a name server.

    Attributes:
        clusters: Number of clusters. Like all numbers, it is None if the name server does not respond.
        brokers: Number of broker processes.
        millis: Response time in milliseconds.
        differs: Whether its list of brokers differs from that of another name server.
        problem: Error text if the name server does not respond.
    """

    addr: str
    clusters: int | None = None
    brokers: int | None = None
    millis: float | None = None
    differs: bool = False
    problem: str = ""


async def ask(admin: Admin) -> list[NameServer]:
    """Request the state of all name servers concurrently."""
    found = await asyncio.gather(*(_ask_one(admin, addr) for addr in admin.client.namesrv.addrs))
    known = [brokers for _, brokers in found if brokers is not None]
    most = max(known, key=len, default=frozenset())
    return [replace(server, differs=brokers not in (None, most)) for server, brokers in found]


async def _ask_one(admin: Admin, addr: str) -> tuple[NameServer, frozenset[str] | None]:
    began = time.perf_counter()
    try:
        info = await admin.known_by(addr)
    except CometError as error:
        return NameServer(addr, problem=str(error)), None
    millis = (time.perf_counter() - began) * 1000
    brokers = frozenset(
        each for data in info.broker_addr_table.values() for each in data.broker_addrs.values()
    )
    return NameServer(addr, len(info.cluster_addr_table), len(brokers), round(millis, 1)), brokers


@page("/names", "names.title", menu=30, icon="dns")
async def name_servers_page(view: View) -> None:
    view.title(view.t("names.title"))

    def state(row: NameServer) -> str:
        if row.problem:
            return view.t("names.silent", problem=row.problem)
        return view.t("names.differs" if row.differs else "names.answers")

    columns: list[Column[NameServer]] = [
        Column("addr", "names.addr", lambda row: row.addr, link=lambda row: path_of("names", row.addr),
               searched=True),
        Column("state", "names.state", state),
        Column("clusters", "names.clusters", lambda row: row.clusters, "number"),
        Column("brokers", "names.brokers", lambda row: row.brokers, "number"),
        Column("millis", "names.millis", lambda row: row.millis, "number"),
    ]  # fmt: skip
    listing = Listing(
        view, columns, lambda row: row.addr,
        classes=lambda row: {"state": "bad" if row.problem else "warn" if row.differs else "good"},
    )  # fmt: skip
    feed = view.feeds.feed("names", partial(ask, view.admin), INTERVAL_S)
    await listing.follow(feed, lambda rows: rows)
    clusters.section(view)


@page("/names/{addr}", "names.title", under="/names")
async def name_server_page(view: View, addr: str) -> None:
    view.title(view.t("names.settings", addr=addr))
    feed = view.feeds.feed(("name settings", addr), partial(_settings, view.admin, addr), INTERVAL_S * 3)
    await settings_list(view).follow(feed, setting_rows)


async def _settings(admin: Admin, addr: str) -> dict[str, str]:
    # The address is a part of the page's path, so the user can enter any text.
    if addr not in admin.client.namesrv.addrs:
        raise UnknownNameError("name server", addr, list(admin.client.namesrv.addrs))
    return await admin.namesrv_config(addr)
