"""`mqadmin` commands for consumer groups: settings, members, and offsets, which some of them set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import click
import msgspec

from cometmq.admin import operations
from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats, shell
from cometmq.admin.errors import UnknownNameError
from cometmq.admin.offsets import END, OffsetWay, QueueReset, Reset
from cometmq.command_options import FiniteRange, flag, name_option, number, opt, switch, watch_option
from cometmq.errors import CometError
from cometmq.protocol.bodies import SetMessageRequestModeRequestBody, SubscriptionGroupConfig
from cometmq.settings import INT_MAX, LONG_MAX

# As in Apache's monitor, the first report is printed after 20 s, and by default one more every 60 s.
MONITOR_DELAY_S, MONITOR_INTERVAL_S = 20.0, 60.0
GROUP = name_option("-g --groupName group", required=True, help="Consumer group.")
CONSUMER_GROUP = name_option("-g --consumerGroup group", required=True, help="Consumer group.")


@shell.admin_command(
    "consumerProgress",
    watch_option,
    name_option(
        "-g --groupName group", help="Show this group queue by queue; default: a summary of all groups."
    ),
    switch("-s --showClientIP", help="Show which client holds each queue."),
    name_option("-t --topicName topic", help="Only this topic of the group."),
    shell.CLUSTER,
)
async def consumer_progress(
    admin: Admin, group: str | None, show_client_ip: bool, topic: str | None, cluster: str | None
) -> None:
    """Show a group's consumer offset, broker offset, lag and rate."""
    if group is None:
        if topic is not None or cluster is not None:
            raise click.UsageError("-t/--topicName and -c/--cluster require -g/--groupName.")
        await shell.tell_known(lambda missing: admin.groups(missing=missing), formats.group_summaries)
        return
    missing: dict[str, CometError] = {}
    found = await admin.progress(group, with_client_ip=show_client_ip, missing=missing)
    in_place = await shell.in_cluster(admin, cluster, found.queues)
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
    shell.tell(progress, formats.group_progress(progress, show_client_ip=show_client_ip, total=total))
    shell.raise_if_incomplete(missing)


