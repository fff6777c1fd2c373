"""`mqadmin` commands for brokers: list, settings, files and statistics."""

from __future__ import annotations

import asyncio
import time

import click
import msgspec

from cometmq.admin import operations
from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats
from cometmq.admin.commands.shell import (
    BROKER,
    TOPIC,
    admin_command,
    changes,
    execute,
    flag,
    name_option,
    number,
    opt,
    raise_if_incomplete,
    show,
    show_json,
    show_problem,
    target_options,
    tell,
    wants_json,
)
from cometmq.admin.errors import was_deleted
from cometmq.admin.stats import counted_runtime
from cometmq.admin.values import SettingsChange, TopicStats
from cometmq.errors import CometError
from cometmq.protocol.codes import DLQ_PREFIX, RETRY_PREFIX


@admin_command(
    "clusterList",
    flag("-m", "--moreStats", help="Print more stats."),
    number("-i", "--interval", low=1, metavar="SECONDS", help="Repeat at this interval, in seconds."),
    name_option("-c", "--clusterName", "cluster", help="Only this cluster (5.x)."),
)
async def cluster_list(admin: Admin, more_stats: bool, interval: int | None, cluster: str | None) -> None:
    """List clusters and their brokers, with message rates."""
    while True:
        brokers = await admin.brokers(cluster)
        if wants_json():
            show_json(brokers)
        elif more_stats:
            show(formats.cluster_totals(brokers))
        else:
            show(formats.cluster_list(brokers, int(time.time() * 1000)))
        for broker in brokers:
            if broker.problem and not wants_json():  # The JSON output already contains `problem`
                show_problem(f"{broker.broker_addr}: {broker.problem}")
        if interval is None:
            if any(broker.problem for broker in brokers):
                raise click.exceptions.Exit(1)
            return
        await asyncio.sleep(interval)


@admin_command("brokerStatus")
@target_options
async def broker_status(admin: Admin, broker_addr: str | None, cluster: str | None) -> None:
    """Show the runtime data of brokers."""
    if broker_addr:
        runtime = counted_runtime(await admin.runtime(broker_addr))
        tell(runtime, formats.broker_status(runtime))
        return
    brokers = await admin.brokers(cluster)
    if wants_json():
        show_json(
            [msgspec.to_builtins(each) | {"runtime": counted_runtime(each.runtime)} for each in brokers]
        )
    for broker in () if wants_json() else brokers:
        if broker.problem:
            show_problem(f"{broker.broker_addr}: {broker.problem}")
        else:
            show(formats.broker_status(counted_runtime(broker.runtime), broker.broker_addr))
    if any(broker.problem for broker in brokers):
        raise click.exceptions.Exit(1)


MAYBE_TARGET = (
    BROKER,
    name_option("-c", "--cluster", help="All masters of this cluster. Without -b and -c, of all clusters."),
)


@admin_command("getBrokerConfig", target_options)
async def get_broker_config(admin: Admin, broker_addr: str | None, cluster: str | None) -> None:
    """Show the settings of brokers."""
    if broker_addr:
        settings = await admin.broker_config(broker_addr)
        tell(settings, [*formats.settings(broker_addr, settings), ""])
        return
    found: dict[str, dict[str, str]] = {}
    for master, slaves in (await admin.cluster_addrs(cluster, slaves=True)).items():
        titles = {master: f"Master: {master}"}
        titles |= {slave: f"My Master: {master}=====Slave: {slave}" for slave in slaves}
        for addr, title in titles.items():
            found[addr] = await admin.broker_config(addr)
            if not wants_json():
                show([*formats.settings(title, found[addr]), ""])
    if wants_json():
        show_json(found)


