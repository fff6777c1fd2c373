"""One topic: its settings, queues, route and groups, and the actions on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from nicegui import ui

from cometmq.admin import Admin, QueueStatus, TopicSettings, operations
from cometmq.admin.operations import Operation
from cometmq.admin.rates import Lag
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.console.base.cluster_feeds import ClusterLags, kind_of
from cometmq.console.base.fanout import Fanout
from cometmq.console.messages.message import sent_text
from cometmq.console.messages.search import messages_of
from cometmq.console.pages.lite import lite_topics
from cometmq.console.pages.reset import reset_offsets
from cometmq.console.pages.targets import broker_choice, chosen_brokers
from cometmq.console.pages.topics import MAX_QUEUES, PERMS
from cometmq.console.widgets.actions import Action, ActionProgress, run_operation
from cometmq.console.widgets.forms import TIME_FORMAT, Form, millis
from cometmq.console.widgets.listing import Listing
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState, path_of
from cometmq.console.widgets.services import page
from cometmq.message import Message
from cometmq.protocol.bodies import BrokerData, TopicConfig, TopicRouteData

INTERVAL_S = 5.0
MAX_BODY_LENGTH = 100_000
MAX_KEY_LENGTH = 250
RETENTION_MS = "retention.ms"
MAX_RETENTION_HOURS = 24 * 3650
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class TopicState:
    """The state of a topic.

    Attributes:
        route: The topic's route.
        queues: The topic's queues; None if no broker responds.
        missing: Error texts of the brokers that do not respond, by name.
    """

    route: TopicRouteData
    queues: list[QueueStatus] | None
    missing: dict[str, str]


async def ask(admin: Admin, topic: str, fanout: Fanout[list[QueueStatus]]) -> TopicState:
    """Return the state of a topic. Raises NoRouteError for a topic without a route."""
    route = await admin.route(topic)
    found = await fanout.request(broker_addrs(route), lambda addr: admin.topic_status_at(addr, topic))
    rows = [row for rows in found.values.values() for row in rows]
    rows.sort(key=lambda row: (row.broker_name, row.queue_id))
    return TopicState(route, rows if found.values or not found.missing else None, found.problems)


@page("/topics/{name:path}", "topics.title", under="/topics")
async def topic_page(view: View, name: str) -> None:
    view.title(name)
    view.link(view.t("topic.messages"), messages_of(name))
    fanout = Fanout[list[QueueStatus]](partial(view.feeds.refresh, ("topic", name)))
    feed = view.feeds.feed(("topic", name), partial(ask, view.admin, name, fanout), INTERVAL_S)
    if view.may_change:
        _actions(view, name)
    await view.live(feed, lambda state: _summary(view, name, state))
    with view.section("topic.groups"):
        columns: list[Column[tuple[str, Lag]]] = [
            Column("group", "topic.group", lambda row: row[0], link=lambda row: path_of("groups", row[0]),
                   searched=True),
            Column("behind", "topic.behind", lambda row: row[1].behind, "number"),
            Column("last", "topic.consumed", lambda row: row[1].last_ms, "ago"),
        ]  # fmt: skip
        groups = Listing(
            view, columns, lambda row: row[0], name="g", empty="topic.no_groups",
            default=ListState(sort="behind", descending=True),
        )  # fmt: skip
        await groups.follow(
            view.cluster.lags(),
            lambda found: _groups_of(found, name),
            notes=lambda found: view.missing_brokers(found.missing),
        )
    lite_topics(view, name)
    with view.section("topic.queues"):
        queues = Listing(view, _queue_columns(), lambda row: f"{row.broker_name} {row.queue_id}", name="q")
        await queues.follow(feed, lambda state: state.queues)
    with view.section("topic.settings"):
        await view.live(
            view.cluster.topics(),
            lambda found: _settings(view, next((row.configs for row in found.rows if row.name == name), {})),
        )
    with view.section("topic.route"):
        await view.live(feed, lambda state: _route(view, state.route.broker_datas), age=False)


def _summary(view: View, name: str, state: TopicState) -> None:
    view.missing_brokers(state.missing)
    stored = total = last = None
    if state.queues is not None:
        stored = sum(each.max_offset - each.min_offset for each in state.queues)
        total = sum(each.max_offset for each in state.queues)
        last = max((each.last_update_timestamp for each in state.queues), default=0)
    view.tiles(
        [
            ("topic.stored", view.format("number", stored)),
            ("topic.ever", view.format("number", total)),
            ("topic.last", view.format("ago", last)),
            ("topics.kind", view.t(f"topics.{kind_of(name)}")),
        ]
    )


def _queue_columns() -> list[Column[QueueStatus]]:
    return [
        Column("broker", "topic.broker", lambda row: row.broker_name, searched=True),
        Column("queue", "topic.queue", lambda row: row.queue_id, "number"),
        Column("min", "topic.min", lambda row: row.min_offset, "number"),
        Column("max", "topic.max", lambda row: row.max_offset, "number"),
        Column("stored", "topic.stored", lambda row: row.max_offset - row.min_offset, "number"),
        Column("last", "topic.last", lambda row: row.last_update_timestamp, "time"),
    ]


def _groups_of(lags: ClusterLags, topic: str) -> list[tuple[str, Lag]]:
    return [(group, lag) for (group, of), lag in lags.pairs.items() if of == topic]


def retention_hours(config: TopicConfig) -> float | None:
    """Return the retention from a topic's attributes, in hours.

    Return None if the topic has no such attribute, or if the attribute is not a valid number.
    """
    value = (config.attributes or {}).get(RETENTION_MS, "")
    return int(value) / HOUR_MS if value.isascii() and value.isdigit() and len(value) < 20 else None


def _settings(view: View, configs: Mapping[str, TopicConfig]) -> None:
    if not configs:
        view.note(view.t("topic.unknown"))
    for broker, config in configs.items():
        attributes = ", ".join(f"{key}={value}" for key, value in (config.attributes or {}).items())
        hours = retention_hours(config)
        retention = view.t("topic.as_broker") if hours is None else view.format("number", hours)
        view.facts(
            [
                ("topic.broker", broker),
                ("topics.read_queues", view.format("number", config.read_queue_nums)),
                ("topics.write_queues", view.format("number", config.write_queue_nums)),
                ("topics.perm", view.format("perm", config.perm)),
                ("topic.ordered", view.format("flag", config.order)),
                ("topic.retention", retention),
                ("topic.attributes", attributes or view.t("common.nothing")),
            ]
        )


def _route(view: View, brokers: list[BrokerData]) -> None:
    for data in sorted(brokers, key=lambda each: each.broker_name):
        for broker_id, addr in sorted(data.broker_addrs.items()):
            role = view.t("topic.master" if broker_id == 0 else "topic.slave")
            view.facts([(f"{data.broker_name} ({data.cluster})", f"{addr}  {role}")], translated=True)


# -- actions


def _actions(view: View, name: str) -> None:
    with ui.element("div").classes("actions"):
        if kind_of(name) == "normal":
            view.button("topic.send", lambda: send(view, name), icon="send")
            view.button("topic.change", lambda: change(view, name), icon="edit")
        if kind_of(name) != "system":
            view.button("topic.reset", lambda: reset_offsets(view, topic=name), icon="history")
            view.button("topic.purge", lambda: purge(view, name), icon="cleaning_services", danger=True)
            view.button("topic.delete", lambda: delete(view, name), icon="delete", danger=True)


async def send(view: View, topic: str) -> None:
    """Ask the user for a message and send it."""
    form = Form(view, view.t("topic.send_to", name=topic))
    tag = form.text("topic.tag", max_length=MAX_KEY_LENGTH)
    key = form.text("topic.key", max_length=MAX_KEY_LENGTH)
    body = form.text("topic.body", max_length=MAX_BODY_LENGTH, lines=True)
    if not await form.submitted():
        return
    message = Message(
        topic=topic, body=str(body.value or "").encode(), tags=str(tag.value or "") or None,
        keys=str(key.value or "").split(),
    )  # fmt: skip

    async def work(_progress: ActionProgress) -> str:
        return sent_text(view, await view.admin.send(message))

    size = view.format("size", len(message.body))
    await Action(
        "topic.send", topic, [view.t("topic.will_send", name=topic, size=size)], work,
        {"bytes": str(len(message.body))}, refresh=[("topic", topic)],
    ).run(view)  # fmt: skip


async def _fresh_configs(view: View, topic: str) -> Mapping[str, TopicConfig]:
    """Request the settings of a topic, and return them by broker."""
    found = (await view.cluster.topics().fresh()).value
    return next((row.configs for row in found.rows if row.name == topic), {}) if found else {}


async def change(view: View, topic: str) -> None:
    """Ask the user for new settings of a topic, and set them at one broker or all brokers."""
    configs = await _fresh_configs(view, topic)
    if not configs:
        view.notify_error(view.t("topic.unknown"))
        return
    present = next(iter(configs.values()))
    form = Form(view, view.t("topic.change_of", name=topic), [view.t("topic.change_says")])
    where = broker_choice(view, form, configs)
    read = form.number("topics.read_queues", present.read_queue_nums, 1, MAX_QUEUES)
    write = form.number("topics.write_queues", present.write_queue_nums, 1, MAX_QUEUES)
    perm = form.choice("topics.perm", PERMS, str(present.perm & 6))
    kept = retention_hours(present)
    hours = form.number(
        "topic.retention", None if kept is None else int(kept), 1, MAX_RETENTION_HOURS, required=False
    )
    if not await form.submitted():
        return
    attributes = None if kept is None else f"-{RETENTION_MS}"
    if hours.value:
        attributes = f"+{RETENTION_MS}={int(hours.value) * HOUR_MS}"
    brokers = chosen_brokers(where, configs)

    async def operation() -> Operation:
        configs = await _fresh_configs(view, topic)
        settings = {}
        for name, addr in (await view.admin.masters(chosen_brokers(where, configs))).items():
            config = configs.get(name, present)
            settings[addr] = TopicSettings(
                topic=topic, read_queue_nums=int(read.value or 1), write_queue_nums=int(write.value or 1),
                perm=int(perm.value), order=config.order, attributes=attributes,
                unit=bool(config.topic_sys_flag & 1), has_unit_sub=bool(config.topic_sys_flag & 2),
            )  # fmt: skip
        return operations.update_topic(view.admin, topic, settings)

    values = f"read={read.value} write={write.value} perm={perm.value} attributes={attributes or ''}"
    await run_operation(
        view, operation,
        [view.t("topic.will_change", name=topic, where=", ".join(brokers)), values],
        {"brokers": ",".join(brokers), "values": values},
        refresh=["topics", ("topic", topic)],
    )  # fmt: skip


async def purge(view: View, topic: str) -> None:
    """Ask the user for a time, show the number of messages that a purge would remove, and purge them."""
    form = Form(view, view.t("topic.purge_of", name=topic), [view.t("topic.purge_says")])
    before = form.moment("topic.before", (datetime.now() + timedelta(minutes=1)).strftime(TIME_FORMAT))
    if not await form.submitted():
        return
    before_ms = millis(before.value)
    planned = await view.admin.purge_topic(topic, before_ms=before_ms)
    count = sum(queue.count for _, queue in planned)

    async def work(progress: ActionProgress) -> str:
        done = await view.admin.purge_topic(topic, before_ms=before_ms, execute=True)
        purged = sum(queue.count for _, queue in done)
        progress.outcome["purged"] = str(purged)
        return view.t("topic.purged", n=f"{purged:,}")

    at = view.format("time", before_ms)
    await Action(
        "topic.purge", topic, [view.t("topic.will_purge", name=topic, n=f"{count:,}", before=at)], work,
        {"before": str(before_ms), "planned": str(count)}, danger=True, refresh=[("topic", topic), "lags"],
    ).run(view)  # fmt: skip


async def delete(view: View, topic: str) -> None:
    """Delete a topic with its messages."""
    clusters = await view.admin.clusters_of(topic)
    lags = view.cluster.lags().latest.value
    groups = [group for group, _ in _groups_of(lags, topic)] if lags is not None else []
    effects = [view.t("topic.will_delete", name=topic, clusters=", ".join(clusters))]
    if groups:
        effects.append(view.t("topic.still_consumed", n=len(groups), names=", ".join(sorted(groups)[:10])))

    async def operation() -> Operation:
        return await operations.delete_topic(view.admin, topic, await view.admin.clusters_of(topic))

    await run_operation(
        view, operation, effects, {"clusters": ",".join(clusters)},
        refresh=["topics", "lags"], then="/topics",
    )  # fmt: skip
