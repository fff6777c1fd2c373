"""`mqadmin` commands about brokers: clusterList, brokerStatus."""

from __future__ import annotations

import asyncio
import time

import click

from cometmq.admin import formats
from cometmq.admin.admin import Admin
from cometmq.admin.shell import admin_command, json_option, show, show_json, show_problem, target_options


@admin_command("clusterList")
@click.option("-m", "--moreStats", "more_stats", is_flag=True, help="Print more stats.")
@click.option(
    "-i", "--interval", type=click.IntRange(min=1), metavar="SECONDS", help="Again every so many seconds."
)
@json_option
async def cluster_list(admin: Admin, more_stats: bool, interval: int | None, as_json: bool) -> None:
    """List all of clusters."""
    while True:
        brokers = await admin.brokers()
        if as_json:
            show_json(brokers)
        elif more_stats:
            show(formats.cluster_totals(brokers))
        else:
            show(formats.cluster_list(brokers, int(time.time() * 1000)))
        for broker in brokers:
            if broker.problem and not as_json:  # JSON has it as a field
                show_problem(f"{broker.broker_addr}: {broker.problem}")
        if interval is None:
            if any(broker.problem for broker in brokers):
                raise click.exceptions.Exit(1)
            return
        await asyncio.sleep(interval)


@admin_command("brokerStatus")
@target_options
@json_option
async def broker_status(admin: Admin, broker_addr: str | None, cluster: str | None, as_json: bool) -> None:
    """Fetch broker runtime status data."""
    if broker_addr:
        runtime = await admin.runtime(broker_addr)
        show_json(runtime) if as_json else show(formats.broker_status(runtime))
        return
    brokers = await admin.brokers(cluster)
    if as_json:
        show_json(brokers)
    for broker in () if as_json else brokers:
        if broker.problem:
            show_problem(f"{broker.broker_addr}: {broker.problem}")
        else:
            show(formats.broker_status(broker.runtime, broker.broker_addr))
    if any(broker.problem for broker in brokers):
        raise click.exceptions.Exit(1)
