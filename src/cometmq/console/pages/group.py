"""One consumer group: members, what they subscribe and in what they differ, how far it is in each queue."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nicegui import ui

from cometmq.admin import Admin, GroupProgress, GroupSubscriptions, MemberSubscriptions, QueueProgress
from cometmq.admin.groups import sum_progress
from cometmq.console.frame.actions import Action, Progress, act
from cometmq.console.frame.charts import missing_note
from cometmq.console.frame.forms import Form
from cometmq.console.frame.listing import Listing
from cometmq.console.frame.page import View
from cometmq.console.frame.patience import Patience
from cometmq.console.frame.rows import Column, ListState, path_of
from cometmq.console.pages.groups import RETRIES_MAX
from cometmq.console.pages.places import ask_brokers, chosen, masters
from cometmq.console.pages.reset import ask_reset
from cometmq.errors import BrokerError
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.codes import DLQ_PREFIX, RETRY_PREFIX, ResponseCode

if TYPE_CHECKING:
    from cometmq.console.app import Console

INTERVAL_S, MEMBERS_S = 10.0, 30.0
"""Of members each is asked, too."""
SHOWN_MAX = 20
RETRY_QUEUES_MAX = 256
FLAGS = ("consume_enable", "consume_broadcast_enable", "consume_from_min_enable")


@dataclass(frozen=True)
class GroupState:
    """How far a group is, as the brokers say that answer. missing: name of another -> why it does not."""

    progress: GroupProgress
    missing: dict[str, str]


async def ask(admin: Admin, group: str, patience: Patience[GroupProgress]) -> GroupState:
    """Raises UnknownNameError, and what a broker says if none answers."""
    addrs = await admin.brokers_of(group)
    found = await patience.ask(addrs, lambda addr: admin.progress_at(addr, group))
    found.check()
    return GroupState(sum_progress(group, found.values.values()), found.problems)


async def ask_members(admin: Admin, group: str) -> GroupSubscriptions:
    """The members, who are asked as well; none of them is no failure."""
    try:
        return await admin.subscriptions(group)
    except BrokerError as error:
        if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
            raise
        return GroupSubscriptions(group=group, members=[], differences={})


def pages(console: Console) -> None:
    """Put the page in."""

    @console.page("/groups/{name:path}", "groups.title", under="/groups")
    async def group(view: View, name: str) -> None:
        view.title(name)
        view.link(view.t("group.dead"), path_of("dead", name))
        patience = Patience[GroupProgress](partial(view.feeds.refresh, ("group", name)))
        feed = view.feeds.feed(("group", name), partial(ask, view.admin, name, patience), INTERVAL_S)
        members_feed = view.feeds.feed(
            ("group members", name), partial(ask_members, view.admin, name), MEMBERS_S
        )
        if view.may_change:
            _actions(view, name)
        await view.live(feed, lambda state: _summary(view, state))
        with view.section("group.members"):
            await view.live(members_feed, lambda found: _differences_of(view, found), age=False)
            members = Listing(
                view, _member_columns(), lambda row: row.client_id, name="m", empty="group.nobody",
                classes=lambda row: {"problem": "bad"} if row.problem else {},
            )  # fmt: skip
            await members.follow(members_feed, lambda found: found.members)
        with view.section("group.progress"):
            queues = Listing(
                view, _queue_columns(view, lambda: members_feed.latest.value),
                lambda row: f"{row.topic} {row.broker_name} {row.queue_id}", name="q",
                default=ListState(sort="behind", descending=True), empty="group.no_offsets",
            )  # fmt: skip
            await queues.follow(feed, lambda state: state.progress.queues)
            view.watch(members_feed, lambda _reading: queues.again())
        with view.section("group.settings"):
            await view.live(
                view.cluster.groups(),
                lambda found: _settings(
                    view, next((row.configs for row in found.rows if row.name == name), {})
                ),
            )


def _summary(view: View, state: GroupState) -> None:
    queues = state.progress.queues
    missing_note(view, state.missing)
    view.tiles(
        [
            (view.t("groups.behind"), view.shown("number", sum(max(0, each.diff) for each in queues))),
            (view.t("groups.rate"), view.shown("rate", state.progress.consume_tps)),
            (
                view.t("groups.last"),
                view.shown("ago", max((each.last_timestamp for each in queues), default=0)),
            ),
        ]
    )


def _differences_of(view: View, found: GroupSubscriptions) -> None:
    """How many members there are, and what is wrong with them."""
    view.note(view.t("group.online", n=f"{len(found.members):,}"))
    _differences(view, "group.differ", found.differences)
    _differences(view, "group.settings_differ", found.setting_differences)
    for queue, holders in list((found.unbalanced or {}).items())[:SHOWN_MAX]:
        said = ", ".join(holders) or view.t("common.nothing")
        view.note(view.t("group.unbalanced", queue=queue, holders=said), "problem")


def _differences(view: View, key: str, found: Mapping[str, Mapping[str, list[str]]]) -> None:
    for what, sides in found.items():
        with ui.element("div").classes("problem").props("role=alert"):
            view.note(view.t(key, what=what), "bad")
            for value, clients in sides.items():
                names = ", ".join(each or view.t("group.itself") for each in clients[:5])
                more = f" … ({len(clients)})" if len(clients) > 5 else ""
                view.note(f"{value or view.t('group.not_subscribed')}: {names}{more}", "why")


def _member_columns() -> list[Column[MemberSubscriptions]]:
    return [
        Column("client", "group.client", lambda row: row.client_id, searched=True),
        Column("addr", "group.addr", lambda row: row.client_addr, searched=True),
        Column("version", "group.version", lambda row: row.version),
        Column("subscribes", "group.subscribes", _subscribes, searched=True),
        Column("settings", "group.member_settings", _set, searched=True),
        Column("problem", "group.problem", lambda row: row.problem),
    ]


def _subscribes(row: MemberSubscriptions) -> str:
    return "; ".join(f"{topic}: {expression}" for topic, expression in row.subscriptions.items())


def _set(row: MemberSubscriptions) -> str:
    return ", ".join(f"{name}={value}" for name, value in row.settings.items())


def _queue_columns(
    view: View, members: Callable[[], GroupSubscriptions | None]
) -> list[Column[QueueProgress]]:
    """members: what is known of them when a row is drawn."""
    return [
        Column("topic", "group.topic", lambda row: row.topic, link=lambda row: path_of("topics", row.topic),
               searched=True),
        Column("broker", "topic.broker", lambda row: row.broker_name, searched=True),
        Column("queue", "topic.queue", lambda row: row.queue_id, "number"),
        Column("offset", "group.offset", lambda row: row.consumer_offset, "number"),
        Column("end", "topic.max", lambda row: row.broker_offset, "number"),
        Column("behind", "groups.behind", lambda row: row.diff, "number"),
        Column("last", "groups.last", lambda row: row.last_timestamp, "ago"),
        Column("owner", "group.owner", lambda row: owner_of(row, members(), view.t("common.nothing"))),
    ]  # fmt: skip


def owner_of(row: QueueProgress, found: GroupSubscriptions | None, nobody: str) -> str | None:
    """The members that hold a queue; None where that is not known, since not all have said what they hold."""
    if found is None:
        return None
    queue = MessageQueue(row.topic, row.broker_name, row.queue_id)
    holders = [each.client_id for each in found.members if queue in (each.queues or ())]
    if holders:
        return ", ".join(holders)
    return None if any(each.queues is None for each in found.members) else nobody


def _settings(view: View, configs: Mapping[str, SubscriptionGroupConfig]) -> None:
    if not configs:
        view.note(view.t("group.unknown"))
    for broker, config in configs.items():
        view.facts(
            [
                (view.t("topic.broker"), broker),
                (view.t("groups.enabled"), view.shown("flag", config.consume_enable)),
                (view.t("group.broadcast"), view.shown("flag", config.consume_broadcast_enable)),
                (view.t("group.from_min"), view.shown("flag", config.consume_from_min_enable)),
                (view.t("groups.retries"), view.shown("number", config.retry_max_times)),
                (view.t("group.retry_queues"), view.shown("number", config.retry_queue_nums)),
            ]
        )


# -- what can be done


def _actions(view: View, name: str) -> None:
    with ui.element("div").classes("actions"):
        view.button("group.reset", lambda: ask_reset(view, group=name), icon="history")
        view.button("group.skip", lambda: ask_reset(view, group=name, to_end=True), icon="skip_next")
        view.button("group.change", lambda: change(view, name), icon="edit")
        view.button("group.delete", lambda: delete(view, name), icon="delete", danger=True)


async def _configs(view: View, group: str) -> dict[str, SubscriptionGroupConfig]:
    found = await view.cluster.groups().fresh()
    rows = found.value.rows if found.value is not None else []
    return next((row.configs for row in rows if row.name == group), {})


async def change(view: View, group: str) -> None:
    """Ask for other settings of a group and set them at one broker or all."""
    configs = await _configs(view, group)
    if not configs:
        view.complain(view.t("group.unknown"))
        return
    addrs = await masters(view.admin, configs)
    present = next(iter(configs.values()))
    form = Form(view, view.t("group.change_of", name=group))
    where = ask_brokers(view, form, configs)
    yes_no = {"yes": view.t("common.yes"), "no": view.t("common.no")}
    keys = dict(zip(FLAGS, ("groups.enabled", "group.broadcast", "group.from_min"), strict=True))
    flags = {
        name: form.choice(keys[name], yes_no, "yes" if getattr(present, name) else "no") for name in FLAGS
    }
    retries = form.number("groups.retries", present.retry_max_times, -1, RETRIES_MAX)
    queues = form.number("group.retry_queues", present.retry_queue_nums, 0, RETRY_QUEUES_MAX)
    if not await form.asked():
        return
    wanted = chosen(where, configs)

    async def work(progress: Progress) -> None:
        for name in wanted:
            config = copy.copy(configs[name])
            for flag, field in flags.items():
                setattr(config, flag, field.value == "yes")
            config.retry_max_times, config.retry_queue_nums = int(retries.value or 0), int(queues.value or 0)
            async for done in view.admin.update_group(config, broker_addr=addrs[name]):
                progress.say(view.t("topics.made_at", addr=done))

    values = ", ".join([*(f"{flag}={field.value}" for flag, field in flags.items()),
                        f"retry_max_times={retries.value}", f"retry_queue_nums={queues.value}"])  # fmt: skip
    await act(
        view,
        Action(
            name="group.change",
            target=group,
            work=work,
            refresh=["groups", ("group", group)],
            says=[view.t("group.will_change", name=group, where=", ".join(wanted)), values],
            details={"brokers": ",".join(wanted), "values": values},
        ),
    )


async def delete(view: View, group: str) -> None:
    """Delete a group: its settings, offsets, retries and dead letters."""
    info = await view.admin.cluster_info()
    masters = {
        name: data.broker_addrs[0]
        for name, data in sorted(info.broker_addr_table.items())
        if 0 in data.broker_addrs
    }

    async def work(progress: Progress) -> None:
        for number, addr in enumerate(masters.values()):
            await view.admin.delete_group(addr, group, with_offsets=True)
            progress.say(view.t("topics.made_at", addr=addr), (number + 1) / len(masters))
        for topic in (RETRY_PREFIX + group, DLQ_PREFIX + group):
            for cluster in await view.admin.clusters_of(topic):
                await view.admin.delete_topic_in_brokers(topic, cluster)
            await view.admin.delete_topic_in_name_servers(topic)

    await act(
        view,
        Action(
            name="group.delete",
            target=group,
            work=work,
            danger=True,
            refresh=["groups", "progress"],
            then="/groups",
            says=[view.t("group.will_delete", name=group), view.t("group.members_come_back")],
            details={"brokers": ",".join(masters)},
        ),
    )
