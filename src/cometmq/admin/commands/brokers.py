"""`mqadmin` commands for brokers and name servers: settings, files, statistics, replication, exports."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import click
import msgspec

from cometmq.admin import operations
from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats, shell
from cometmq.admin.errors import was_deleted
from cometmq.admin.stats import counted_runtime
from cometmq.admin.values import PermChange, SettingsChange, TopicStats
from cometmq.command_options import flag, name_option, number, opt, watch_interval_s, watch_option
from cometmq.errors import CometError
from cometmq.protocol.codes import DLQ_PREFIX, RETRY_PREFIX


@shell.admin_command(
    "clusterList",
    watch_option,
    flag("-m --moreStats", help="Print more stats."),
    number("-i --interval", low=1, metavar="SECONDS", help="Repeat at this interval, in seconds."),
    name_option("-c --clusterName cluster", help="Only this cluster (5.x)."),
)
async def cluster_list(admin: Admin, more_stats: bool, interval: int | None, cluster: str | None) -> None:
    """List clusters and their brokers, with message rates."""
    if interval is not None and watch_interval_s() is not None:
        raise click.UsageError("Give -i/--interval or --watch, not both.")
    while True:
        brokers = await admin.brokers(cluster)
        if shell.wants_json():
            shell.show_json(brokers)
        elif more_stats:
            shell.show(formats.cluster_totals(brokers))
        else:
            shell.show(formats.cluster_list(brokers, int(time.time() * 1000)))
        for broker in brokers:
            if broker.problem and not shell.wants_json():  # The JSON output already contains `problem`
                shell.show_problem(f"{broker.broker_addr}: {broker.problem}")
        if interval is None:
            if any(broker.problem for broker in brokers):
                raise click.exceptions.Exit(1)
            return
        await asyncio.sleep(interval)


@shell.admin_command("brokerStatus", watch_option)
@shell.target_options
async def broker_status(admin: Admin, at: shell.Target) -> None:
    """Show the runtime data of brokers."""
    if at.broker_addr:
        runtime = counted_runtime(await admin.runtime(at.broker_addr))
        shell.tell(runtime, formats.broker_status(runtime))
        return
    brokers = await admin.brokers(at.cluster)
    if shell.wants_json():
        shell.show_json(
            [msgspec.to_builtins(each) | {"runtime": counted_runtime(each.runtime)} for each in brokers]
        )
    for broker in () if shell.wants_json() else brokers:
        if broker.problem:
            shell.show_problem(f"{broker.broker_addr}: {broker.problem}")
        else:
            shell.show(formats.broker_status(counted_runtime(broker.runtime), broker.broker_addr))
    if any(broker.problem for broker in brokers):
        raise click.exceptions.Exit(1)


MAYBE_TARGET = (
    shell.BROKER,
    name_option("-c --cluster", help="All masters of this cluster. Without -b and -c, of all clusters."),
)


@shell.admin_command("getBrokerConfig", watch_option, shell.target_options)
async def get_broker_config(admin: Admin, at: shell.Target) -> None:
    """Show the settings of brokers."""
    if at.broker_addr:
        settings = await admin.broker_config(at.broker_addr)
        shell.tell(settings, [*formats.settings(at.broker_addr, settings), ""])
        return
    found: dict[str, dict[str, str]] = {}
    for master, slaves in (await admin.cluster_addrs(at.cluster, slaves=True)).items():
        titles = {master: f"Master: {master}"}
        titles |= {slave: f"My Master: {master}=====Slave: {slave}" for slave in slaves}
        for addr, title in titles.items():
            found[addr] = await admin.broker_config(addr)
            if not shell.wants_json():
                shell.show([*formats.settings(title, found[addr]), ""])
    if shell.wants_json():
        shell.show_json(found)


@shell.admin_command(
    "updateBrokerConfig",
    shell.target_options,
    flag("-a --updateAllBroker all_brokers", help="With -c: include the slaves (5.x)."),
    opt("-k --key", required=True, type=str.strip, metavar="KEY", help="Setting."),
    opt("-v --value", required=True, type=str.strip, metavar="TEXT", help="Its value."),
    shell.changes,
)
async def update_broker_config(
    admin: Admin, at: shell.Target, all_brokers: bool, key: str, value: str
) -> None:
    """Update a setting of brokers.

    A running broker applies the setting immediately or at its next start, and writes it to its settings file.
    Without a settings file the change is lost at the next start. The output reports each of these cases.
    """
    addrs = [at.broker_addr] if at.broker_addr else []
    if at.cluster:
        for master, slaves in (await admin.cluster_addrs(at.cluster, slaves=all_brokers)).items():
            addrs += [master, *slaves]
    done: list[SettingsChange] = await shell.execute(
        operations.set_broker(admin, addrs, key, value), show_change
    )
    shell.tell(done, [])
    if any(change.unknown for change in done):
        raise click.exceptions.Exit(1)


NO_FILE = "no settings file (mqbroker -c FILE): the change is lost at the broker's next start"


def show_change(change: SettingsChange) -> None:
    """Print what a broker reports about a change of its settings, such as settings that take effect later."""
    if change.not_written:
        shell.show_problem(f"{change.broker_addr}: {NO_FILE}")
    for key in change.without_effect:
        shell.show_problem(f"{change.broker_addr}: {key} is accepted but has no effect on this broker")
    for key in change.at_next_start:
        written = "counts" if change.not_written else "is written, and takes effect"
        shell.show_problem(f"{change.broker_addr}: {key} {written} at the next start")
    for key in change.unknown:
        shell.show_problem(f"{change.broker_addr}: {key} is unknown and was ignored")


async def clean(admin: Admin, name: str, broker_addr: str | None, cluster: str | None) -> None:
    """Run a cleanup at one broker, the masters of a cluster or all masters."""
    addrs = [broker_addr] if broker_addr else list(await admin.cluster_addrs(cluster))
    await shell.execute(operations.clean(admin, name, addrs))
    shell.tell({"brokerAddrs": addrs}, ["success"])


@shell.admin_command("cleanExpiredCQ", *MAYBE_TARGET, shell.changes)
async def clean_expired_cq(admin: Admin, broker_addr: str | None, cluster: str | None) -> None:
    """Delete consume-queue files whose messages have expired."""
    await clean(admin, "broker.clean_queues", broker_addr, cluster)


@shell.admin_command("cleanUnusedTopic", *MAYBE_TARGET, shell.changes)
async def clean_unused_topic(admin: Admin, broker_addr: str | None, cluster: str | None) -> None:
    """Delete the queues of topics that are not configured."""
    await clean(admin, "broker.clean_topics", broker_addr, cluster)


@shell.admin_command("deleteExpiredCommitLog", *MAYBE_TARGET, shell.changes)
async def delete_expired_commit_log(admin: Admin, broker_addr: str | None, cluster: str | None) -> None:
    """Delete expired commit-log files now."""
    await clean(admin, "broker.clean_log", broker_addr, cluster)


@shell.admin_command(
    "statsAll",
    watch_option,
    flag("-a --activeTopic active", help="Only topics that are in use."),
    name_option("-t --topic", help="Only this topic."),
)
async def stats_all(admin: Admin, active: bool, topic: str | None) -> None:
    """Show rates and lag of topics and their groups."""
    shown, rows = False, list[TopicStats]()
    missing: dict[str, CometError] = {}
    for name in await admin.topics():
        if name.startswith((RETRY_PREFIX, DLQ_PREFIX)) or topic not in (None, name):
            continue
        try:
            found = await admin.topic_stats(name)
        except CometError as error:
            if not was_deleted(error):
                missing[name] = error
            continue
        found = [row for row in found if not active or row.in_msg_24_hours or row.out_msg_24_hours]
        rows += found
        if not shell.wants_json():
            shell.show(formats.topic_stats(found, title=not shown))
            shown = True
    if shell.wants_json():
        shell.show_json(rows)
    elif not shown:
        shell.show(formats.topic_stats([], title=True))
    shell.raise_if_incomplete(missing)


@shell.admin_command(
    "queryCq",
    watch_option,
    shell.TOPIC,
    number("-q --queue queue_id", required=True, help="Queue id."),
    number("-i --index", high=2**63 - 1, required=True, help="First entry."),
    number("-c --count", low=1, high=4096, default=10, show_default=True, help="Entries."),
    opt(
        "-b --broker broker_addr",
        metavar="HOST:PORT",
        help="Only this broker; default: the topic's first broker.",
    ),
    name_option("-g --consumer group", help="Show the subscription of this group, too."),
)
async def query_cq(
    admin: Admin,
    topic: str,
    queue_id: int,
    index: int,
    count: int,
    broker_addr: str | None,
    group: str | None,
) -> None:
    """Show entries of a consume queue."""
    found = await admin.consume_queue(topic, queue_id, index, count, broker_addr=broker_addr, group=group)
    shell.tell(found, formats.consume_queue(found, index))


NAMESPACE = name_option("-s --namespace", required=True, help="Namespace.")
KEY = opt("-k --key", required=True, type=str.strip, metavar="KEY", help="Key.")
VALUE = opt("-v --value", required=True, type=str.strip, metavar="TEXT", help="Value.")
BROKER_NAME = name_option("-b --brokerName", required=True, help="Name of the broker.")


@shell.admin_command("updateKvConfig", NAMESPACE, KEY, VALUE, shell.changes)
async def update_kv_config(admin: Admin, namespace: str, key: str, value: str) -> None:
    """Create or update a KV config entry at all name servers."""
    shell.announce(f"set key {key} of namespace {namespace} to {value}")
    await admin.put_kv_config(namespace, key, value)
    set_to = {"namespace": namespace, "key": key, "value": value}
    shell.tell(set_to, ["create or update kv config to namespace success."])


@shell.admin_command("deleteKvConfig", NAMESPACE, KEY, shell.changes)
async def delete_kv_config(admin: Admin, namespace: str, key: str) -> None:
    """Delete a KV config entry at all name servers."""
    value = await admin.kv_config(namespace, key)
    shell.announce(f"delete key {key} of namespace {namespace}, whose value is {value}", danger=True)
    await admin.delete_kv_config(namespace, key)
    deleted = {"namespace": namespace, "key": key, "value": value}
    shell.tell(deleted, ["delete kv config from namespace success."])


@shell.admin_command("wipeWritePerm", BROKER_NAME, shell.changes)
async def wipe_write_perm(admin: Admin, broker_name: str) -> None:
    """Remove the write permission of a broker's topics.

    Producers leave the broker within 30 seconds, so that it can be stopped. addWritePerm reverts the change.
    """
    await change_write_perm(admin, broker_name, "wipe")


@shell.admin_command("addWritePerm", BROKER_NAME, shell.changes)
async def add_write_perm(admin: Admin, broker_name: str) -> None:
    """Restore the write permission of a broker's topics."""
    await change_write_perm(admin, broker_name, "add")


