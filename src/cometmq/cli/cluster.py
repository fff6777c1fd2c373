"""`cometmq cluster`: a cluster in one of RocketMQ's modes on this machine, for experiments with failover."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cometmq.cli.lazy import CometGroup
from cometmq.cli.local_cluster import LocalCluster, LocalClusterError, Member, modes
from cometmq.cli.options import HELP
from cometmq.text import counted, printable, printable_json

if TYPE_CHECKING:
    from cometmq.admin.values import BrokerStatus

DEFAULT_DATA = Path("~/.cometmq/clusters")
MASTER_ID = 0
PORT = click.IntRange(0, 65535)


@click.group(cls=CometGroup, context_settings=HELP)
def cluster() -> None:
    """Run a cluster of several processes on this machine, and stop and restart its servers.

    MODE is one of: 1m-noslave, 2m-noslave, 3m-noslave, 4m-noslave (only masters), 2m-2s-async, 2m-2s-sync
    (two masters with a slave each), raft-3 (one broker with three members that elect a leader).
    """


def _of_mode(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option(
        "--data",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULT_DATA,
        help="Directory of the clusters, with a subdirectory for each mode.",
    )(command)
    return click.argument("mode", type=click.Choice(modes()))(command)


@cluster.command()
@_of_mode
@click.option("--namesrv-port", type=PORT, default=9876, help="Port of the name server; 0 is any free port.")
@click.option(
    "--broker-port",
    type=PORT,
    default=10911,
    help="Port of the first broker; the next brokers have ports 10, 20, … higher. 0 is any free port. "
    "An existing cluster keeps its ports.",
)
def up(mode: str, data: Path, namesrv_port: int, broker_port: int) -> None:
    """Start the cluster, or those of its servers that do not run."""
    found = _open(mode, data)
    started = found.up(namesrv_port, broker_port)
    _print(found.state.members)
    click.echo(f"{counted(len(started), 'server')} started. Name server: -n {found.namesrv_addr}", err=True)


@cluster.command()
@_of_mode
@click.option("--json", "as_json", is_flag=True, help="Print each server as a line of JSON.")
def status(mode: str, data: Path, as_json: bool) -> None:
    """Show each server with its process, its role, the end of its log, and the lag of slaves in bytes."""
    found = _open(mode, data)
    _print(found.state.members, asyncio.run(_brokers(found)), as_json)


@cluster.command()
@_of_mode
@click.argument("member", required=False)
def kill(mode: str, data: Path, member: str | None) -> None:
    """Kill MEMBER as `kill -9` does. Default: the first running master; in mode raft-3, the leader."""
    found = _open(mode, data)
    killed = found.kill(member or _first_master(found))
    click.echo(f"killed {killed.name} (process {killed.pid}). `cometmq cluster heal {mode}` starts it again")


@cluster.command()
@_of_mode
def heal(mode: str, data: Path) -> None:
    """Start the servers that do not run."""
    healed = _open(mode, data).heal()
    _print(healed)
    click.echo(f"{counted(len(healed), 'server')} started", err=True)


@cluster.command()
@_of_mode
def down(mode: str, data: Path) -> None:
    """Stop all servers. Their stores remain."""
    stopped = _open(mode, data).down()
    click.echo(f"{counted(len(stopped), 'server')} stopped", err=True)


def _open(mode: str, data: Path) -> LocalCluster:
    return LocalCluster(mode, data.expanduser().absolute() / mode)


async def _brokers(found: LocalCluster) -> dict[str, BrokerStatus]:
    """Return the state of each broker by address; {} if no name server answers."""
    from cometmq.admin import Admin
    from cometmq.errors import CometError

    if not found.state.members:
        return {}
    try:
        async with Admin(found.namesrv_addr) as admin:
            return {status.broker_addr: status for status in await admin.brokers()}
    except CometError:
        return {}


def _first_master(found: LocalCluster) -> str:
    brokers = asyncio.run(_brokers(found))
    for member in found.state.members:
        status = brokers.get(member.addr)
        if status is not None and status.broker_id == MASTER_ID and member.alive:
            return member.name
    raise LocalClusterError("no master is running; name the member to kill")


def _print(
    members: list[Member], brokers: dict[str, BrokerStatus] | None = None, as_json: bool = False
) -> None:
    import msgspec

    brokers = brokers or {}
    for member in members:
        facts: dict[str, object] = {
            "member": member.name, "addr": member.addr, "pid": member.pid if member.alive else None,
        }  # fmt: skip
        status = brokers.get(member.addr) if member.alive else None
        if status is not None and status.runtime:
            end = status.count("commitLogMaxOffset")
            facts |= {"broker": status.broker_name, "brokerId": status.broker_id, "logEnd": end}
            if status.lag is not None:
                facts["behind"] = status.lag
        if as_json:
            click.echo(printable_json(msgspec.json.encode(facts)))
        else:
            click.echo(_line(facts))


def _line(facts: dict[str, object]) -> str:
    state = f"pid {facts['pid']}" if facts["pid"] else "does not run"
    line = f"{facts['member']:<12}  {facts['addr']:<21}  {state:<14}"
    if "brokerId" in facts:
        role = "master" if facts["brokerId"] == MASTER_ID else f"slave, id {facts['brokerId']}"
        line += f"  {facts['broker']} ({role})  log to {facts['logEnd']}"
    if "behind" in facts:
        line += f", lag {facts['behind']} bytes"
    return printable(line.rstrip(), None)
