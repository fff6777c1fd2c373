"""The first page: whether the cluster is well, how busy it is, who is behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nicegui import ui

from cometmq.admin import BrokerStatus
from cometmq.admin.values import known_sum
from cometmq.console.cluster import Progress, disk_of, fullest_disk, get_rate, kind_of, put_rate
from cometmq.console.frame.charts import Lines, bars, missing_note
from cometmq.console.frame.live import Reading
from cometmq.console.frame.page import View, text_element
from cometmq.console.frame.rows import path_of
from cometmq.protocol.codes import MASTER_ID, is_system_group

if TYPE_CHECKING:
    from cometmq.console.app import Console

TOP = 10
DISK_FULL = 0.85
"""Of a disk: what brokers begin to delete at, whatever the hour (docs/server.md, Retention)."""


def largest(pairs: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """The largest values above zero, the largest first."""
    return sorted((pair for pair in pairs if pair[1] > 0), key=lambda pair: (-pair[1], pair[0]))[:TOP]


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/", "overview.title", menu=10, icon="dashboard")
    async def overview(view: View) -> None:
        view.title(view.t("overview.title"))
        cluster, history = view.cluster, view.cluster.history
        await view.live(cluster.brokers(), lambda brokers: _tiles(view, brokers))
        with ui.element("div").classes("halves").style("margin-top: 16px"):
            rates = Lines(view, "overview.rates", "overview.per_second", ["overview.put", "overview.get"])
            lag = Lines(view, "overview.backlog", "overview.messages", ["overview.backlog"])
        with ui.element("div").classes("halves").style("margin-top: 16px"):
            groups = Lines(view, "overview.groups_hours", "overview.messages", [])
            topics = Lines(view, "overview.topics_hours", "overview.per_second", [])
        with ui.element("div").classes("halves").style("margin-top: 16px"):
            disk = Lines(view, "overview.disk_hours", "overview.percent", ["overview.disk"])
        view.note(view.t("overview.history"))

        def told(reading: Reading[list[BrokerStatus]]) -> None:
            del reading
            rates.show(history.put, history.get)
            disk.show(history.disk)

        view.watch(cluster.brokers(), told)
        await view.first(cluster.progress())

        def progressed(reading: Reading[Progress]) -> None:
            del reading
            lag.show(history.behind)
            groups.show_named(history.groups.largest)
            topics.show_named(history.topics.largest)

        view.watch(cluster.progress(), progressed)
        await view.live(cluster.progress(), lambda progress: _tops(view, progress))


def _tiles(view: View, brokers: list[BrokerStatus]) -> None:
    answering = [each for each in brokers if each.runtime]
    masters = [each for each in answering if each.broker_id == MASTER_ID]
    view.tiles(
        [
            (view.t("overview.brokers"), view.t("overview.answer", n=len(answering), all=len(brokers))),
            (view.t("overview.put"), view.shown("rate", known_sum(map(put_rate, masters)))),
            (view.t("overview.get"), view.shown("rate", known_sum(map(get_rate, answering)))),
            (view.t("overview.put_today"), view.shown("number", known_sum(map(put_today, masters)))),
            (view.t("overview.disk"), view.shown("percent", fullest_disk(answering))),
        ]
    )
    for each in brokers:
        if not each.runtime:
            view.note(view.t("common.missing", name=each.broker_name, problem=each.problem), "problem")
        elif (disk := disk_of(each)) is not None and disk >= DISK_FULL:
            share = view.shown("percent", disk)
            view.note(view.t("overview.disk_full", name=each.broker_name, share=share), "problem")
    left_notes(view)
    if not brokers:
        view.empty("overview.no_brokers")


def left_notes(view: View) -> None:
    """Which brokers the name servers no longer know: they do not vanish without a word."""
    for each in view.cluster.left:
        status, at = each.status, view.shown("time", int(each.at_s * 1000))
        place = {"name": status.broker_name, "id": status.broker_id, "addr": status.broker_addr}
        view.note(view.t("overview.left", **place, at=at), "problem")


def put_today(broker: BrokerStatus) -> int:
    """Messages that a broker got since midnight."""
    return broker.count("msgPutTotalTodayNow") - broker.count("msgPutTotalTodayMorning")


def got_today(broker: BrokerStatus) -> int:
    """Messages that consumers got of it since midnight."""
    return broker.count("msgGetTotalTodayNow") - broker.count("msgGetTotalTodayMorning")


def _tops(view: View, progress: Progress) -> None:
    missing_note(view, progress.missing)
    view.tiles(
        [
            (view.t("overview.backlog_now"), view.shown("number", progress.behind)),
            (view.t("overview.groups"), view.shown("number", len(progress.groups))),
        ]
    )
    behind = largest((name, lag.behind) for name, lag in progress.groups.items() if not is_system_group(name))
    rates = largest(each for each in progress.topic_rates.items() if kind_of(each[0]) == "normal")
    with ui.element("div").classes("halves").style("margin-top: 16px"):
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
                    text_element("span", f"  {view.shown('number' if where == 'groups' else 'rate', value)}")
