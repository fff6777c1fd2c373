"""`mqadmin` commands for consumer groups: settings, members and offsets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import click
import msgspec

from cometmq.admin import operations
from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats
from cometmq.admin.commands.shell import (
    BROKER,
    CLUSTER,
    FILE,
    TOPIC,
    admin_command,
    announce,
    changes,
    execute,
    flag,
    in_cluster,
    incomplete,
    list_of,
    name_option,
    number,
    opt,
    raise_if_incomplete,
    show,
    show_error,
    show_if_text,
    show_json,
    show_problem,
    switch,
    target_options,
    tell,
    wants_json,
)
from cometmq.admin.errors import UnknownNameError
from cometmq.errors import CometError
from cometmq.number_range import FiniteRange
from cometmq.protocol.bodies import SetMessageRequestModeRequestBody, SubscriptionGroupConfig
from cometmq.settings import INT_MAX, LONG_MAX

# As in Apache's monitor, the first report is printed after 20 s, and by default one more every 60 s.
MONITOR_DELAY_S, MONITOR_INTERVAL_S = 20.0, 60.0
GROUP = name_option("-g", "--groupName", "group", required=True, help="Consumer group.")
CONSUMER_GROUP = name_option("-g", "--consumerGroup", "group", required=True, help="Consumer group.")


@admin_command(
    "consumerProgress",
    name_option(
        "-g", "--groupName", "group", help="Show this group queue by queue; default: a summary of all groups."
    ),
    switch("-s", "--showClientIP", help="Show which client holds each queue."),
    name_option("-t", "--topicName", "topic", help="Only this topic of the group."),
    CLUSTER,
)
async def consumer_progress(
    admin: Admin, group: str | None, show_client_ip: bool, topic: str | None, cluster: str | None
) -> None:
    """Show a group's consumer offset, broker offset, lag and rate."""
    missing: dict[str, CometError] = {}
    if group is None:
        if topic is not None or cluster is not None:
            raise click.UsageError("-t/--topicName and -c/--cluster require -g/--groupName.")
        groups = await admin.groups(missing=missing)
        tell(groups, formats.group_summaries(groups))
        raise_if_incomplete(missing)
        return
    found = await admin.progress(group, with_client_ip=show_client_ip, missing=missing)
    in_place = await in_cluster(admin, cluster, found.queues)
    rows = [row for row in in_place if topic in (None, row.topic)]
    if found.queues and not rows and not missing:
        if in_place:
            raise UnknownNameError("topic of the group", topic or "", sorted({row.topic for row in in_place}))
        names = (await admin.cluster_info()).cluster_addr_table
        held = {row.broker_name for row in found.queues}
        raise UnknownNameError(
            "cluster with the group", cluster or "", sorted(name for name in names if held & set(names[name]))
        )
    tps = None if missing else found.consume_tps
    progress = msgspec.structs.replace(found, consume_tps=tps, queues=rows)
    total = None if missing else progress.diff_total
    tell(progress, formats.group_progress(progress, show_client_ip=show_client_ip, total=total))
    raise_if_incomplete(missing)


@admin_command(
    "consumerStatus",
    CONSUMER_GROUP,
    name_option("-i", "--clientId", help="Show the running info of this member."),
    BROKER,
    flag("-s", "--jstack", help="With -i: show the member's threads, too."),
)
async def consumer_status(
    admin: Admin, group: str, client_id: str | None, broker_addr: str | None, jstack: bool
) -> None:
    """Show the subscriptions of a group's members, and warn if they differ."""
    if client_id is not None:
        info = await admin.running_info(group, client_id, jstack=jstack, broker_addr=broker_addr)
        queues = [{"messageQueue": queue, "processQueueInfo": held} for queue, held in info.mq_table.items()]
        value = {
            "properties": info.properties,
            "subscriptionSet": info.subscription_set,
            "mqTable": queues,
            "statusTable": info.status_table,
            "jstack": info.jstack,
        }
        tell(value, formats.running_info(info))
        return
    found = await admin.subscriptions(group)
    tell(found, formats.consumer_status(found))


@admin_command("consumerConnection", CONSUMER_GROUP, BROKER)
async def consumer_connection(admin: Admin, group: str, broker_addr: str | None) -> None:
    """Show a consumer group's clients and its subscriptions."""
    found = await admin.consumer_connection(group, broker_addr)
    tell(found, formats.consumer_connection(found))