async def change_write_perm(admin: Admin, broker_name: str, verb: str) -> None:
    """Print a line for each name server. Exit with code 1 if one of them refused."""
    operation = await operations.change_write_perm(admin, broker_name, allow=verb == "add")
    done: list[PermChange] = await shell.execute(operation)
    shell.tell(done, formats.perm_changes(verb, done))
    problems = [each for each in done if each.problem]
    for each in () if shell.wants_json() else problems:
        shell.show_problem(f"{each.namesrv}: {each.problem}")
    if problems:
        raise click.exceptions.Exit(1)


@shell.admin_command("getNamesrvConfig", watch_option)
async def get_namesrv_config(admin: Admin) -> None:
    """Show the settings of name servers."""
    found = await admin.namesrv_configs()
    lines = (line for addr, settings in found.items() for line in formats.settings(addr, settings))
    shell.tell(found, lines)


@shell.admin_command("updateNamesrvConfig", KEY, VALUE, shell.changes)
async def update_namesrv_config(admin: Admin, key: str, value: str) -> None:
    """Update a setting of name servers."""
    shell.announce(f"set {key} to {value} at {', '.join(admin.client.namesrv.addrs)}")
    addrs = await admin.update_namesrv_config({key: value})
    lines = [f"update name server config success![{', '.join(addrs)}]", f"{key} : {value}"]
    shell.tell({"namesrvs": addrs, "key": key, "value": value}, lines)


