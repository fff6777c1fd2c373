"""The list of brokers; one broker with its slaves, settings and runtime metrics, and the actions on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nicegui import ui

from cometmq.admin import Admin, BrokerStatus, PermChange, SettingsChange, UnknownNameError, operations
from cometmq.admin.rates import disk_of, get_rate, put_rate
from cometmq.console.base.errors import PartlyDone
from cometmq.console.pages.overview import DISK_FULL_SHARE, got_today, lost_broker_notes, put_today
from cometmq.console.widgets.actions import Action
from cometmq.console.widgets.forms import Form
from cometmq.console.widgets.listing import Listing
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState, path_of
from cometmq.console.widgets.services import page
from cometmq.console.widgets.settings import Setting, setting_rows, settings_list
from cometmq.errors import CometError
from cometmq.protocol.bodies.admin import HaConnectionInfo, HaRuntimeInfo

INTERVAL_S = 10.0
MAX_KEY_LENGTH, MAX_VALUE_LENGTH = 200, 10_000


@dataclass(frozen=True)
class BrokerState:
    """The state of a broker. `ha` is None if the broker does not report it; RocketMQ 4.9 does not."""

    settings: dict[str, str]
    runtime: dict[str, str]
    ha: HaRuntimeInfo | None


async def ask(admin: Admin, addr: str) -> BrokerState:
    """Return the state of the broker at an address. Raises UnknownNameError if no broker has the address."""
    await broker_name(admin, addr)
    settings, runtime = await asyncio.gather(admin.broker_config(addr), admin.runtime(addr))
    try:
        ha = await admin.ha_status(addr)
    except CometError:
        ha = None
    return BrokerState(settings, runtime, ha)


async def broker_name(admin: Admin, addr: str) -> str:
    """Return the name of the broker at an address. Raises UnknownNameError."""
    table = (await admin.cluster_info()).broker_addr_table
    known = {each: name for name, data in table.items() for each in data.broker_addrs.values()}
    if addr not in known:
        raise UnknownNameError("broker", addr, sorted(known))
    return known[addr]


@page("/brokers", "brokers.title", menu=20, icon="storage")
async def brokers_page(view: View) -> None:
    view.title(view.t("brokers.title"))
    listing = Listing(
        view, _columns(view), lambda row: f"{row.cluster_name} {row.broker_name} {row.broker_id}",
        empty="overview.no_brokers", classes=_classes,
    )  # fmt: skip
    await listing.follow(
        view.cluster.brokers(), lambda found: found, notes=lambda _found: lost_broker_notes(view)
    )


@page("/brokers/{addr}", "brokers.title", under="/brokers")
async def broker_page(view: View, addr: str) -> None:
    view.title(view.t("broker.title", addr=addr))
    feed = view.feeds.feed(("broker", addr), partial(ask, view.admin, addr), INTERVAL_S)
    if view.may_change:
        _actions(view, addr)
    await view.live(feed, lambda state: _summary(view, state))
    with view.section("broker.slaves"):
        columns: list[Column[HaConnectionInfo]] = [
            Column("addr", "brokers.addr", lambda row: row.addr),
            Column("behind", "brokers.lag", lambda row: row.diff, "size"),
            Column("rate", "broker.transferred", lambda row: row.transferred_byte_in_second, "size"),
            Column("sync", "broker.in_sync", lambda row: row.in_sync, "flag"),
        ]
        slaves = Listing(view, columns, lambda row: row.addr, name="ha", empty="broker.no_slaves")
        await slaves.follow(feed, lambda state: state.ha.ha_connection_info if state.ha else [])
    with view.section("broker.settings"):
        await settings_list(view, name="set").follow(feed, lambda state: setting_rows(state.settings))
    with view.section("broker.runtime"):
        metrics: list[Column[Setting]] = [
            Column("key", "broker.number", lambda row: row.key, searched=True),
            Column("value", "settings.value", lambda row: row.value),
        ]
        runtime = Listing(view, metrics, lambda row: row.key, name="run", default=ListState(sort="key"))
        await runtime.follow(feed, lambda state: setting_rows(state.runtime))


def _classes(row: BrokerStatus) -> dict[str, str]:
    if row.problem:
        return {"state": "bad"}
    disk = disk_of(row)
    return {"state": "good"} | ({"disk": "bad"} if disk is not None and disk >= DISK_FULL_SHARE else {})


def _if_responding(value: Callable[[BrokerStatus], float | None]) -> Callable[[BrokerStatus], float | None]:
    """Return a function that returns None for a broker that does not respond, and else calls `value`."""
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
        Column("sent", "overview.put_today", _if_responding(put_today), "number"),
        Column("got", "overview.got_today", _if_responding(got_today), "number"),
        Column("disk", "brokers.disk", disk_of, "percent"),
        Column("lag", "brokers.lag", lambda row: row.lag if row.broker_id else 0, "size"),
        Column("started", "brokers.started",
               _if_responding(lambda row: row.count("bootTimestamp") or None), "ago"),
    ]  # fmt: skip


def _summary(view: View, state: BrokerState) -> None:
    status = BrokerStatus(cluster_name="", broker_name="", broker_id=0, broker_addr="", runtime=state.runtime)
    view.facts(
        [
            ("brokers.name", state.settings.get("brokerName", "")),
            ("brokers.role", state.settings.get("brokerRole", "")),
            ("brokers.version", state.runtime.get("brokerVersionDesc", "")),
            ("overview.put", view.format("rate", put_rate(status))),
            ("overview.get", view.format("rate", get_rate(status))),
            ("brokers.disk", view.format("percent", disk_of(status))),
            ("broker.flush", state.settings.get("flushDiskType", "")),
        ]
    )


# -- actions


def _actions(view: View, addr: str) -> None:
    with ui.element("div").classes("actions"):
        view.button("broker.set", lambda: change(view, addr), icon="edit")
        cleanups = {
            "broker.clean_queues": "broker.clean_queues_says",
            "broker.clean_log": "broker.clean_log_says",
            "broker.clean_topics": "broker.clean_topics_says",
        }
        for name, effect in cleanups.items():
            view.button(name, partial(_clean, view, addr, name, effect))
        view.button("broker.wipe", lambda: _set_write_perm(view, addr, allow=False), danger=True)
        view.button("broker.allow", lambda: _set_write_perm(view, addr, allow=True))


async def change(view: View, addr: str) -> None:
    """Ask the user for a setting of a broker and set it."""
    await broker_name(view.admin, addr)
    form = Form(view, view.t("broker.set_of", addr=addr), [view.t("broker.set_says")])
    key = form.text("settings.key", max_length=MAX_KEY_LENGTH, required=True)
    value = form.text("settings.value", max_length=MAX_VALUE_LENGTH)
    if not await form.submitted():
        return
    operation = operations.set_broker(view.admin, [addr], str(key.value).strip(), str(value.value or ""))

    def result(results: list[SettingsChange]) -> str | None:
        (done,) = results
        if done.unknown:
            raise PartlyDone(view.t("broker.ignored", keys=", ".join(done.unknown)))
        if done.not_written:
            return view.t("broker.not_written")
        return view.t("broker.at_start", keys=", ".join(done.at_next_start)) if done.at_next_start else None

    (row,) = setting_rows({str(key.value).strip(): str(value.value or "")})
    setting = f"{row.key}={row.value}"
    await Action.of(
        operation, [view.t("broker.will_set", addr=addr, setting=setting)], {"setting": setting},
        result=result, danger=True, refresh=[("broker", addr)],
    ).run(view)  # fmt: skip


async def _clean(view: View, addr: str, name: str, effect: str) -> None:
    await broker_name(view.admin, addr)
    await Action.of(operations.clean(view.admin, name, [addr]), [view.t(effect, addr=addr)]).run(view)


async def _set_write_perm(view: View, addr: str, *, allow: bool) -> None:
    name = await broker_name(view.admin, addr)

    def result(done: list[PermChange]) -> str:
        problems = [f"{each.namesrv}: {each.problem}" for each in done if each.problem]
        if problems:
            raise PartlyDone("\n".join(problems))
        return view.t("broker.perms", n=max((each.topics for each in done), default=0))

    await Action.of(
        await operations.change_write_perm(view.admin, name, allow=allow),
        [view.t("broker.will_allow" if allow else "broker.will_wipe", name=name)],
        result=result, refresh=["topics"],
    ).run(view)  # fmt: skip
