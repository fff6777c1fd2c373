"""The first page: state of the brokers, message rates, lag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nicegui import ui

from cometmq.admin import BrokerStatus
from cometmq.admin.rates import disk_of, fullest_disk, get_rate, put_rate
from cometmq.admin.values import known_sum
from cometmq.console.base.cluster_feeds import ClusterLags, kind_of
from cometmq.console.widgets.charts import Lines, bars
from cometmq.console.widgets.page import View, text_element
from cometmq.console.widgets.rows import path_of
from cometmq.console.widgets.services import page
from cometmq.protocol.codes import MASTER_ID, is_system_group

MAX_TOP = 10
DISK_FULL_SHARE = 0.85
"""Share of disk use above which brokers delete files at any hour (docs/server.md, Retention)."""


def largest(pairs: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return the MAX_TOP pairs of a name and a value with the largest values above zero, largest first."""
    positive = (pair for pair in pairs if pair[1] > 0)
    return sorted(positive, key=lambda pair: (-pair[1], pair[0]))[:MAX_TOP]


def _halves() -> ui.element:
    """Return an element whose content is shown in two columns."""
    return ui.element("div").classes("halves").style("margin-top: 16px")


@page("/", "overview.title", menu=10, icon="dashboard")
async def overview_page(view: View) -> None:
    view.title(view.t("overview.title"))
    cluster, history = view.cluster, view.cluster.history
    await view.live(cluster.brokers(), lambda brokers: _tiles(view, brokers))
    with _halves():
        rates = Lines(view, "overview.rates", "overview.per_second", ["overview.put", "overview.get"])
        lag = Lines(view, "overview.backlog", "overview.messages", ["overview.backlog"])
    with _halves():
        groups = Lines(view, "overview.groups_hours", "overview.messages", [])
        topics = Lines(view, "overview.topics_hours", "overview.per_second", [])
    with _halves():
        disk = Lines(view, "overview.disk_hours", "overview.percent", ["overview.disk"])
    view.note(view.t("overview.history"))

    def show_brokers(_reading: Any) -> None:
        rates.show(history.put, history.get)
        disk.show(history.disk)

    def show_lags(_reading: Any) -> None:
        lag.show(history.behind)
        groups.show_named(history.groups.largest)
        topics.show_named(history.topics.largest)

    view.watch(cluster.brokers(), show_brokers)
    await view.first_reading(cluster.lags())
    view.watch(cluster.lags(), show_lags)
    await view.live(cluster.lags(), lambda lags: _tops(view, lags))


def _tiles(view: View, brokers: list[BrokerStatus]) -> None:
    responding = [each for each in brokers if each.runtime]
    masters = [each for each in responding if each.broker_id == MASTER_ID]
    view.tiles(
        [
            ("overview.brokers", view.t("overview.answer", n=len(responding), all=len(brokers))),
            ("overview.put", view.format("rate", known_sum(map(put_rate, masters)))),
            ("overview.get", view.format("rate", known_sum(map(get_rate, responding)))),
            ("overview.put_today", view.format("number", known_sum(map(put_today, masters)))),
            ("overview.disk", view.format("percent", fullest_disk(responding))),
        ]
    )
    view.missing_brokers({each.broker_name: each.problem for each in brokers if not each.runtime})
    for each in responding:
        if (disk := disk_of(each)) is not None and disk >= DISK_FULL_SHARE:
            share = view.format("percent", disk)
            view.note(view.t("overview.disk_full", name=each.broker_name, share=share), "problem")
    lost_broker_notes(view)
    if not brokers:
        view.empty("overview.no_brokers")


def lost_broker_notes(view: View) -> None:
    """Add a note for each broker that the name servers have recently stopped listing."""
    for each in view.cluster.lost:
        status, at = each.status, view.format("time", int(each.at_s * 1000))
        place = {"name": status.broker_name, "id": status.broker_id, "addr": status.broker_addr}
        view.note(view.t("overview.left", **place, at=at), "problem")


def put_today(broker: BrokerStatus) -> int:
    """Return the number of messages that a broker received since midnight."""
    return broker.count("msgPutTotalTodayNow") - broker.count("msgPutTotalTodayMorning")


def got_today(broker: BrokerStatus) -> int:
    """Return the number of messages that consumers received from a broker since midnight."""
    return broker.count("msgGetTotalTodayNow") - broker.count("msgGetTotalTodayMorning")


def _tops(view: View, lags: ClusterLags) -> None:
    view.missing_brokers(lags.missing)
    view.tiles(
        [
            ("overview.backlog_now", view.format("number", lags.behind)),
            ("overview.groups", view.format("number", len(lags.groups))),
        ]
    )
    behind = largest((name, lag.behind) for name, lag in lags.groups.items() if not is_system_group(name))
    rates = largest(each for each in lags.topic_rates.items() if kind_of(each[0]) == "normal")
    with _halves():
        _top(view, "overview.top_groups", "overview.messages", behind, "groups")
        _top(view, "overview.top_topics", "overview.per_second", rates, "topics")


def _top(view: View, title: str, unit: str, values: list[tuple[str, float]], where: str) -> None:
    with ui.element("div").classes("panel"):
        text_element("h2", f"{view.t(title)} ({view.t(unit)})").style("margin-top: 0")
        if not values:
            view.empty("overview.none_behind" if where == "groups" else "overview.no_rates")
            return
        bars(view, title, values)
        with ui.element("ol").style("margin: 8px 0 0; padding-left: 24px"):
            for name, value in values:
                with ui.element("li"):
                    view.link(name, path_of(where, name))
                    kind = "number" if where == "groups" else "rate"
                    text_element("span", f"  {view.format(kind, value)}")