container_option = opt(
    "-c --brokerContainerAddr container",
    required=True,
    metavar="HOST:PORT",
    help="Address of a broker container of RocketMQ 5.x.",
)


@shell.admin_command("haStatus", watch_option)
@shell.target_options
@number("-i --interval", low=1, metavar="SECONDS", help="Repeat at this interval, in seconds.")
async def ha_status(admin: Admin, at: shell.Target, interval: int | None) -> None:
    """Show the replication status of brokers."""
    while True:
        found = {addr: await admin.ha_status(addr) for addr in await at.addrs(admin)}
        shell.tell(found, (line for addr, each in found.items() for line in formats.ha_status(addr, each)))
        if interval is None:
            return
        await asyncio.sleep(interval)


@shell.admin_command("resetMasterFlushOffset")
@opt("-b --brokerAddr", required=True, metavar="HOST:PORT", help="This slave.")
@number("-o --offset", high=2**63 - 1, required=True, help="Flushed offset of the master's log, in bytes.")
@shell.changes
async def reset_master_flush_offset(admin: Admin, broker_addr: str, offset: int) -> None:
    """Set the master's flush offset at a slave (5.x)."""
    shell.announce(f"set the master's flush offset to {offset} at {broker_addr}")
    await admin.reset_master_flush_offset(broker_addr.strip(), offset)
    facts = {"brokerAddr": broker_addr, "masterFlushOffset": offset}
    shell.tell(facts, [f"reset master flush offset to {offset} success"])


