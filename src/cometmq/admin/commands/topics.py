"""`mqadmin` commands for topics."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
import msgspec

from cometmq.admin import operations
from cometmq.admin.admin import Admin, TopicSettings
from cometmq.admin.commands import formats, shell
from cometmq.admin.errors import UnknownNameError
from cometmq.command_options import flag, number, opt, switch, watch_option
from cometmq.protocol.bodies import TopicConfig
from cometmq.protocol.codes import MASTER_ID, ORDER_TOPIC_CONFIG
from cometmq.text import counted

QUEUES = partial(number, low=1, high=65_535, default=8, show_default=True)
PERMS = click.Choice(["2", "4", "6"])
PERM = partial(opt, "-p --perm", type=PERMS, help="Permission: 2 write, 4 read, 6 both.")


@shell.admin_command("updateTopic")
@shell.target_options
@shell.TOPIC
@QUEUES("-r --readQueueNums", help="Number of read queues.")
@QUEUES("-w --writeQueueNums", help="Number of write queues.")
@PERM(default="6", show_default=True)
@switch("-o --order", help="Ordered topic.")
@switch("-u --unit", help="Unit topic.")
@switch("-s --hasUnitSub", help="Has unit sub.")
@opt(
    "-a --attributes",
    metavar="+KEY=VALUE,-KEY",
    help="Set or drop attributes: retention.ms, retention.bytes (per queue), rate.send.messages, "
    "rate.send.bytes (per second), dedup.window.ms, dedup.key, message.type.",
)
@shell.changes
async def update_topic(admin: Admin, at: shell.Target, topic: str, perm: str, **more: Any) -> None:
    """Create or update a topic."""
    settings = TopicSettings(topic=topic, perm=int(perm), **more)
    conf, addrs = None, await at.addrs(admin)
    operation = operations.update_topic(admin, topic, dict.fromkeys(addrs, settings))
    deeds = [f"register the queues of ordered topic {topic} at the name servers"] if settings.order else []
    shell.announce(*operation.describe(), *deeds)
    await shell.execute(operation)
    if settings.order:
        conf = await admin.set_order_conf(settings, broker_addr=at.broker_addr, cluster=at.cluster)
        shell.show_if_text(f"set {at.kind} orderConf. isOrder=true, orderConf=[{conf}]")
    shell.tell({**msgspec.to_builtins(settings), "brokerAddrs": addrs, "orderConf": conf}, [str(settings)])


@shell.admin_command("updateTopicList", shell.target_options, shell.FILE, shell.changes)
async def update_topic_list(admin: Admin, at: shell.Target, filename: str) -> None:
    """Create or update the topics that are listed in a file. RocketMQ has this command since 5.x."""
    topics = shell.list_of(filename, TopicConfig)
    names = [each.topic_name for each in topics]
    sends = admin.create_topics(topics, broker_addr=at.broker_addr, cluster=at.cluster)
    await shell.set_list(at, admin, "topics", names, sends, "topic")


@shell.admin_command("deleteTopic")
@shell.TOPIC
@opt("-c --clusterName cluster", required=True, metavar="NAME", help="Cluster of the topic.")
@shell.changes
async def delete_topic(admin: Admin, topic: str, cluster: str) -> None:
    """Delete a topic and its messages at brokers and name servers."""
    operation = await operations.delete_topic(admin, topic, [cluster])
    found = await admin.clusters_of(topic)
    if cluster not in found:
        elsewhere = f"; it is in {', '.join(found)}" if found else ""
        raise click.ClickException(f"topic {topic} does not exist in cluster {cluster}{elsewhere}")
    await shell.execute(operation)
    shell.tell({"topic": topic, "cluster": cluster, "brokerAddrs": operation.steps[0].addrs}, [])


@shell.admin_command("purgeTopic")
@shell.TOPIC
@number("-q --queueId", help="Only this queue of each broker.")
@opt("--before", metavar="TIME", help="Only messages stored before: ms, or yyyy-MM-dd#HH:mm:ss:SSS.")
@flag("--yes", help="Delete; without --yes only show what would be deleted.")
async def purge_topic(admin: Admin, topic: str, queue_id: int | None, before: str | None, yes: bool) -> None:
    """Make all messages of a topic unreadable (cannot be undone)."""
    before_ms = None if before is None else shell.time_ms(before)
    purged = await admin.purge_topic(topic, queue_id=queue_id, before_ms=before_ms, execute=yes)
    if not purged and queue_id is not None:
        raise click.ClickException(f"topic {topic} has no messages in a queue {queue_id}")
    if shell.wants_json():
        shell.show_json([{"brokerName": name, **msgspec.to_builtins(queue)} for name, queue in purged])
        return
    shell.show(formats.purged(purged))
    count = sum(queue.count for _, queue in purged)
    outcome = "purged." if yes else "would be deleted. Nothing was done; --yes deletes."
    shell.show([f"{counted(count, 'message')} {outcome}"])


@shell.admin_command("topicList", watch_option)
@flag("-c --clusterModel", help="Show the cluster and the groups of each topic.")
async def topic_list(admin: Admin, cluster_model: bool) -> None:
    """List topics."""
    if cluster_model:
        await shell.tell_known(lambda missing: admin.topic_uses(missing=missing), formats.topic_uses)
    else:
        topics = await admin.topics()
        shell.tell(topics, topics)


@shell.admin_command("topicRoute", watch_option)
@shell.TOPIC
@flag("-l --list as_list", help="Print columns instead of JSON.")
async def topic_route(admin: Admin, topic: str, as_list: bool) -> None:
    """Show a topic's route."""
    route = await admin.route(topic)
    if as_list and not shell.wants_json():
        shell.show(formats.topic_route_table(route))
    else:
        shell.show_json(route)


