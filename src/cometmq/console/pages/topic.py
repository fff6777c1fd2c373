"""One topic: its settings, queues, route and groups, and what can be done with it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from nicegui import ui

from cometmq.admin import Admin, QueueStatus, TopicSettings
from cometmq.client.cluster.lookups import broker_addrs
from cometmq.console.cluster import Lag, kind_of
from cometmq.console.cluster import Progress as GroupsProgress
from cometmq.console.frame.actions import Action, Progress, act
from cometmq.console.frame.charts import missing_note
from cometmq.console.frame.forms import Form, millis
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View
from cometmq.console.frame.patience import Patience
from cometmq.console.frame.rows import Column, ListState, path_of
from cometmq.console.messages.search import messages_of
from cometmq.console.pages.places import ask_brokers, chosen, masters
from cometmq.console.pages.reset import ask_reset
from cometmq.console.pages.topics import PERMS, QUEUES_MAX
from cometmq.message import Message
from cometmq.protocol.bodies import BrokerData, TopicConfig, TopicRouteData

if TYPE_CHECKING:
    from cometmq.console.app import Console

INTERVAL_S = 5.0
BODY_MAX = 100_000
WORD_MAX = 250
RETENTION_MS = "retention.ms"
HOURS_MAX = 24 * 3650
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class TopicState:
    """What the name servers and brokers say of a topic. queues: None where no broker answers; missing: broker
    name -> why its queues are not among them."""

    route: TopicRouteData
    queues: list[QueueStatus] | None
    missing: dict[str, str]


async def ask(admin: Admin, topic: str, patience: Patience[list[QueueStatus]]) -> TopicState:
    """Raises NoRouteError for a topic that no name server knows."""
    route = await admin.route(topic)
    found = await patience.ask(broker_addrs(route), lambda addr: admin.topic_status_at(addr, topic))
    rows = [row for rows in found.values.values() for row in rows]
    rows.sort(key=lambda row: (row.broker_name, row.queue_id))
    return TopicState(route, rows if found.values or not found.missing else None, found.problems)


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/topics/{name:path}", "topics.title", under="/topics")
    async def topic(view: View, name: str) -> None:
        view.title(name)
        view.link(view.t("topic.messages"), messages_of(name))
        patience = Patience[list[QueueStatus]](partial(view.feeds.refresh, ("topic", name)))
        feed = view.feeds.feed(("topic", name), partial(ask, view.admin, name, patience), INTERVAL_S)
        if view.may_change:
            _actions(view, name)
        await view.live(feed, lambda state: _summary(view, name, state))
        with view.section("topic.groups"):
            groups = Listing(
                view, _group_columns(), lambda row: row[0], name="g", empty="topic.no_groups",
                default=ListState(sort="behind", descending=True),
            )  # fmt: skip
            missing = ui.element("div")

            def pick(found: GroupsProgress) -> list[tuple[str, Lag]]:
                missing.clear()
                with missing:
                    missing_note(view, found.missing)
                return _groups_of(found, name)

            await groups.follow(view.cluster.progress(), pick)
        with view.section("topic.queues"):
            queues = Listing(
                view, _queue_columns(), lambda row: f"{row.broker_name} {row.queue_id}", name="q"
            )
            await queues.follow(feed, lambda state: state.queues)
        with view.section("topic.settings"):
            await view.live(
                view.cluster.topics(),
                lambda found: _settings(
                    view, next((row.configs for row in found.rows if row.name == name), {})
                ),
            )
        with view.section("topic.route"):
            await view.live(feed, lambda state: _route(view, state.route.broker_datas), age=False)


def _summary(view: View, name: str, state: TopicState) -> None:
    missing_note(view, state.missing)
    stored = ever = last = None
    if state.queues is not None:
        stored = sum(each.max_offset - each.min_offset for each in state.queues)
        ever = sum(each.max_offset for each in state.queues)
        last = max((each.last_update_timestamp for each in state.queues), default=0)
    view.tiles(
        [
            (view.t("topic.stored"), view.shown("number", stored)),
            (view.t("topic.ever"), view.shown("number", ever)),
            (view.t("topic.last"), view.shown("ago", last)),
            (view.t("topics.kind"), view.t(f"topics.{kind_of(name)}")),
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


def _group_columns() -> list[Column[tuple[str, Lag]]]:
    return [
        Column(
            "group",
            "topic.group",
            lambda row: row[0],
            link=lambda row: path_of("groups", row[0]),
            searched=True,
        ),
        Column("behind", "topic.behind", lambda row: row[1].behind, "number"),
        Column("last", "topic.consumed", lambda row: row[1].last_ms, "ago"),
    ]


def _groups_of(found: GroupsProgress, topic: str) -> list[tuple[str, Lag]]:
    return [(group, lag) for (group, of), lag in found.pairs.items() if of == topic]


def retention_hours(config: TopicConfig) -> float | None:
    """How long a topic's messages are kept, None where that is its broker's setting, or no number."""
    said = (config.attributes or {}).get(RETENTION_MS, "")
    return int(said) / HOUR_MS if said.isascii() and said.isdigit() and len(said) < 20 else None


def _settings(view: View, configs: dict[str, TopicConfig]) -> None:
    if not configs:
        view.note(view.t("topic.unknown"))
    for broker, config in configs.items():
        attributes = config.attributes or {}
        kept = retention_hours(config)
        kept_for = view.t("topic.as_broker") if kept is None else view.shown("number", kept)
        view.facts(
            [
                (view.t("topic.broker"), broker),
                (view.t("topics.read_queues"), view.shown("number", config.read_queue_nums)),
                (view.t("topics.write_queues"), view.shown("number", config.write_queue_nums)),
                (view.t("topics.perm"), view.shown("perm", config.perm)),
                (view.t("topic.ordered"), view.shown("flag", config.order)),
                (view.t("topic.retention"), kept_for),
                (
                    view.t("topic.attributes"),
                    ", ".join(f"{key}={value}" for key, value in attributes.items())
                    or view.t("common.nothing"),
                ),
            ]
        )


def _route(view: View, brokers: list[BrokerData]) -> None:
    for data in sorted(brokers, key=lambda each: each.broker_name):
        for broker_id, addr in sorted(data.broker_addrs.items()):
            role = view.t("topic.master" if broker_id == 0 else "topic.slave")
            view.facts([(f"{data.broker_name} ({data.cluster})", f"{addr}  {role}")])


# -- what can be done


def _actions(view: View, name: str) -> None:
    with ui.element("div").classes("actions"):
        if kind_of(name) == "normal":
            view.button("topic.send", lambda: send(view, name), icon="send")
            view.button("topic.change", lambda: change(view, name), icon="edit")
        if kind_of(name) != "system":
            view.button("topic.reset", lambda: ask_reset(view, topic=name), icon="history")
            view.button("topic.purge", lambda: purge(view, name), icon="cleaning_services", danger=True)
            view.button("topic.delete", lambda: delete(view, name), icon="delete", danger=True)


async def send(view: View, topic: str) -> None:
    """Ask for a message and send it."""
    form = Form(view, view.t("topic.send_to", name=topic))
    tag = form.text("topic.tag", most=WORD_MAX)
    key = form.text("topic.key", most=WORD_MAX)
    body = form.text("topic.body", most=BODY_MAX, lines=True)
    if not await form.asked():
        return
    message = Message(
        topic=topic, body=str(body.value or "").encode(), tags=str(tag.value or "") or None,
        keys=str(key.value or "").split(),
    )  # fmt: skip

    async def work(_progress: Progress) -> str:
        sent = await view.admin.send(message)
        where = f"{sent.queue.broker_name}:{sent.queue.queue_id} @ {sent.queue_offset}"
        return view.t("topic.sent", id=sent.msg_id, where=where, status=sent.status.name)

    await act(
        view,
        Action(
            name="topic.send",
            target=topic,
            work=work,
            refresh=[("topic", topic)],
            says=[view.t("topic.will_send", name=topic, size=view.shown("size", len(message.body)))],
            details={"bytes": str(len(message.body))},
        ),
    )


async def change(view: View, topic: str) -> None:
    """Ask for other settings of a topic and set them at one broker or all."""
    feed = view.cluster.topics()
    found = await feed.fresh()
    rows = found.value.rows if found.value is not None else []
    configs = next((row.configs for row in rows if row.name == topic), {})
    if not configs:
        view.complain(view.t("topic.unknown"))
        return
    addrs = await masters(view.admin, configs)
    present = next(iter(configs.values()))
    form = Form(view, view.t("topic.change_of", name=topic), [view.t("topic.change_says")])
    where = ask_brokers(view, form, configs)
    read = form.number("topics.read_queues", present.read_queue_nums, 1, QUEUES_MAX)
    write = form.number("topics.write_queues", present.write_queue_nums, 1, QUEUES_MAX)
    perm = form.choice("topics.perm", PERMS, str(present.perm & 6))
    kept = retention_hours(present)
    hours = form.number("topic.retention", None if kept is None else int(kept), 1, HOURS_MAX, needed=False)
    if not await form.asked():
        return
    attributes = None if kept is None else f"-{RETENTION_MS}"
    if hours.value:
        attributes = f"+{RETENTION_MS}={int(hours.value) * HOUR_MS}"
    wanted = chosen(where, configs)

    async def work(progress: Progress) -> None:
        for name in wanted:
            settings = TopicSettings(
                topic=topic,
                read_queue_nums=int(read.value or 1),
                write_queue_nums=int(write.value or 1),
                perm=int(perm.value),
                order=configs[name].order,
                attributes=attributes,
                unit=bool(configs[name].topic_sys_flag & 1),
                has_unit_sub=bool(configs[name].topic_sys_flag & 2),
            )
            async for addr in view.admin.create_topic(settings, broker_addr=addrs[name]):
                progress.say(view.t("topics.made_at", addr=addr))

    values = f"read={read.value} write={write.value} perm={perm.value} attributes={attributes or ''}"
    await act(
        view,
        Action(
            name="topic.change",
            target=topic,
            work=work,
            refresh=["topics", ("topic", topic)],
            says=[view.t("topic.will_change", name=topic, where=", ".join(wanted)), values],
            details={"brokers": ",".join(wanted), "values": values},
        ),
    )


async def purge(view: View, topic: str) -> None:
    """Show what a purge would take away, then do it."""
    form = Form(view, view.t("topic.purge_of", name=topic), [view.t("topic.purge_says")])
    before = form.moment("topic.before", datetime.now() + timedelta(minutes=1))
    if not await form.asked():
        return
    before_ms = millis(before.value)
    planned = await view.admin.purge_topic(topic, before_ms=before_ms)
    count = sum(queue.purged_to - queue.min_offset for _, queue in planned)

    async def work(progress: Progress) -> str:
        gone = await view.admin.purge_topic(topic, before_ms=before_ms, execute=True)
        purged = sum(queue.purged_to - queue.min_offset for _, queue in gone)
        progress.outcome["purged"] = str(purged)
        return view.t("topic.purged", n=f"{purged:,}")

    await act(
        view,
        Action(
            name="topic.purge",
            target=topic,
            work=work,
            danger=True,
            refresh=[("topic", topic), "progress"],
            says=[
                view.t("topic.will_purge", name=topic, n=f"{count:,}", before=view.shown("time", before_ms))
            ],
            details={"before": str(before_ms), "planned": str(count)},
        ),
    )


async def delete(view: View, topic: str) -> None:
    """Delete a topic with its messages."""
    clusters = await view.admin.clusters_of(topic)
    found = view.cluster.progress().latest.value
    groups = [group for group, _ in _groups_of(found, topic)] if found is not None else []

    async def work(progress: Progress) -> None:
        for cluster in clusters:
            for addr in await view.admin.delete_topic_in_brokers(topic, cluster):
                progress.say(view.t("topics.made_at", addr=addr))
        await view.admin.delete_topic_in_name_servers(topic)

    says = [view.t("topic.will_delete", name=topic, clusters=", ".join(clusters))]
    if groups:
        says.append(view.t("topic.still_consumed", n=len(groups), names=", ".join(sorted(groups)[:10])))
    await act(
        view,
        Action(
            name="topic.delete",
            target=topic,
            work=work,
            danger=True,
            says=says,
            refresh=["topics", "progress"],
            details={"clusters": ",".join(clusters)},
            then="/topics",
        ),
    )
