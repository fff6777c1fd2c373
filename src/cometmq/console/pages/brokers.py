"""Clusters and their brokers: roles, rates, disks, lag of slaves; one broker with its settings and
numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nicegui import ui

from cometmq.admin import Admin, BrokerStatus, UnknownNameError
from cometmq.console.cluster import disk_of, get_rate, put_rate
from cometmq.console.frame.actions import Action, PartlyDone, Progress, act
from cometmq.console.frame.forms import Form
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View
from cometmq.console.frame.rows import Column, ListState, path_of
from cometmq.console.frame.settings import Setting, setting_rows, settings_list
from cometmq.console.pages.overview import DISK_FULL, got_today, left_notes, put_today
from cometmq.errors import CometError
from cometmq.protocol.bodies_admin import HaConnectionInfo, HaRuntimeInfo

if TYPE_CHECKING:
    from cometmq.console.app import Console

INTERVAL_S = 10.0
KEY_MAX, VALUE_MAX = 200, 10_000


@dataclass(frozen=True)
class BrokerState:
    """What a broker says of itself. ha: None where it does not say, because it is of 4.9 for example."""

    settings: dict[str, str]
    runtime: dict[str, str]
    ha: HaRuntimeInfo | None


async def ask(admin: Admin, addr: str) -> BrokerState:
    """Raises UnknownNameError for an address that is no broker's: one in a link is anybody's."""
    await check_broker(admin, addr)
    settings, runtime = await asyncio.gather(admin.broker_config(addr), admin.runtime(addr))
    try:
        ha = await admin.ha_status(addr)
    except CometError:
        ha = None
    return BrokerState(settings, runtime, ha)


async def check_broker(admin: Admin, addr: str) -> str:
    """The name of the broker with this address. Raises UnknownNameError."""
    known = {
        each: name
        for name, data in (await admin.cluster_info()).broker_addr_table.items()
        for each in data.broker_addrs.values()
    }
    if addr not in known:
        raise UnknownNameError("broker", addr, sorted(known))
    return known[addr]


def pages(console: Console) -> None:
    """Put the pages in."""

    @console.page("/brokers", "brokers.title", menu=20, icon="storage")
    async def brokers(view: View) -> None:
        view.title(view.t("brokers.title"))
        listing = Listing(
            view, _columns(view), lambda row: f"{row.cluster_name} {row.broker_name} {row.broker_id}",
            empty="overview.no_brokers", classes=_classes,
        )  # fmt: skip
        gone = ui.element("div").props("aria-live=polite")

        def pick(found: list[BrokerStatus]) -> list[BrokerStatus]:
            gone.clear()
            with gone:
                left_notes(view)
            return found

        await listing.follow(view.cluster.brokers(), pick)

    @console.page("/brokers/{addr}", "brokers.title", under="/brokers")
    async def broker(view: View, addr: str) -> None:
        view.title(view.t("broker.title", addr=addr))
        feed = view.feeds.feed(("broker", addr), partial(ask, view.admin, addr), INTERVAL_S)
        if view.may_change:
            _actions(view, addr)
        await view.live(feed, lambda state: _summary(view, state))
        with view.section("broker.slaves"):
            slaves = Listing(
                view, _slave_columns(), lambda row: row.addr, name="ha", empty="broker.no_slaves"
            )
            await slaves.follow(feed, lambda state: state.ha.ha_connection_info if state.ha else [])
        with view.section("broker.settings"):
            await settings_list(view, name="set").follow(feed, lambda state: setting_rows(state.settings))
        with view.section("broker.runtime"):
            columns: list[Column[Setting]] = [
                Column("key", "broker.number", lambda row: row.key, searched=True),
                Column("value", "settings.value", lambda row: row.value),
            ]
            runtime = Listing(view, columns, lambda row: row.key, name="run", default=ListState(sort="key"))
            await runtime.follow(feed, lambda state: setting_rows(state.runtime))


def _classes(row: BrokerStatus) -> dict[str, str]:
    if row.problem:
        return {"state": "bad"}
    disk = disk_of(row)
    return {"state": "good"} | ({"disk": "bad"} if disk is not None and disk >= DISK_FULL else {})


def _if_answers(value: Callable[[BrokerStatus], float | None]) -> Callable[[BrokerStatus], float | None]:
    """A number of a broker, None where it has not answered: that is not 0."""
    return lambda row: value(row) if row.runtime else None


def _columns(view: View) -> list[Column[BrokerStatus]]:
    return [
        Column("cluster", "brokers.cluster", lambda row: row.cluster_name, searched=True),
        Column("name", "brokers.name", lambda row: row.broker_name, searched=True),
        Column("number", "brokers.id", lambda row: row.broker_id, "number"),
        Column("role", "brokers.role", lambda row: row.role or None),
        Column("addr", "brokers.addr", lambda row: row.broker_addr, searched=True,
               link=lambda row: path_of("brokers", row.broker_addr)),
        Column("state", "brokers.state", lambda row: view.t("brokers.silent", problem=row.problem)
               if row.problem else view.t("names.answers")),
        Column("version", "brokers.version", lambda row: row.runtime.get("brokerVersionDesc")),
        Column("put", "overview.put", put_rate, "rate"),
        Column("get", "overview.get", get_rate, "rate"),
        Column("sent", "overview.put_today", _if_answers(put_today), "number"),
        Column("got", "overview.got_today", _if_answers(got_today), "number"),
        Column("disk", "brokers.disk", disk_of, "percent"),
        Column("lag", "brokers.lag", lambda row: row.lag if row.broker_id else 0, "size"),
        Column("started", "brokers.started",
               _if_answers(lambda row: row.count("bootTimestamp") or None), "ago"),
    ]  # fmt: skip


def _summary(view: View, state: BrokerState) -> None:
    said = BrokerStatus(cluster_name="", broker_name="", broker_id=0, broker_addr="", runtime=state.runtime)
    view.facts(
        [
            (view.t("brokers.name"), state.settings.get("brokerName", "")),
            (view.t("brokers.role"), state.settings.get("brokerRole", "")),
            (view.t("brokers.version"), state.runtime.get("brokerVersionDesc", "")),
            (view.t("overview.put"), view.shown("rate", put_rate(said))),
            (view.t("overview.get"), view.shown("rate", get_rate(said))),
            (view.t("brokers.disk"), view.shown("percent", disk_of(said))),
            (view.t("broker.flush"), state.settings.get("flushDiskType", "")),
        ]
    )


def _slave_columns() -> list[Column[HaConnectionInfo]]:
    return [
        Column("addr", "brokers.addr", lambda row: row.addr),
        Column("behind", "brokers.lag", lambda row: row.diff, "size"),
        Column("rate", "broker.transferred", lambda row: row.transferred_byte_in_second, "size"),
        Column("sync", "broker.in_sync", lambda row: row.in_sync, "flag"),
    ]


# -- what can be done


def _actions(view: View, addr: str) -> None:
    admin = view.admin
    with ui.element("div").classes("actions"):
        view.button("broker.set", lambda: change(view, addr), icon="edit")
        files: list[tuple[str, str, Callable[[str], Awaitable[None]]]] = [
            ("broker.clean_queues", "broker.clean_queues_says", admin.clean_expired_consume_queues),
            ("broker.clean_log", "broker.clean_log_says", admin.delete_expired_commit_log),
            ("broker.clean_topics", "broker.clean_topics_says", admin.clean_unused_topics),
        ]
        for name, says, do in files:
            view.button(name, partial(_files, view, addr, name, says, do))
        view.button("broker.wipe", lambda: _write_perm(view, addr, allow=False), danger=True)
        view.button("broker.allow", lambda: _write_perm(view, addr, allow=True))


async def change(view: View, addr: str) -> None:
    """Ask for a setting and set it."""
    await check_broker(view.admin, addr)
    form = Form(view, view.t("broker.set_of", addr=addr), [view.t("broker.set_says")])
    key = form.text("settings.key", most=KEY_MAX, needed=True)
    value = form.text("settings.value", most=VALUE_MAX)
    if not await form.asked():
        return
    settings = {str(key.value).strip(): str(value.value or "")}

    async def work(_progress: Progress) -> str | None:
        done = await view.admin.update_broker_config(addr, settings)
        if done.unknown:
            raise PartlyDone(view.t("broker.ignored", keys=", ".join(done.unknown)))
        if done.not_written:
            return view.t("broker.not_written")
        return view.t("broker.at_start", keys=", ".join(done.at_next_start)) if done.at_next_start else None

    (shown,) = setting_rows(settings)
    await act(
        view,
        Action(
            name="broker.set",
            target=addr,
            work=work,
            danger=True,
            refresh=[("broker", addr)],
            says=[view.t("broker.will_set", addr=addr, setting=f"{shown.key}={shown.value}")],
            details={"setting": f"{shown.key}={shown.value}"},
        ),
    )


async def _files(view: View, addr: str, name: str, says: str, do: Callable[[str], Awaitable[None]]) -> None:
    await check_broker(view.admin, addr)

    async def work(_progress: Progress) -> None:
        await do(addr)

    await act(view, Action(name=name, target=addr, work=work, says=[view.t(says, addr=addr)], danger=True))


async def _write_perm(view: View, addr: str, *, allow: bool) -> None:
    name = await check_broker(view.admin, addr)

    async def work(_progress: Progress) -> str:
        change = view.admin.add_write_perm if allow else view.admin.wipe_write_perm
        done = await change(name)
        problems = [f"{each.namesrv}: {each.problem}" for each in done if each.problem]
        if problems:
            raise PartlyDone("\n".join(problems))
        return view.t("broker.perms", n=max((each.topics for each in done), default=0))

    says = view.t("broker.will_allow" if allow else "broker.will_wipe", name=name)
    await act(
        view,
        Action(
            name="broker.allow" if allow else "broker.wipe",
            target=name,
            work=work,
            says=[says],
            danger=not allow,
            refresh=["topics"],
        ),
    )