@shell.admin_command("topicStatus", watch_option, shell.TOPIC, shell.CLUSTER)
async def topic_status(admin: Admin, topic: str, cluster: str | None) -> None:
    """Show minimum and maximum offset of a topic's queues."""
    queues = await shell.in_cluster(admin, cluster, await admin.topic_status(topic))
    shell.tell(queues, formats.topic_status(queues))


@shell.admin_command("updateTopicPerm", shell.target_options, shell.TOPIC, PERM(required=True), shell.changes)
async def update_topic_perm(admin: Admin, at: shell.Target, topic: str, perm: str) -> None:
    """Change a topic's permission."""
    new, broker_addr = int(perm), at.broker_addr
    if broker_addr:
        route = await admin.route(topic)
        names = {data.broker_addrs.get(MASTER_ID): data.broker_name for data in route.broker_datas}
        if (names.get(broker_addr), new) in {(data.broker_name, data.perm) for data in route.queue_datas}:
            raise click.ClickException("new perm equals to the old one!")
    change = partial(admin.change_topic_perm, topic, new, broker_addr=broker_addr, cluster=at.cluster)
    planned = [(addr, old) async for addr, old, _ in change(execute=False)]
    shell.announce(*(f"update topic perm from {old} to {new} in {addr}" for addr, old in planned))
    async for addr, old, settings in change():
        shell.show_if_text(f"update topic perm from {old} to {new} in {addr} success.")
        if broker_addr:
            shell.show_if_text(f"{settings}.")
    shell.tell([{"brokerAddr": addr, "from": old, "to": new} for addr, old in planned], [])


@shell.admin_command("topicClusterList", watch_option, shell.TOPIC)
async def topic_cluster_list(admin: Admin, topic: str) -> None:
    """List the clusters that have a topic."""
    await admin.route(topic)  # `route` raises NoRouteError if the topic does not exist
    found = await admin.clusters_of(topic)
    shell.tell(found, found)


@shell.admin_command(
    "updateOrderConf",
    shell.TOPIC,
    opt("-v --orderConf conf", type=str.strip, metavar="BROKER:QUEUES;...", help="With put: the value."),
    opt("-m --method", required=True, type=click.Choice(["get", "put", "delete"]), help="What to do."),
    flag("--force", help="With put: also for an unknown topic (CometMQ only)."),
    shell.changes,
)
async def update_order_conf(admin: Admin, topic: str, conf: str | None, method: str, force: bool) -> None:
    """Show, set or delete the queues of an ordered topic."""
    if method == "put":
        if not conf:
            raise click.UsageError("please set orderConf with option -v.")
        if not force and topic not in (known := await admin.topics()):
            raise UnknownNameError("topic", topic, known)
        shell.announce(f"set the order configuration of {topic} to {conf}")
        await admin.put_kv_config(ORDER_TOPIC_CONFIG, topic, conf)
        line = f"update orderConf success. topic=[{topic}], orderConf=[{conf}]"
    else:
        conf = await admin.kv_config(ORDER_TOPIC_CONFIG, topic)
        if conf is None and method == "get":
            raise click.ClickException(f"topic {topic} has no order configuration")
        line = f"get orderConf success. topic=[{topic}], orderConf=[{conf}]"
        if method == "delete":
            shell.announce(f"delete the order configuration of {topic}, which is {conf}", danger=True)
            await admin.delete_kv_config(ORDER_TOPIC_CONFIG, topic)
            line = f"delete orderConf success. topic=[{topic}]"
    shell.tell({"topic": topic, "orderConf": conf}, [line])


@shell.admin_command(
    "allocateMQ",
    shell.TOPIC,
    opt("-i --ipList clients", required=True, metavar="LIST", help="Client ids, separated by ','."),
)
async def allocate_mq(admin: Admin, topic: str, clients: str) -> None:
    """Show how the members of a group would share a topic's queues."""
    members = [word.strip() for word in clients.split(",") if word.strip()]
    if not members:
        raise click.UsageError("-i/--ipList contains no member")
    value = {"result": await admin.allocation(topic, members)}
    shell.tell(value, [msgspec.json.encode(value, order="sorted").decode()])
