"""One consumer group: its members and their differences, its consumer offsets, and the actions on it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from nicegui import ui

from cometmq.admin import (
    Admin,
    GroupProgress,
    GroupSubscriptions,
    MemberSubscriptions,
    QueueProgress,
    operations,
)
from cometmq.admin.groups import POP_TYPE, PULL_TYPE, PUSH_TYPE, sum_progress
from cometmq.admin.operations import Operation
from cometmq.console.base.fanout import Fanout
from cometmq.console.pages.groups import MAX_RETRIES, client_kind
from cometmq.console.pages.lite import lite_group
from cometmq.console.pages.reset import reset_offsets
from cometmq.console.pages.targets import broker_choice, chosen_brokers
from cometmq.console.widgets.actions import run_operation
from cometmq.console.widgets.forms import Form
from cometmq.console.widgets.listing import Listing
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState, path_of
from cometmq.console.widgets.services import page
from cometmq.errors import BrokerError
from cometmq.message import MessageQueue
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.codes import ResponseCode

INTERVAL_S, MEMBERS_INTERVAL_S = 10.0, 30.0
MAX_UNBALANCED_SHOWN, MAX_CLIENTS_SHOWN = 20, 5
MAX_RETRY_QUEUES = 256
MODES = {PUSH_TYPE: "group.pushed", PULL_TYPE: "group.pulled", POP_TYPE: "group.popped"}
"""For each consume type: the key of its description in the text files."""
FLAGS = {
    "consume_enable": "groups.enabled",
    "consume_broadcast_enable": "group.broadcast",
    "consume_from_min_enable": "group.from_min",
}
"""For each field of SubscriptionGroupConfig that the page shows: the key of its label in the text files."""


@dataclass(frozen=True)
class GroupState:
    """Consumer offsets of a group. `missing` has the error texts of brokers that do not respond, by name."""

    progress: GroupProgress
    missing: dict[str, str]


async def ask(admin: Admin, group: str, fanout: Fanout[GroupProgress]) -> GroupState:
    """Return the consumer offsets of a group.

    Raises UnknownNameError for an unknown group, and the first error if no broker responds.
    """
    addrs = await admin.brokers_of(group)
    found = await fanout.request(addrs, lambda addr: admin.progress_at(addr, group))
    found.raise_if_none()
    return GroupState(sum_progress(group, found.values.values()), found.problems)


async def ask_members(admin: Admin, group: str) -> GroupSubscriptions:
    """Request the state of each member of a group. The result for a group without members is empty."""
    try:
        return await admin.subscriptions(group)
    except BrokerError as error:
        if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
            raise
        return GroupSubscriptions(group=group, members=[], differences={})


@page("/groups/{name:path}", "groups.title", under="/groups")
async def group_page(view: View, name: str) -> None:
    view.title(name)
    view.link(view.t("group.dead"), path_of("dead", name))
    fanout = Fanout[GroupProgress](partial(view.feeds.refresh, ("group", name)))
    feed = view.feeds.feed(("group", name), partial(ask, view.admin, name, fanout), INTERVAL_S)
    members_feed = view.feeds.feed(
        ("group members", name), partial(ask_members, view.admin, name), MEMBERS_INTERVAL_S
    )
    if view.may_change:
        with ui.element("div").classes("actions"):
            view.button("group.reset", lambda: reset_offsets(view, group=name), icon="history")
            view.button("group.skip", lambda: reset_offsets(view, group=name, to_end=True), icon="skip_next")
            view.button("group.change", lambda: change(view, name), icon="edit")
            view.button("group.delete", lambda: delete(view, name), icon="delete", danger=True)
    await view.live(feed, lambda state: _summary(view, state))
    with view.section("group.members"):
        await view.live(members_feed, lambda found: _member_problems(view, found), age=False)
        members = Listing(
            view, _member_columns(), lambda row: row.client_id, name="m", empty="group.nobody",
            classes=lambda row: {"problem": "bad"} if row.problem else {},
        )  # fmt: skip
        await members.follow(members_feed, lambda found: found.members)
    lite_group(view, name, members_feed)
    with view.section("group.progress"):
        queues = Listing(
            view, _queue_columns(view, lambda: members_feed.latest.value),
            lambda row: f"{row.topic} {row.broker_name} {row.queue_id}", name="q",
            default=ListState(sort="behind", descending=True), empty="group.no_offsets",
        )  # fmt: skip
        await queues.follow(feed, lambda state: state.progress.queues)
        view.watch(members_feed, lambda _reading: queues.refresh())
    with view.section("group.settings"):
        await view.live(
            view.cluster.groups(),
            lambda found: _settings(view, next((row.configs for row in found.rows if row.name == name), {})),
        )


def _summary(view: View, state: GroupState) -> None:
    queues = state.progress.queues
    behind = sum(max(0, each.diff) for each in queues) if queues else None
    view.missing_brokers(state.missing)
    tiles = [
        ("groups.behind", view.format("number", behind)),
        ("groups.rate", view.format("rate", state.progress.consume_tps)),
        ("groups.last", view.format("ago", max((each.last_timestamp for each in queues), default=0))),
    ]
    if (leased := state.progress.leased_total) is not None:
        tiles.append(("group.leased", view.format("number", leased)))
    if pop_times := [each.oldest_pop_ms for each in queues if each.oldest_pop_ms is not None]:
        tiles.append(("group.oldest_lease", view.format("time", min(pop_times))))
    view.tiles(tiles)


def _member_problems(view: View, found: GroupSubscriptions) -> None:
    """Show the number of members, the differences between members, and queues without exactly one member."""
    view.note(view.t("group.online", n=f"{len(found.members):,}"))
    if found.consume_type in MODES:
        view.note(view.t(MODES[found.consume_type]))
    _differences(view, "group.differ", found.differences)
    _differences(view, "group.settings_differ", found.setting_differences)
    for queue, holders in list((found.unbalanced or {}).items())[:MAX_UNBALANCED_SHOWN]:
        names = ", ".join(holders) or view.t("common.nothing")
        view.note(view.t("group.unbalanced", queue=queue, holders=names), "problem")


def _differences(view: View, key: str, found: Mapping[str, Mapping[str, list[str]]]) -> None:
    for what, clients_by_value in found.items():
        with ui.element("div").classes("problem").props("role=alert"):
            view.note(view.t(key, what=what), "bad")
            for value, clients in clients_by_value.items():
                names = ", ".join(each or view.t("group.itself") for each in clients[:MAX_CLIENTS_SHOWN])
                more = f" … ({len(clients)})" if len(clients) > MAX_CLIENTS_SHOWN else ""
                view.note(f"{value or view.t('group.not_subscribed')}: {names}{more}", "why")


def _member_columns() -> list[Column[MemberSubscriptions]]:
    def subscriptions(row: MemberSubscriptions) -> str:
        return "; ".join(f"{topic}: {expression}" for topic, expression in row.subscriptions.items())

    def settings(row: MemberSubscriptions) -> str:
        return ", ".join(f"{name}={value}" for name, value in row.settings.items())

    return [
        Column("client", "group.client", lambda row: row.client_id, searched=True),
        Column("addr", "group.addr", lambda row: row.client_addr, searched=True),
        Column("kind", "group.kind", lambda row: client_kind(row.grpc_type), searched=True),
        Column("language", "producers.language", lambda row: row.language),
        Column("version", "group.version", lambda row: row.version),
        Column("subscribes", "group.subscribes", subscriptions, searched=True),
        Column("settings", "group.member_settings", settings, searched=True),
        Column("problem", "group.problem", lambda row: row.problem),
    ]


def _queue_columns(
    view: View, members: Callable[[], GroupSubscriptions | None]
) -> list[Column[QueueProgress]]:
    """Return the columns of the list of queues. `members` returns the latest known members."""
    return [
        Column("topic", "group.topic", lambda row: row.topic, link=lambda row: path_of("topics", row.topic),
               searched=True),
        Column("broker", "topic.broker", lambda row: row.broker_name, searched=True),
        Column("queue", "topic.queue", lambda row: row.queue_id, "number"),
        Column("offset", "group.offset", lambda row: row.consumer_offset, "number"),
        Column("end", "topic.max", lambda row: row.broker_offset, "number"),
        Column("behind", "groups.behind", lambda row: row.diff, "number"),
        Column("leased", "group.leased", lambda row: row.leased, "number"),
        Column("last", "groups.last", lambda row: row.last_timestamp, "ago"),
        Column("owner", "group.owner", lambda row: _owner(view, row, members())),
    ]  # fmt: skip


def _owner(view: View, row: QueueProgress, found: GroupSubscriptions | None) -> str | None:
    if found is not None and found.consume_type == POP_TYPE:
        return view.t("group.all_members")
    return owner_of(row, found, view.t("common.nothing"))


def owner_of(row: QueueProgress, found: GroupSubscriptions | None, nobody: str) -> str | None:
    """Return the members to which a queue is assigned, or `nobody` if it is not assigned.

    Return None if the assignment is unknown, because some members have not reported their queues.
    """
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
                ("topic.broker", broker),
                *((key, view.format("flag", getattr(config, name))) for name, key in FLAGS.items()),
                ("groups.retries", view.format("number", config.retry_max_times)),
                ("group.retry_queues", view.format("number", config.retry_queue_nums)),
            ]
        )


# -- actions


async def _fresh_configs(view: View, group: str) -> Mapping[str, SubscriptionGroupConfig]:
    """Request the settings of a group, and return them by broker."""
    found = (await view.cluster.groups().fresh()).value
    return next((row.configs for row in found.rows if row.name == group), {}) if found else {}


async def change(view: View, group: str) -> None:
    """Ask the user for new settings of a group, and set them at one broker or all brokers."""
    configs = await _fresh_configs(view, group)
    if not configs:
        view.notify_error(view.t("group.unknown"))
        return
    present = next(iter(configs.values()))
    form = Form(view, view.t("group.change_of", name=group))
    where = broker_choice(view, form, configs)
    flags = {name: form.yes_no(key, getattr(present, name)) for name, key in FLAGS.items()}
    retries = form.number("groups.retries", present.retry_max_times, -1, MAX_RETRIES)
    queues = form.number("group.retry_queues", present.retry_queue_nums, 0, MAX_RETRY_QUEUES)
    if not await form.submitted():
        return
    brokers = chosen_brokers(where, configs)

    async def operation() -> Operation:
        configs = await _fresh_configs(view, group)
        settings = {}
        for name, addr in (await view.admin.masters(chosen_brokers(where, configs))).items():
            config = settings[addr] = copy.copy(configs.get(name, present))
            for flag, field in flags.items():
                setattr(config, flag, field.value == "yes")
            config.retry_max_times, config.retry_queue_nums = int(retries.value or 0), int(queues.value or 0)
        return operations.update_group(view.admin, group, settings)

    values = ", ".join([*(f"{flag}={field.value}" for flag, field in flags.items()),
                        f"retry_max_times={retries.value}", f"retry_queue_nums={queues.value}"])  # fmt: skip
    await run_operation(
        view, operation,
        [view.t("group.will_change", name=group, where=", ".join(brokers)), values],
        {"brokers": ",".join(brokers), "values": values},
        refresh=["groups", ("group", group)],
    )  # fmt: skip


async def delete(view: View, group: str) -> None:
    """Delete a group: its settings, offsets, retry messages and dead letters."""

    async def operation() -> Operation:
        addrs = list((await view.admin.masters()).values())
        topics = await operations.group_topics(view.admin, group)
        return await operations.delete_group(view.admin, group, addrs, topics, with_offsets=True)

    await run_operation(
        view, operation,
        [view.t("group.will_delete", name=group), view.t("group.members_come_back")],
        {"brokers": ",".join(await view.admin.masters())},
        refresh=["groups", "lags"], then="/groups",
    )  # fmt: skip
