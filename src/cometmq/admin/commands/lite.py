"""`mqadmin` commands for lite topics, with the columns of Apache's 5.5 tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import click

from cometmq.admin.admin import Admin
from cometmq.admin.commands import shell
from cometmq.command_options import flag, name_option, number, watch_option
from cometmq.protocol.bodies.admin import (
    LiteBrokerInfo,
    LiteClientInfo,
    LiteGroupInfo,
    LiteLag,
    LiteTopicInfo,
    ParentTopicInfo,
)
from cometmq.protocol.lite import lmq_name
from cometmq.text import local_time

PARENT = name_option("-p --parentTopic parent", required=True, help="Parent topic.")
GROUP = name_option("-g --group", required=True, help="Consumer group.")


def _time(epoch_ms: int) -> str:
    return local_time(epoch_ms) if epoch_ms > 0 else "-"


@shell.admin_command(
    "getBrokerLiteInfo",
    watch_option,
    shell.BROKER,
    shell.CLUSTER,
    flag("-d --showDetail", help="Show parent topics and their groups, too."),
)
async def get_broker_lite_info(
    admin: Admin, broker_addr: str | None, cluster: str | None, show_detail: bool
) -> None:
    """Show the numbers of lite topics and subscriptions of brokers (5.5)."""
    if (broker_addr is None) == (cluster is None):
        raise click.UsageError("Give either -b/--brokerAddr or -c/--cluster.")
    addrs = await admin.target_addrs(broker_addr, cluster)
    found = {addr: await admin.lite_broker_info(addr) for addr in addrs}
    shell.tell(found, _brokers(found, show_detail))


def _brokers(found: Mapping[str, LiteBrokerInfo], detail: bool) -> Iterator[str]:
    form = "%-30s %-17s %-10s %-14s %-20s %-17s %-15s %-18s %-15s"
    yield form % (
        *("#Broker", "#Store Type", "#Max LMQ", "#Current LMQ", "#SubscriptionCount"),
        *("#OrderInfoCount", "#CQTableSize", "#OffsetTableSize", "#eventMapSize"),
    )
    for addr, info in found.items():
        yield form % (
            *(addr, info.store_type, info.max_lmq_num, info.current_lmq_num, info.lite_subscription_count),
            *(info.order_info_count, info.cq_table_size, info.offset_table_size, info.event_map_size),
        )
        if detail:
            yield f"Topic Meta: {json.dumps(info.topic_meta)}"
            yield f"Group Meta: {json.dumps(info.group_meta)}"


@shell.admin_command("getParentTopicInfo", watch_option, PARENT)
async def get_parent_topic_info(admin: Admin, parent: str) -> None:
    """Show the groups of a parent topic, and the number of its lite topics (5.5)."""
    await shell.tell_known(partial(admin.parent_topic, parent), partial(_parents, parent))


def _parents(parent: str, found: Mapping[str, ParentTopicInfo]) -> Iterator[str]:
    yield f"Parent Topic Info: [{parent}]"
    form = "%-50s %-8s %-14s %-14s %-100s "
    yield form % ("#Broker Name", "#TTL", "#Lite Count", "#LMQ NUM", "#GROUPS")
    for name, info in found.items():
        yield form % (name, info.ttl, info.lite_topic_count, info.lmq_num, f"[{', '.join(info.groups)}]")


@shell.admin_command(
    "getLiteTopicInfo",
    watch_option,
    PARENT,
    name_option("-l --liteTopic lite_topic", required=True, help="Lite topic."),
    flag("-s --showClientId", help="Show the subscribers, too."),
)
async def get_lite_topic_info(admin: Admin, parent: str, lite_topic: str, show_client_id: bool) -> None:
    """Show the offsets of a lite topic, and the number of its subscribers (5.5)."""
    lines = partial(_topics, parent, lite_topic, show_client_id)
    await shell.tell_known(partial(admin.lite_topic, parent, lite_topic), lines)


def _topics(parent: str, name: str, clients: bool, found: Mapping[str, LiteTopicInfo]) -> Iterator[str]:
    yield f"Lite Topic Info: [{parent}] [{name}] [{lmq_name(parent, name)}]"
    form = "%-50s %-14s %-14s %-30s %-12s %-18s "
    yield form % (
        *("#Broker Name", "#MinOffset", "#MaxOffset"),
        *("#LastUpdate", "#Sharding", "#SubClientCount"),
    )
    for broker, info in found.items():
        offsets = info.topic_offset
        yield form % (
            *(broker, offsets.min_offset, offsets.max_offset, _time(offsets.last_update_timestamp)),
            *(str(info.sharding_to_broker).lower(), len(info.subscriber)),
        )
        if clients:
            yield f"[{', '.join(f'{each.client_id}@{each.group}' for each in info.subscriber)}]"


@shell.admin_command(
    "getLiteClientInfo",
    watch_option,
    PARENT,
    GROUP,
    name_option("-c --clientId", required=True, help="Client id."),
    flag("-s --showDetail", help="Show the lite topics, too."),
)
async def get_lite_client_info(
    admin: Admin, parent: str, group: str, client_id: str, show_detail: bool
) -> None:
    """Show the number of lite topics to which a client is subscribed (5.5)."""
    lines = partial(_clients, parent, group, client_id, show_detail)
    await shell.tell_known(partial(admin.lite_client, parent, group, client_id), lines)


def _clients(
    parent: str, group: str, client_id: str, detail: bool, found: Mapping[str, LiteClientInfo]
) -> Iterator[str]:
    yield f"Lite Client Info: [{parent}] [{group}] [{client_id}]"
    form = "%-30s %-20s %-30s %-30s "
    yield form % ("#Broker", "#LiteTopicCount", "#LastAccessTime", "#LastConsumeTime")
    for name, info in found.items():
        count = info.lite_topic_count if info.lite_topic_count >= 0 else "N/A"
        yield form % (name, count, _time(info.last_access_time), _time(info.last_consume_time))
        if detail:
            yield f"Lite Topics: [{', '.join(info.lite_topic_set)}]"


@shell.admin_command(
    "getLiteGroupInfo",
    watch_option,
    PARENT,
    GROUP,
    name_option("-l --liteTopic lite_topic", help="Show the progress in this lite topic."),
    number("-k --topK top", default=20, high=10_000, show_default=True, help="Lite topics per broker."),
)
async def get_lite_group_info(
    admin: Admin, parent: str, group: str, lite_topic: str | None, top: int
) -> None:
    """Show the lite topics in which a group is the furthest behind (5.5)."""
    rows = _lags if lite_topic is None else _progress
    await shell.tell_known(
        partial(admin.lite_group, parent, group, lite_topic, top),
        lambda found: [f"Lite Group Info: [{group}] [{parent}]", *rows(found)],
    )


def _total(found: Mapping[str, LiteGroupInfo]) -> str:
    return f"Total Lag Count: {sum(max(each.total_lag_count, 0) for each in found.values())}"


def _progress(found: Mapping[str, LiteGroupInfo]) -> Iterator[str]:
    form = "%-50s %-16s %-16s %-16s %-30s"
    yield form % ("#Broker Name", "#BrokerOffset", "#ConsumeOffset", "#LagCount", "#LastUpdate")
    for name, info in found.items():
        offsets = info.lite_topic_offset_wrapper
        if offsets is None:
            yield form % (name, "-", "-", "-", "-")
        else:
            broker, consumer = offsets.broker_offset, offsets.consumer_offset
            yield form % (name, broker, consumer, broker - consumer, _time(offsets.last_timestamp))
    yield _total(found)


def _lags(found: Mapping[str, LiteGroupInfo]) -> Iterator[str]:
    infos = found.values()
    yield "------TopK by lag count-----"
    yield _total(found)
    rows = [each for info in infos for each in info.lag_count_top_k or ()]
    yield from _lag_table(sorted(rows, key=lambda each: -each.lag_count))
    yield ""
    yield "------TopK by lag time------"
    times = [each.earliest_unconsumed_timestamp for each in infos if each.earliest_unconsumed_timestamp > 0]
    yield f"Min Unconsumed Timestamp: {f'{min(times)} ({local_time(min(times))})' if times else -1}"
    rows = [each for info in infos for each in info.lag_timestamp_top_k or ()]
    yield from _lag_table(sorted(rows, key=lambda each: each.earliest_unconsumed_timestamp))


def _lag_table(rows: Iterable[LiteLag]) -> Iterator[str]:
    form = "%-6s %-40s %-12s %-30s"
    yield form % ("NO", "Lite Topic", "Lag Count", "UnconsumedTimestamp")
    for place, row in enumerate(rows, 1):
        yield form % (place, row.lite_topic, row.lag_count, _time(row.earliest_unconsumed_timestamp))


@shell.admin_command(
    "triggerLiteDispatch",
    PARENT,
    GROUP,
    name_option("-c --clientId", help="Only this client."),
    name_option("-b --brokerName", help="Only this broker."),
)
async def trigger_lite_dispatch(
    admin: Admin, parent: str, group: str, client_id: str | None, broker_name: str | None
) -> None:
    """Offer all lite topics with unconsumed messages to a group's clients once more (5.5)."""
    title = f"Group And Topic Info: [{group}] [{parent}]"
    await shell.tell_known(
        partial(admin.trigger_lite_dispatch, parent, group, client_id, broker_name),
        lambda found: [title, "", *(f"{name:<30} dispatched" for name in found)],
    )
