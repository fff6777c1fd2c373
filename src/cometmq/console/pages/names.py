"""The page of the name servers: who answers, what each knows, how each is set."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cometmq.admin import Admin, UnknownNameError
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, path_of
from cometmq.console.frame.settings import setting_rows, settings_list
from cometmq.console.pages import clusters
from cometmq.errors import CometError

if TYPE_CHECKING:
    from cometmq.console.app import Console

INTERVAL_S = 10.0


@dataclass(frozen=True)
class NameServer:
    """What a name server says. Counts are None where it does not answer; problem says why. differs: it knows
    other brokers than the others do."""

    addr: str
    clusters: int | None = None
    brokers: int | None = None
    millis: float | None = None
    differs: bool = False
    problem: str = ""


async def ask(admin: Admin) -> list[NameServer]:
    """All name servers, side by side."""
    addrs = admin.client.namesrv.addrs
    found = await asyncio.gather(*(_ask_one(admin, addr) for addr in addrs))
    known = [brokers for _, brokers in found if brokers is not None]
    most = max(known, key=len, default=frozenset())
    return [
        server if brokers in (None, most) else NameServer(
            server.addr, server.clusters, server.brokers, server.millis, differs=True
        )
        for server, brokers in found
    ]  # fmt: skip


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


def pages(console: Console) -> None:
    """Put the pages in."""

    @console.page("/names", "names.title", menu=30, icon="dns")
    async def names(view: View) -> None:
        view.title(view.t("names.title"))

        def state(row: NameServer) -> str:
            if row.problem:
                return view.t("names.silent", problem=row.problem)
            return view.t("names.differs" if row.differs else "names.answers")

        columns: list[Column[NameServer]] = [
            Column(
                "addr", "names.addr", lambda row: row.addr,
                link=lambda row: path_of("names", row.addr), searched=True,
            ),
            Column("state", "names.state", state),
            Column("clusters", "names.clusters", lambda row: row.clusters, "number"),
            Column("brokers", "names.brokers", lambda row: row.brokers, "number"),
            Column("millis", "names.millis", lambda row: row.millis, "number"),
        ]  # fmt: skip
        listing = Listing(
            view, columns, lambda row: row.addr,
            classes=lambda row: {"state": "bad" if row.problem else "warn" if row.differs else "good"},
        )  # fmt: skip
        await listing.follow(
            view.feeds.feed("names", partial(ask, view.admin), INTERVAL_S), lambda rows: rows
        )
        clusters.section(view)

    @console.page("/names/{addr}", "names.title", under="/names")
    async def settings(view: View, addr: str) -> None:
        view.title(view.t("names.settings", addr=addr))
        feed = view.feeds.feed(("name settings", addr), partial(_settings, view.admin, addr), INTERVAL_S * 3)
        await settings_list(view).follow(feed, setting_rows)


async def _settings(admin: Admin, addr: str) -> dict[str, str]:
    if addr not in admin.client.namesrv.addrs:  # an address in a link is anybody's
        raise UnknownNameError("name server", addr, list(admin.client.namesrv.addrs))
    return await admin.namesrv_config(addr)