@shell.admin_command(
    "consumerStatus",
    watch_option,
    CONSUMER_GROUP,
    name_option("-i --clientId", help="Show the running info of this member."),
    shell.BROKER,
    flag("-s --jstack", help="With -i: show the member's threads, too."),
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
        shell.tell(value, formats.running_info(info))
        return
    found = await admin.subscriptions(group)
    shell.tell(found, formats.consumer_status(found))


@shell.admin_command("consumerConnection", watch_option, CONSUMER_GROUP, shell.BROKER)
async def consumer_connection(admin: Admin, group: str, broker_addr: str | None) -> None:
    """Show a consumer group's clients and its subscriptions."""
    found = await admin.consumer_connection(group, broker_addr)
    shell.tell(found, formats.consumer_connection(found))


@shell.admin_command(
    "producerConnection",
    watch_option,
    name_option("-g --producerGroup group", required=True, help="Producer group."),
    shell.TOPIC,
)
async def producer_connection(admin: Admin, group: str, topic: str) -> None:
    """Show a producer group's clients."""
    found = await admin.producer_connection(group, topic)
    shell.tell(found, formats.producer_connection(found))


@shell.admin_command(
    "producer",
    watch_option,
    opt("-b --broker broker_addr", required=True, metavar="HOST:PORT", help="This broker."),
)
async def producer(admin: Admin, broker_addr: str) -> None:
    """List the producers that are connected to a broker."""
    found = await admin.producers(broker_addr)
    shell.tell(found, formats.producers(found))


@shell.admin_command(
    "updateSubGroup",
    shell.target_options,
    GROUP,
    switch("-s --consumeEnable", default=True, help="Allow the group to consume."),
    switch("-m --consumeFromMinEnable", help="Consume from the first message."),
    switch("-d --consumeBroadcastEnable", help="Allow broadcasting."),
    switch("-o --consumeMessageOrderly", default=None, help="Consume messages in order (5.x)."),
    number("-q --retryQueueNums", high=INT_MAX, default=1, help="Number of queues of the retry topic."),
    number(
        "-r --retryMaxTimes",
        low=-1,
        high=INT_MAX,
        default=16,
        help="Maximum number of retries; after them, a message becomes a dead letter.",
    ),
    number("-i --brokerId", high=LONG_MAX, default=0, help="Broker to consume from."),
    number(
        "-w --whichBrokerWhenConsumeSlowly",
        high=LONG_MAX,
        default=1,
        help="Broker to consume from when the lag is large.",
    ),
    switch(
        "-a --notifyConsumerIdsChanged notify",
        default=True,
        help="Notify members when the group's members change.",
    ),
    opt(
        "--attributes",
        metavar="+KEY=VALUE,-KEY",
        help="Attributes of the group (5.x); rate.receive.messages, rate.receive.bytes (per second).",
    ),
    shell.changes,
)
async def update_sub_group(
    admin: Admin, at: shell.Target, group: str, notify: bool, attributes: str | None, **more: Any
) -> None:
    """Create or update a subscription group.

    Options that are not given are set to their defaults, as in Apache's command.
    """
    given = dict(word.partition("=")[::2] for word in (attributes or "").split(",") if word)
    config = SubscriptionGroupConfig(
        group_name=group, notify_consumer_ids_changed_enable=notify, attributes=given or None, **more
    )
    addrs = await at.addrs(admin)
    await shell.execute(operations.update_group(admin, group, dict.fromkeys(addrs, config)))
    shell.tell({"brokerAddrs": addrs, "config": config}, [formats.group_config_line(config)])


@shell.admin_command("updateSubGroupList", shell.target_options, shell.FILE, shell.changes)
async def update_sub_group_list(admin: Admin, at: shell.Target, filename: str) -> None:
    """Create or update subscription groups from a file (5.x)."""
    configs = shell.list_of(filename, SubscriptionGroupConfig)
    names = [each.group_name for each in configs]
    sends = admin.update_groups(configs, broker_addr=at.broker_addr, cluster=at.cluster)
    await shell.set_list(at, admin, "groups", names, sends, "subscription group")


@shell.admin_command(
    "deleteSubGroup",
    shell.target_options,
    GROUP,
    switch("-r --removeOffset", help="Delete the group's offsets, too."),
    shell.changes,
)
async def delete_sub_group(admin: Admin, at: shell.Target, group: str, remove_offset: bool) -> None:
    """Delete a subscription group at brokers.

    With a cluster, the group's retry and dead-letter topics are deleted, too.
    """
    addrs, cluster = await at.addrs(admin), at.cluster
    topics = await operations.group_topics(admin, group, cluster) if cluster else {}
    missing: dict[str, CometError] = {}
    names = await admin.group_names(missing=missing)
    if group not in names and not missing and not shell.wants_json():
        # A missing group is not an error, as in Apache's command, because scripts delete groups that may
        # already be deleted.
        shell.show_problem(str(UnknownNameError("consumer group", group, names)))
    operation = await operations.delete_group(
        admin, group, addrs, topics, with_offsets=remove_offset, cluster=cluster
    )
    await shell.execute(operation)
    shell.tell({"group": group, "brokerAddrs": addrs, "topics": list(topics)}, [])


@shell.admin_command(
    "setConsumeMode",
    shell.target_options,
    name_option("-t --topicName topic", required=True, help="Topic name."),
    GROUP,
    opt(
        "-m --mode",
        required=True,
        type=click.Choice(["PULL", "POP"], case_sensitive=False),
        help="Whether members pull queues of their own, or all pop from all queues.",
    ),
    number(
        "-q --popShareQueueNum",
        low=-1,
        high=INT_MAX,
        default=0,
        help="Number of further members that pop a member's queues; 0: all members pop all queues.",
    ),
    shell.changes,
)
async def set_consume_mode(
    admin: Admin, at: shell.Target, topic: str, group: str, mode: str, pop_share_queue_num: int
) -> None:
    """Set how push consumers of a group consume a topic (5.x, with clientRebalance=false)."""
    addrs = await at.addrs(admin)
    body = SetMessageRequestModeRequestBody(topic, group, mode.upper(), pop_share_queue_num)
    await shell.execute(operations.set_consume_mode(admin, body, addrs))
    shell.tell(
        {"brokerAddrs": addrs, "mode": body},
        [f"topic[{topic}] group[{group}] consume mode[{body.mode}] popShareQueueNum[{pop_share_queue_num}]"],
    )


@shell.admin_command("getConsumerConfig", watch_option, GROUP)
async def get_consumer_config(admin: Admin, group: str) -> None:
    """Show a subscription group's settings."""
    found = await admin.group_configs(group)
    if not found:
        await admin.brokers_of(group)  # `brokers_of` raises UnknownNameError if the group does not exist
        raise click.ClickException(f"group {group} exists, but no broker has settings of it")
    shell.tell(found, formats.group_configs(found))


@shell.admin_command(
    "brokerConsumeStats",
    watch_option,
    opt("-b --brokerAddr", required=True, metavar="HOST:PORT", help="This broker."),
    number(
        "-t --timeoutMillis timeout_ms",
        low=1,
        high=INT_MAX,
        default=50_000,
        show_default=True,
        help="Timeout of the request.",
    ),
    opt("-l --level", type=int, default=0, show_default=True, help="Only queues with at least this lag."),
    switch("-o --order", help="Only ordered topics."),
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
    shell.tell({"queues": rows, "diffTotal": total}, formats.broker_consume_stats(rows, total))


@shell.admin_command(
    "startMonitoring",
    shell.ROUNDS,
    opt(
        "--interval interval_s",
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
            if shell.wants_json():
                shell.show_json(undone, indent=None)
            else:
                shell.show(formats.undone(undone))
        done += 1
        if rounds is not None and done >= rounds:
            shell.raise_if_incomplete(missing)
            return
        if error := shell.incomplete(missing):
            shell.show_error(error)
        await asyncio.sleep(max(0.0, interval_s - (time.monotonic() - began)))


OFFSET_GROUP = name_option("-g --group", required=True, help="Consumer group.")
FORCE = opt(
    "-f --force",
    type=bool,
    is_flag=False,
    flag_value=True,
    metavar="[BOOL]",
    help="false: move offsets only backwards. true: also create the offsets of an unknown group.",
)


@shell.admin_command(
    "resetOffsetByTime",
    OFFSET_GROUP,
    shell.TOPIC,
    opt(
        "-s --timestamp moment",
        required=True,
        type=str.strip,
        metavar="TIME",
        help="Time to reset to: now or -1 (the end), ms since 1970, or yyyy-MM-dd#HH:mm:ss:SSS.",
    ),
    FORCE,
    flag(
        "-c --cplus in_cpp_form",
        help="Notify clients in the C++ format. Only Apache's brokers use this flag.",
    ),
    opt("-b --broker broker_addr", metavar="HOST:PORT", help="Only at this master."),
    number("-q --queue queue_id", metavar="ID", help="Only this queue; needs -b."),
    number("-o --offset", metavar="OFFSET", help="Set this offset instead of a time; needs -b and -q."),
    name_option("--cluster", help="Only the masters of this cluster."),
    shell.changes,
)
async def reset_offset_by_time(
    admin: Admin,
    group: str,
    topic: str,
    moment: str,
    force: bool | None,
    broker_addr: str | None,
    queue_id: int | None,
    offset: int | None,
    **more: Any,
) -> None:
    """Reset a group's consumer offsets to a time.

    The group consumes messages again if an offset moves backwards, and skips messages if it moves forwards.
    """
    if queue_id is not None and broker_addr is None:
        raise click.UsageError("-q/--queue needs -b/--broker")
    if offset is not None and queue_id is None:
        raise click.UsageError("-o/--offset needs -q/--queue")
    at_ms = END if moment in ("now", str(END)) else shell.time_ms(moment)
    wanted = Reset(
        group=group,
        topic=topic,
        at_ms=at_ms,
        force=force is not False,
        new_group=force is True,
        broker_addr=broker_addr,
        queue_id=queue_id,
        offset=offset,
        **more,
    )
    forced = str(wanted.force).lower()
    title = (
        f"rollback consumer offset by specified group[{group}], topic[{topic}], force[{forced}], "
        f"timestamp(string)[{moment}], timestamp(long)[{at_ms}]"
    )
    await reset(admin, wanted, [title])


@shell.admin_command("skipAccumulatedMessage", OFFSET_GROUP, shell.TOPIC, FORCE, shell.CLUSTER, shell.changes)
async def skip_accumulated_message(
    admin: Admin, group: str, topic: str, force: bool | None, cluster: str | None
) -> None:
    """Skip all messages that a group has not consumed yet.

    The group never receives the skipped messages.
    """
    wanted = Reset(
        group=group, topic=topic, force=force is not False, new_group=force is True, cluster=cluster
    )
    await reset(admin, wanted, [])


async def reset(admin: Admin, wanted: Reset, title: Iterable[str]) -> None:
    """Print the planned reset, execute it, and print the offsets observed afterwards."""
    try:
        planned = await admin.plan_reset(wanted)
    except UnknownNameError as error:
        if error.kind == "consumer group" and not shell.wants_json():
            shell.show_problem("--force creates the offsets of an unknown group.")
        raise
    shell.announce(*(describe_reset(wanted, each) for each in planned), danger=True)
    done = await admin.reset_offset(wanted)
    shell.tell(done, [*title, *formats.resets(done)])
    problems = [each for each in done if each.problem]
    for each in problems:
        shell.show_problem(f"{each.broker_name} queue {each.queue_id}: {each.problem}")
    if problems:
        raise click.exceptions.Exit(1)


def describe_reset(wanted: Reset, each: QueueReset) -> str:
    """Describe the reset of one queue in a line."""
    place = f"{wanted.group} in {wanted.topic} at {each.broker_name} queue {each.queue_id}"
    if not each.changes:
        return f"leave {place} at {each.consumer_offset}"
    before = {-1: "no offset", 0: "0 (or no offset)"}.get(each.consumer_offset, str(each.consumer_offset))
    how = "through its members" if each.way is OffsetWay.MEMBERS else "in the broker"
    return f"set {place} from {before} to {each.rollback_offset}, {how}"


@shell.admin_command(
    "cloneGroupOffset",
    name_option("-s --srcGroup source", required=True, help="Group whose offsets are copied."),
    name_option("-d --destGroup target", required=True, help="Group whose offsets are set."),
    shell.TOPIC,
    opt(
        "-o --offline", metavar="BOOL", expose_value=False, help="Accepted for compatibility; has no effect."
    ),
    flag("--force", help="Create the offsets of an unknown group (CometMQ only)."),
    shell.changes,
)
async def clone_group_offset(admin: Admin, source: str, target: str, topic: str, force: bool) -> None:
    """Copy another group's consumer offsets in a topic.

    Stop the members of the target group first: running members overwrite the copied offsets.
    """
    rows = await admin.clone_offsets(source, target, topic, execute=False, new_group=force)
    deeds = (
        f"set {target} at {row.broker_name} queue {row.queue_id} to {row.consumer_offset}" for row in rows
    )
    shell.announce(*deeds)
    rows = await admin.clone_offsets(source, target, topic, new_group=force)
    line = f"clone group offset success. srcGroup[{source}], destGroup=[{target}], topic[{topic}]"
    shell.tell(rows, [line])
