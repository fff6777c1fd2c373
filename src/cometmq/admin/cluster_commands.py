"""`mqadmin` commands about brokers: clusterList, brokerStatus."""

from __future__ import annotations

import asyncio
import time

import click

from cometmq.admin import formats
from cometmq.admin.admin import Admin
from cometmq.admin.shell import (
    SETTINGS,
    json_option,
    namesrv_option,
    show,
    show_json,
    show_problem,
    target_options,
    with_admin,
)


@click.command("clusterList", context_settings=SETTINGS)
@namesrv_option
@click.option("-m", "--moreStats", "more_stats", is_flag=True, help="Print more stats.")
@click.option(
    "-i", "--interval", type=click.IntRange(min=1), metavar="SECONDS", help="Again every so many seconds."
)
@json_option
def cluster_list(namesrv: str, more_stats: bool, interval: int | None, as_json: bool) -> None:
    """List all of clusters."""

    async def work(admin: Admin) -> None:
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

    with_admin(namesrv, work)


@click.command("brokerStatus", context_settings=SETTINGS)
@namesrv_option
@target_options(required=True)
@json_option
def broker_status(namesrv: str, broker_addr: str | None, cluster: str | None, as_json: bool) -> None:
    """Fetch broker runtime status data."""

    async def work(admin: Admin) -> None:
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

    with_admin(namesrv, work)