@admin_command(
    "producerConnection",
    name_option("-g", "--producerGroup", "group", required=True, help="Producer group."),
    TOPIC,
)
async def producer_connection(admin: Admin, group: str, topic: str) -> None:
    """Show a producer group's clients."""
    found = await admin.producer_connection(group, topic)
    tell(found, formats.producer_connection(found))


@admin_command(
    "producer",
    opt("-b", "--broker", "broker_addr", required=True, metavar="HOST:PORT", help="This broker."),
)
async def producer(admin: Admin, broker_addr: str) -> None:
    """List the producers that are connected to a broker."""
    found = await admin.producers(broker_addr)
    tell(found, formats.producers(found))


@admin_command(
    "updateSubGroup",
    target_options,
    GROUP,
    switch("-s", "--consumeEnable", default=True, help="Allow the group to consume."),
    switch("-m", "--consumeFromMinEnable", help="Consume from the first message."),
    switch("-d", "--consumeBroadcastEnable", help="Allow broadcasting."),
    switch("-o", "--consumeMessageOrderly", default=None, help="Consume messages in order (5.x)."),
    number("-q", "--retryQueueNums", high=INT_MAX, default=1, help="Number of queues of the retry topic."),
    number(
        "-r",
        "--retryMaxTimes",
        low=-1,
        high=INT_MAX,
        default=16,
        help="Maximum number of retries; after them, a message becomes a dead letter.",
    ),
    number("-i", "--brokerId", high=LONG_MAX, default=0, help="Broker to consume from."),
    number(
        "-w",
        "--whichBrokerWhenConsumeSlowly",
        high=LONG_MAX,
        default=1,
        help="Broker to consume from when the lag is large.",
    ),
    switch(
        "-a",
        "--notifyConsumerIdsChanged",
        "notify",
        default=True,
        help="Notify members when the group's members change.",
    ),
    opt("--attributes", metavar="+KEY=VALUE,-KEY", help="Attributes of the group (5.x)."),
    changes,
)
async def update_sub_group(
    admin: Admin,
    broker_addr: str | None,
    cluster: str | None,
    group: str,
    notify: bool,
    attributes: str | None,
    **more: Any,
) -> None:
    """Create or update a subscription group.

    Options that are not given are set to their defaults, as in Apache's command.
    """
    given = dict(word.partition("=")[::2] for word in (attributes or "").split(",") if word)
    config = SubscriptionGroupConfig(
        group_name=group, notify_consumer_ids_changed_enable=notify, attributes=given or None, **more
    )
    addrs = await admin.target_addrs(broker_addr, cluster)
    await execute(operations.update_group(admin, group, dict.fromkeys(addrs, config)))
    tell({"brokerAddrs": addrs, "config": config}, [formats.group_config_line(config)])


@admin_command("updateSubGroupList", target_options, FILE, changes)
async def update_sub_group_list(
    admin: Admin, broker_addr: str | None, cluster: str | None, filename: str
) -> None:
    """Create or update subscription groups from a file (5.x)."""
    configs = list_of(filename, SubscriptionGroupConfig)
    names = [each.group_name for each in configs]
    addrs = await admin.target_addrs(broker_addr, cluster)
    announce(f"create or change groups {', '.join(names)} at {', '.join(addrs)}")
    async for addr in admin.update_groups(configs, broker_addr=broker_addr, cluster=cluster):
        show_if_text(
            f"submit batch of subscription group config to {addr} success, please check the result later."
        )
    tell({"groups": names, "brokerAddrs": addrs}, [])


@admin_command(
    "deleteSubGroup",
    target_options,
    GROUP,
    switch("-r", "--removeOffset", help="Delete the group's offsets, too."),
    changes,
)
async def delete_sub_group(
    admin: Admin, broker_addr: str | None, cluster: str | None, group: str, remove_offset: bool
) -> None:
    """Delete a subscription group at brokers.

    With a cluster, the group's retry and dead-letter topics are deleted, too.
    """
    addrs = await admin.target_addrs(broker_addr, cluster)
    topics = await operations.group_topics(admin, group, cluster) if cluster else {}
    missing: dict[str, CometError] = {}
    names = await admin.group_names(missing=missing)
    if group not in names and not missing and not wants_json():
        # A missing group is not an error, as in Apache's command, because scripts delete groups that may
        # already be deleted.
        show_problem(str(UnknownNameError("consumer group", group, names)))
    operation = await operations.delete_group(
        admin, group, addrs, topics, with_offsets=remove_offset, cluster=cluster
    )
    await execute(operation)
    tell({"group": group, "brokerAddrs": addrs, "topics": list(topics)}, [])