@shell.admin_command("addBroker")
@container_option
@opt(
    "-b --brokerConfigPath path",
    required=True,
    metavar="FILE",
    help="Settings file of the broker, on the container's machine.",
)
@shell.changes
async def add_broker(admin: Admin, container: str, path: str) -> None:
    """Add a broker to a broker container of RocketMQ 5.x."""
    shell.announce(f"start the broker of {path} at {container}")
    await admin.add_broker(container.strip(), path.strip())
    shell.tell({"container": container, "path": path}, [f"add broker to {container.strip()} success"])


@shell.admin_command("removeBroker")
@container_option
@opt(
    "-b --brokerIdentity identity",
    required=True,
    metavar="CLUSTER:BROKER:ID",
    help="The broker. For a DLedger member, ID is the number in the member's name.",
)
@shell.changes
async def remove_broker(admin: Admin, container: str, identity: str) -> None:
    """Remove a broker from a broker container of RocketMQ 5.x."""
    words = [word.strip() for word in identity.split(":")]
    if len(words) != 3 or not all(words) or not (words[2].isascii() and words[2].isdigit()):
        raise click.BadParameter(f"{identity!r} is not CLUSTER:BROKER:ID", param_hint="-b/--brokerIdentity")
    shell.announce(f"stop the broker {identity} at {container}")
    await admin.remove_broker(container.strip(), words[0], words[1], int(words[2]))
    shell.tell(
        {"container": container, "broker": identity}, [f"remove broker from {container.strip()} success"]
    )


DIRECTORY = opt(
    "-f --filePath directory",
    default="/tmp/rocketmq/export",
    show_default=True,
    metavar="DIR",
    help="Directory for the file.",
)
EXPORTED = name_option("-c --clusterName cluster", required=True, help="This cluster.")


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
    shell.tell({"path": path}, [f"export {path} success"])


@shell.admin_command(
    "exportMetadata",
    name_option(
        "-c --clusterName cluster", help="Cluster to export; queue numbers are summed over its masters."
    ),
    shell.BROKER,
    DIRECTORY,
    flag("-t --topic topics", help="Only topics."),
    flag("-g --subscriptionGroup groups", help="Only groups."),
    flag("-s --specialTopic special", help="Include retry and dead-letter topics."),
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


@shell.admin_command("exportConfigs", EXPORTED, DIRECTORY)
async def export_configs(admin: Admin, cluster: str, directory: str) -> None:
    """Export the main settings of brokers to a file."""
    write(directory, "configs.json", await admin.cluster_configs(cluster))


@shell.admin_command("exportMetrics", EXPORTED, DIRECTORY)
async def export_metrics(admin: Admin, cluster: str, directory: str) -> None:
    """Export message rates, disk usage, topic and group counts, and client versions to a file."""
    write(directory, "metrics.json", await admin.cluster_metrics(cluster))
