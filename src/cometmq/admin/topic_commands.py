"""`mqadmin` commands about topics: updateTopic, deleteTopic, topicList, topicRoute, topicStatus."""

from __future__ import annotations

import functools
from typing import Any

import click
import msgspec

from cometmq.admin import formats
from cometmq.admin.admin import Admin, TopicSettings
from cometmq.admin.shell import (
    TOPIC,
    admin_command,
    json_option,
    raw_option,
    show,
    show_json,
    switch,
    target_options,
)
from cometmq.text import counted

QUEUES = functools.partial(click.option, type=click.IntRange(1, 65_535), default=8, show_default=True)


@admin_command("updateTopic")
@target_options
@TOPIC
@QUEUES("-r", "--readQueueNums", "read_queue_nums", help="Queues to read from.")
@QUEUES("-w", "--writeQueueNums", "write_queue_nums", help="Queues to write to.")
@click.option(
    "-p",
    "--perm",
    type=click.Choice(["2", "4", "6"]),
    default="6",
    show_default=True,
    help="Permission: 2 write, 4 read, 6 both.",
)
@switch("-o", "--order", help="Ordered topic.")
@switch("-u", "--unit", help="Unit topic.")
@switch("-s", "--hasUnitSub", "has_unit_sub", help="Has unit sub.")
@click.option(
    "-a",
    "--attributes",
    "attributes",
    metavar="+KEY=VALUE,-KEY",
    help="Set or drop attributes: retention.ms, retention.bytes (per queue), message.type.",
)
async def update_topic(
    admin: Admin, broker_addr: str | None, cluster: str | None, topic: str, perm: str, **more: Any
) -> None:
    """Update or create topic."""
    settings = TopicSettings(topic=topic.strip(), perm=int(perm), **more)
    async for addr in admin.create_topic(settings, broker_addr=broker_addr, cluster=cluster):
        show([f"create topic to {addr} success."])
    if settings.order:
        conf = await admin.set_order_conf(settings, broker_addr=broker_addr, cluster=cluster)
        kind = "broker" if broker_addr else "cluster"
        show([f"set {kind} orderConf. isOrder=true, orderConf=[{conf}]"])
    show([str(settings)])


@admin_command("deleteTopic")
@TOPIC
@click.option(
    "-c", "--clusterName", "cluster", required=True, metavar="NAME", help="Cluster to delete it from."
)
async def delete_topic(admin: Admin, topic: str, cluster: str) -> None:
    """Delete topic from broker and NameServer."""
    await admin.master_addrs(cluster)  # an unknown cluster is reported first
    found = await admin.clusters_of(topic.strip())
    if cluster not in found:
        elsewhere = f"; it is in {', '.join(found)}" if found else ""
        raise click.ClickException(f"there is no topic {topic.strip()} in cluster {cluster}{elsewhere}")
    await admin.delete_topic_in_brokers(topic.strip(), cluster)
    show([f"delete topic [{topic}] from cluster [{cluster}] success."])
    await admin.delete_topic_in_name_servers(topic.strip())
    show([f"delete topic [{topic}] from NameServer success."])


@admin_command("purgeTopic")
@TOPIC
@click.option("-q", "--queueId", "queue_id", type=click.IntRange(0), help="Only this queue of each broker.")
@click.option("--before", metavar="TIME", help="Only messages stored before: ms, or yyyy-MM-dd#HH:mm:ss:SSS.")
@click.option("--yes", is_flag=True, help="Do it; without this only show what would go.")
@json_option
async def purge_topic(
    admin: Admin, topic: str, queue_id: int | None, before: str | None, yes: bool, as_json: bool
) -> None:
    """Hide the messages of a topic from all consumers, for good."""
    before_ms = None if before is None else time_ms(before)
    purged = await admin.purge_topic(topic.strip(), queue_id=queue_id, before_ms=before_ms, execute=yes)
    if not purged and queue_id is not None:
        raise click.ClickException(f"topic {topic.strip()} has no messages in a queue {queue_id}")
    if as_json:
        show_json([{"brokerName": name, **msgspec.to_builtins(queue)} for name, queue in purged])
        return
    show(formats.purged(purged))
    gone = sum(queue.purged_to - queue.min_offset for _, queue in purged)
    outcome = "purged." if yes else "would go. Nothing was done; --yes does it."
    show([f"{counted(gone, 'message')} {outcome}"])


@admin_command("topicList")
@click.option(
    "-c", "--clusterModel", "cluster_model", is_flag=True, help="With the cluster and the groups of each."
)
@json_option
async def topic_list(admin: Admin, cluster_model: bool, as_json: bool) -> None:
    """Fetch all topic list from name server."""
    if cluster_model:
        uses = await admin.topic_uses()
        show_json(uses) if as_json else show(formats.topic_uses(uses))
    else:
        topics = await admin.topics()
        show_json(topics) if as_json else show(topics)


@admin_command("topicRoute")
@TOPIC
@click.option("-l", "--list", "as_list", is_flag=True, help="Columns instead of JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (the default of this command).")
@raw_option
async def topic_route(admin: Admin, topic: str, as_list: bool, as_json: bool) -> None:
    """Examine topic route info."""
    route = await admin.route(topic.strip())
    if as_list and not as_json:
        show(formats.topic_route_table(route))
    else:
        show_json(route)


@admin_command("topicStatus")
@TOPIC
@json_option
async def topic_status(admin: Admin, topic: str, as_json: bool) -> None:
    """Examine topic Status info."""
    queues = await admin.topic_status(topic.strip())
    show_json(queues) if as_json else show(formats.topic_status(queues))


def time_ms(text: str) -> int:
    """A time as `formats.parse_time` reads it. Raises click.BadParameter."""
    try:
        return formats.parse_time(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no time: expected ms since 1970, or yyyy-MM-dd#HH:mm:ss:SSS"
        ) from None