@admin_command(
    "updateBrokerConfig",
    target_options,
    flag("-a", "--updateAllBroker", "all_brokers", help="With -c: include the slaves (5.x)."),
    opt("-k", "--key", required=True, type=str.strip, metavar="KEY", help="Setting."),
    opt("-v", "--value", required=True, type=str.strip, metavar="TEXT", help="Its value."),
    changes,
)
async def update_broker_config(
    admin: Admin, broker_addr: str | None, cluster: str | None, all_brokers: bool, key: str, value: str
) -> None:
    """Update a setting of brokers.

    A running broker applies the setting immediately or at its next start, and writes it to its settings file.
    Without a settings file the change is lost at the next start. The output reports each of these cases.
    """
    addrs = [broker_addr] if broker_addr else []
    if cluster:
        for master, slaves in (await admin.cluster_addrs(cluster, slaves=all_brokers)).items():
            addrs += [master, *slaves]
    done: list[SettingsChange] = await execute(operations.set_broker(admin, addrs, key, value), show_change)
    tell(done, [])
    if any(change.unknown for change in done):
        raise click.exceptions.Exit(1)


NO_FILE = "no settings file (mqbroker -c FILE): the change is lost at the broker's next start"


def show_change(change: SettingsChange) -> None:
    """Print what a broker reports about a change of its settings, such as settings that take effect later."""
    if change.not_written:
        show_problem(f"{change.broker_addr}: {NO_FILE}")
    for key in change.without_effect:
        show_problem(f"{change.broker_addr}: {key} is accepted but has no effect on this broker")
    for key in change.at_next_start:
        written = "counts" if change.not_written else "is written, and takes effect"
        show_problem(f"{change.broker_addr}: {key} {written} at the next start")
    for key in change.unknown:
        show_problem(f"{change.broker_addr}: {key} is unknown and was ignored")


async def clean(admin: Admin, name: str, broker_addr: str | None, cluster: str | None) -> None:
    """Run a cleanup at one broker, the masters of a cluster or all masters."""
    addrs = [broker_addr] if broker_addr else list(await admin.cluster_addrs(cluster))
    await execute(operations.clean(admin, name, addrs))
    tell({"brokerAddrs": addrs}, ["success"])


@admin_command("cleanExpiredCQ", *MAYBE_TARGET, changes)
async def clean_expired_cq(admin: Admin, broker_addr: str | None, cluster: str | None) -> None:
    """Delete consume-queue files whose messages have expired."""
    await clean(admin, "broker.clean_queues", broker_addr, cluster)


@admin_command("cleanUnusedTopic", *MAYBE_TARGET, changes)
async def clean_unused_topic(admin: Admin, broker_addr: str | None, cluster: str | None) -> None:
    """Delete the queues of topics that are not configured."""
    await clean(admin, "broker.clean_topics", broker_addr, cluster)


@admin_command("deleteExpiredCommitLog", *MAYBE_TARGET, changes)
async def delete_expired_commit_log(admin: Admin, broker_addr: str | None, cluster: str | None) -> None:
    """Delete expired commit-log files now."""
    await clean(admin, "broker.clean_log", broker_addr, cluster)


@admin_command(
    "statsAll",
    flag("-a", "--activeTopic", "active", help="Only topics that are in use."),
    name_option("-t", "--topic", help="Only this topic."),
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
        if not wants_json():
            show(formats.topic_stats(found, title=not shown))
            shown = True
    if wants_json():
        show_json(rows)
    elif not shown:
        show(formats.topic_stats([], title=True))
    raise_if_incomplete(missing)


@admin_command(
    "queryCq",
    TOPIC,
    number("-q", "--queue", "queue_id", required=True, help="Queue id."),
    number("-i", "--index", high=2**63 - 1, required=True, help="First entry."),
    number("-c", "--count", low=1, high=4096, default=10, show_default=True, help="Entries."),
    opt(
        "-b",
        "--broker",
        "broker_addr",
        metavar="HOST:PORT",
        help="Only this broker; default: the topic's first broker.",
    ),
    name_option("-g", "--consumer", "group", help="Show the subscription of this group, too."),
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
    tell(found, formats.consume_queue(found, index))
