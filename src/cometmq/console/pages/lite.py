"""The lite topics of a parent topic, and the lite topics of a consumer group: sections of other pages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from nicegui import background_tasks, ui

from cometmq.admin import Admin, GroupSubscriptions
from cometmq.console.base.cluster_feeds import ClusterRows, GroupRow, TopicRow
from cometmq.console.base.feeds import Feed, Reading
from cometmq.console.widgets.listing import SEARCH_DELAY_MS, Listing
from cometmq.console.widgets.page import View
from cometmq.console.widgets.rows import Column, ListState, path_of
from cometmq.errors import CometError
from cometmq.protocol.bodies.admin import LiteTopicState
from cometmq.protocol.lite import LITE, MAX_LITE_TOPIC_LENGTH, bound_topic, lite_topic_of

T = TypeVar("T")
V = TypeVar("V")

INTERVAL_S = 10.0
MAX_LISTED = 1_000
"""The maximum number of lite topics in a list. The user finds others by the beginning of their names."""
MAX_CLIENTS, MAX_NAMES = 100, 20
"""The maximum number of clients whose subscriptions are shown, and of names shown for each client."""


@dataclass(frozen=True)
class LiteRow:
    """A lite topic, over all brokers.

    `lag` is that of the group with the largest lag, or None without a group. `last_ms` is the store time of
    the last message, in epoch ms.
    """

    name: str
    stored: int
    lag: int | None
    groups: str
    subscribers: int
    last_ms: int


@dataclass(frozen=True)
class LiteRows:
    """Some lite topics of a parent.

    `total` is the number of all lite topics of the parent. `more` is whether others begin with the same
    prefix. `missing` has the error texts of brokers that do not respond, by name.
    """

    rows: list[LiteRow]
    total: int
    more: bool
    missing: dict[str, str]


@dataclass(frozen=True)
class LiteClient:
    """A client of a group, with the number of its lite topics and some of their names."""

    client_id: str
    count: int
    names: str
    seen_ms: int


@dataclass(frozen=True)
class LiteGroup:
    """The lite topics of a group with the largest lags, its total lag in all, and its clients."""

    total: int
    lags: list[tuple[str, int]]
    clients: list[LiteClient]
    missing: dict[str, str]


async def ask_topics(admin: Admin, parent: str, prefix: str) -> LiteRows:
    """Return the first lite topics of a parent whose names begin with `prefix`."""
    missing: dict[str, CometError] = {}
    parents = await admin.parent_topic(parent, missing)
    found = await admin.lite_topics(parent, prefix, MAX_LISTED, missing)
    by_name: dict[str, list[LiteTopicState]] = {}
    for each in found.values():
        for state in each.topics:
            by_name.setdefault(state.lite_topic, []).append(state)
    rows = []
    for name, states in sorted(by_name.items())[:MAX_LISTED]:
        lags: Counter[str] = Counter()
        for state in states:
            lags.update(state.lags)
        rows.append(
            LiteRow(
                name=name,
                stored=sum(each.max_offset - each.min_offset for each in states),
                lag=max(lags.values(), default=None),
                groups=", ".join(sorted(lags)),
                subscribers=max(each.subscribers for each in states),
                last_ms=max(each.stored_ms for each in states),
            )
        )
    more = len(by_name) > MAX_LISTED or any(each.more for each in found.values())
    total = sum(each.lite_topic_count for each in parents.values())
    return LiteRows(rows, total, more, _texts(missing))


async def ask_group(admin: Admin, parent: str, group: str, members: GroupSubscriptions | None) -> LiteGroup:
    """Return the lags of a group in lite topics, and the subscriptions of its members."""
    missing: dict[str, CometError] = {}
    found = (await admin.lite_group(parent, group, None, MAX_LISTED, missing)).values()
    lags: Counter[str] = Counter()
    for info in found:
        lags.update({each.lite_topic: each.lag_count for each in info.lag_count_top_k or ()})
    ids = [each.client_id for each in members.members[:MAX_CLIENTS]] if members is not None else []
    infos = await asyncio.gather(
        *(admin.lite_client(parent, group, each, missing, MAX_NAMES) for each in ids)
    )
    clients = []
    for client_id, by_broker in zip(ids, infos, strict=True):
        states = by_broker.values()
        names = sorted({lite_topic_of(lmq) or "*" for each in states for lmq in each.lite_topic_set})
        count = max((each.lite_topic_count for each in states), default=0)
        more = " …" if count > len(names[:MAX_NAMES]) else ""
        seen_ms = max((each.last_access_time for each in states), default=0)
        clients.append(
            LiteClient(client_id, max(count, 0), ", ".join(names[:MAX_NAMES]) + more, max(seen_ms, 0))
        )
    total = sum(max(each.total_lag_count, 0) for each in found)
    return LiteGroup(total, lags.most_common(MAX_LISTED), clients, _texts(missing))


def _texts(missing: Mapping[str, CometError]) -> dict[str, str]:
    return {name: str(error) for name, error in missing.items()}


def _once(
    view: View, feed: Feed[T], pick: Callable[[T], V | None], draw: Callable[[V], Awaitable[None]]
) -> None:
    """Add an area that `draw` fills as soon as `pick` returns something for a value of a feed."""
    place, drawn = ui.element("div"), False

    async def fill(picked: V) -> None:
        with place:
            await draw(picked)

    def show(reading: Reading[T]) -> None:
        nonlocal drawn
        picked = None if drawn or reading.value is None else pick(reading.value)
        if picked is not None:
            drawn = True
            background_tasks.create(view.run(fill, picked))

    view.watch(feed, show)


def lite_topics(view: View, parent: str) -> None:
    """Add the section with the lite topics of a topic, if it has the type LITE."""

    def is_parent(found: ClusterRows[TopicRow]) -> bool | None:
        return any(row.name == parent and LITE in row.message_type.split(", ") for row in found.rows) or None

    _once(view, view.cluster.topics(), is_parent, lambda _: _topics(view, parent))


async def _topics(view: View, parent: str) -> None:
    with view.section("lite.topics"):
        prefix = ui.input(view.t("lite.prefix"), value=view.query.get("prefix", "")[:MAX_LITE_TOPIC_LENGTH])
        prefix.props(f"dense outlined clearable debounce={SEARCH_DELAY_MS} maxlength={MAX_LITE_TOPIC_LENGTH}")
        prefix.classes("list-search")
        feed = Feed(lambda: ask_topics(view.admin, parent, str(prefix.value or "")), INTERVAL_S)

        def changed() -> None:
            others = {name: value for name, value in view.query.items() if name != "prefix"}
            view.set_query({**others, **({"prefix": str(prefix.value)} if prefix.value else {})})
            feed.refresh()

        prefix.on_value_change(changed)
        columns: list[Column[LiteRow]] = [
            Column("name", "lite.topic", lambda row: row.name),
            Column("stored", "topic.stored", lambda row: row.stored, "number"),
            Column("lag", "lite.lag", lambda row: row.lag, "number"),
            Column("groups", "topic.groups", lambda row: row.groups),
            Column("subscribers", "lite.subscribers", lambda row: row.subscribers, "number"),
            Column("last", "topic.last", lambda row: row.last_ms, "ago"),
        ]
        listing = Listing(view, columns, lambda row: row.name, name="l", empty="lite.none")
        await listing.follow(feed, lambda found: found.rows, notes=partial(_topic_notes, view))


def _topic_notes(view: View, found: LiteRows) -> None:
    view.missing_brokers(found.missing)
    view.note(view.t("lite.total", n=f"{found.total:,}"))
    if found.more:
        view.note(view.t("lite.more", n=f"{MAX_LISTED:,}"))


def lite_group(view: View, group: str, members: Feed[GroupSubscriptions]) -> None:
    """Add the sections with the lite topics and the subscriptions of a group that is bound to a parent."""

    def parent(found: ClusterRows[GroupRow]) -> str | None:
        configs = [config for row in found.rows if row.name == group for config in row.configs.values()]
        return next(filter(None, (bound_topic(each.attributes) for each in configs)), None)

    _once(view, view.cluster.groups(), parent, lambda name: _group(view, name, group, members))


async def _group(view: View, parent: str, group: str, members: Feed[GroupSubscriptions]) -> None:
    def ask() -> Awaitable[LiteGroup]:
        return ask_group(view.admin, parent, group, members.latest.value)

    feed = view.feeds.feed(("lite group", group), ask, INTERVAL_S)
    view.watch(members, lambda _reading: feed.refresh())
    with view.section("lite.lags"):
        view.link(parent, path_of("topics", parent))
        lags: list[Column[tuple[str, int]]] = [
            Column("name", "lite.topic", lambda row: row[0], searched=True),
            Column("lag", "groups.behind", lambda row: row[1], "number"),
        ]
        default = ListState(sort="lag", descending=True)
        listing = Listing(view, lags, lambda row: row[0], name="l", default=default, empty="lite.no_lag")
        await listing.follow(feed, lambda found: found.lags, notes=partial(_group_notes, view))
    with view.section("lite.clients"):
        columns: list[Column[LiteClient]] = [
            Column("client", "group.client", lambda row: row.client_id, searched=True),
            Column("count", "lite.topics", lambda row: row.count, "number"),
            Column("names", "lite.names", lambda row: row.names, searched=True),
            Column("seen", "lite.seen", lambda row: row.seen_ms, "ago"),
        ]
        clients = Listing(view, columns, lambda row: row.client_id, name="c", empty="lite.no_clients")
        await clients.follow(feed, lambda found: found.clients)


def _group_notes(view: View, found: LiteGroup) -> None:
    view.missing_brokers(found.missing)
    view.note(view.t("lite.total_lag", n=f"{found.total:,}"))
