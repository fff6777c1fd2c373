"""`mqadmin` commands that export cluster data: `exportMetadata`, `exportConfigs`, `exportMetrics`."""

from __future__ import annotations

import os
import time
from typing import Any

import click
import msgspec

from cometmq.admin.admin import Admin
from cometmq.admin.commands.shell import BROKER, admin_command, flag, name_option, opt, tell

DIRECTORY = opt(
    "-f",
    "--filePath",
    "directory",
    default="/tmp/rocketmq/export",
    show_default=True,
    metavar="DIR",
    help="Directory for the file.",
)
CLUSTER = name_option("-c", "--clusterName", "cluster", required=True, help="This cluster.")


def write(directory: str, name: str, value: Any) -> None:
    """Write a value as JSON, replacing an existing file, and print the path. Raises OSError."""
    path = os.path.join(directory, name)
    os.makedirs(directory, exist_ok=True)
    new = f"{path}.{os.getpid()}.tmp"
    # Other users may write to /tmp. O_EXCL prevents this process from following a link that such a user has
    # created.
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2) + b"\n")
    os.replace(new, path)
    tell({"path": path}, [f"export {path} success"])


@admin_command(
    "exportMetadata",
    name_option(
        "-c", "--clusterName", "cluster", help="Cluster to export; queue numbers are summed over its masters."
    ),
    BROKER,
    DIRECTORY,
    flag("-t", "--topic", "topics", help="Only topics."),
    flag("-g", "--subscriptionGroup", "groups", help="Only groups."),
    flag("-s", "--specialTopic", "special", help="Include retry and dead-letter topics."),
)
async def export_metadata(
    admin: Admin,
    cluster: str | None,
    broker_addr: str | None,
    directory: str,
    topics: bool,
    groups: bool,
    special: bool,
) -> None:
    """Export topics and groups to a file."""
    if broker_addr and cluster:
        raise click.UsageError("Give -b/--brokerAddr or -c/--clusterName, not both.")
    if broker_addr:
        if topics == groups:
            raise click.UsageError("With -b/--brokerAddr give -t/--topic or -g/--subscriptionGroup.")
        if topics:
            write(directory, "topic.json", await admin.topic_table(broker_addr, special=special))
        else:
            table = await admin.user_groups(broker_addr)
            write(directory, "subscriptionGroup.json", {"subscriptionGroupTable": table})
        return
    if not cluster:
        raise click.UsageError("Missing option: -b/--brokerAddr or -c/--clusterName.")
    topic_table, group_table = await admin.cluster_metadata(cluster, special=special)
    found: dict[str, Any] = {"exportTime": int(time.time() * 1000)}
    if topics or not groups:
        found["topicConfigTable"] = topic_table
    if not topics:
        found["subscriptionGroupTable"] = group_table
    write(
        directory, "topic.json" if topics else "subscriptionGroup.json" if groups else "metadata.json", found
    )


@admin_command("exportConfigs", CLUSTER, DIRECTORY)
async def export_configs(admin: Admin, cluster: str, directory: str) -> None:
    """Export the main settings of brokers to a file."""
    write(directory, "configs.json", await admin.cluster_configs(cluster))


@admin_command("exportMetrics", CLUSTER, DIRECTORY)
async def export_metrics(admin: Admin, cluster: str, directory: str) -> None:
    """Export message rates, disk usage, topic and group counts, and client versions to a file."""
    write(directory, "metrics.json", await admin.cluster_metrics(cluster))