@admin_command(
    "setConsumeMode",
    target_options,
    name_option("-t", "--topicName", "topic", required=True, help="Topic name."),
    GROUP,
    opt(
        "-m",
        "--mode",
        required=True,
        type=click.Choice(["PULL", "POP"], case_sensitive=False),
        help="Whether members pull queues of their own, or all pop from all queues.",
    ),
    number(
        "-q",
        "--popShareQueueNum",
        low=-1,
        high=INT_MAX,
        default=0,
        help="Number of further members that pop a member's queues; 0: all members pop all queues.",
    ),
    changes,
)
async def set_consume_mode(
    admin: Admin,
    broker_addr: str | None,
    cluster: str | None,
    topic: str,
    group: str,
    mode: str,
    pop_share_queue_num: int,
) -> None:
    """Set how push consumers of a group consume a topic (5.x, with clientRebalance=false)."""
    addrs = await admin.target_addrs(broker_addr, cluster)
    body = SetMessageRequestModeRequestBody(topic, group, mode.upper(), pop_share_queue_num)
    await execute(operations.set_consume_mode(admin, body, addrs))
    tell(
        {"brokerAddrs": addrs, "mode": body},
        [f"topic[{topic}] group[{group}] consume mode[{body.mode}] popShareQueueNum[{pop_share_queue_num}]"],
    )


@admin_command("getConsumerConfig", GROUP)
async def get_consumer_config(admin: Admin, group: str) -> None:
    """Show a subscription group's settings."""
    found = await admin.group_configs(group)
    if not found:
        await admin.brokers_of(group)  # `brokers_of` raises UnknownNameError if the group does not exist
        raise click.ClickException(f"group {group} exists, but no broker has settings of it")
    tell(found, formats.group_configs(found))


@admin_command(
    "brokerConsumeStats",
    opt("-b", "--brokerAddr", required=True, metavar="HOST:PORT", help="This broker."),
    number(
        "-t",
        "--timeoutMillis",
        "timeout_ms",
        low=1,
        high=INT_MAX,
        default=50_000,
        show_default=True,
        help="Timeout of the request.",
    ),
    opt("-l", "--level", type=int, default=0, show_default=True, help="Only queues with at least this lag."),
    switch("-o", "--order", help="Only ordered topics."),
)
async def broker_consume_stats(
    admin: Admin, broker_addr: str, timeout_ms: int, level: int, order: bool
) -> None:
    """Show consumer offset, broker offset and lag of every group of a broker."""
    found = await admin.broker_consume_stats(broker_addr, ordered=order, timeout_s=timeout_ms / 1000)
    rows = [
        row for row in found if row.queue.diff >= level and (row.queue.last_timestamp > 0 or row.queue.diff)
    ]
    total = sum(row.queue.diff for row in found)
    tell({"queues": rows, "diffTotal": total}, formats.broker_consume_stats(rows, total))


@admin_command(
    "startMonitoring",
    number("--rounds", low=1, help="Stop after N rounds (CometMQ only)."),
    opt(
        "--interval",
        "interval_s",
        type=FiniteRange(min=0.1),
        default=MONITOR_INTERVAL_S,
        show_default=True,
        help="Seconds between two rounds (CometMQ only).",
    ),
)
async def start_monitoring(admin: Admin, rounds: int | None, interval_s: float) -> None:
    """Print the lag of all groups that are online, periodically."""
    await asyncio.sleep(min(MONITOR_DELAY_S, interval_s))
    done = 0
    while True:
        began = time.monotonic()
        missing: dict[str, CometError] = {}
        async for undone in admin.undone(missing=missing):
            if wants_json():
                show_json(undone, indent=None)
            else:
                show(formats.undone(undone))
        done += 1
        if rounds is not None and done >= rounds:
            raise_if_incomplete(missing)
            return
        if error := incomplete(missing):
            show_error(error)
        await asyncio.sleep(max(0.0, interval_s - (time.monotonic() - began)))
