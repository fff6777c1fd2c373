"""`cometmq doctor`: problems of a cluster, with remedies."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cometmq.cli.options import HELP, json_line, namesrv_option
from cometmq.command_options import opt, say
from cometmq.text import printable

if TYPE_CHECKING:
    from cometmq.admin.doctor import Finding

MIN_FREE_RATIO = 0.10
"""Minimum free share of a disk. A broker refuses messages if less is free (diskSpaceWarningLevelRatio)."""


@click.command(context_settings=HELP)
@namesrv_option
@opt("-t --topic", help="Also examine this topic.")
@opt("-g --group", help="Also examine the members of this group.")
@opt(
    "-c --config conf",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Examine only the settings file of a broker that does not start on this machine.",
)
@opt("--json as_json", is_flag=True, help="Print each finding as a line of JSON.")
def doctor(namesrv: str, topic: str | None, group: str | None, conf: Path | None, as_json: bool) -> None:
    """Explain why a cluster does not work, seen from this machine.

    Exit code 1 if there is a serious problem.
    """
    from cometmq.admin import doctor as examination

    if conf is not None:
        findings = asyncio.run(examine_settings(conf))
    else:
        addrs = [addr.strip() for addr in re.split("[;,]", namesrv) if addr.strip()]
        findings = asyncio.run(examination.examine(addrs, topic=topic, group=group))
    for each in findings:
        if as_json:
            click.echo(json_line(each))
            continue
        mark = click.style("wrong", fg="red") if each.serious else click.style("odd", fg="yellow")
        say(f"{mark}  {printable(each.where)}: {printable(each.problem, None)}")
        click.echo(f"       {each.cure}")
    if not findings and not as_json:
        click.echo("No problems found from this machine.")
    if any(each.serious for each in findings):
        raise click.exceptions.Exit(1)


async def examine_settings(path: Path) -> list[Finding]:
    """Return the problems that prevent a broker with this settings file from starting on this machine."""
    from cometmq.admin.doctor import Finding
    from cometmq.broker.access.security import security_of
    from cometmq.broker.base import advertised
    from cometmq.broker.base.address import ports_of
    from cometmq.broker_process import read_config
    from cometmq.errors import CometError, ConfigError
    from cometmq.remoting import check_port, resolve
    from cometmq.store import Disk, check_locations

    findings: list[Finding] = []

    def wrong(where: str, problem: str, cure: str, *, serious: bool = True) -> None:
        findings.append(Finding(serious=serious, where=where, problem=problem, cure=cure))

    try:
        config = read_config(str(path))
        config.check()
        check_locations(Disk(), config.store)
    except (CometError, OSError) as error:
        wrong(str(path), str(error), "set an expected value; docs/settings.md lists all settings")
        return findings
    try:
        await security_of(config)
    except ConfigError as error:
        wrong(error.key, str(error), "docs/security.md: accounts, TLS")
    try:
        ip = await resolve("brokerIP1", config.broker_ip1)
        advertised.check_usable(config.broker_ip1, ip)
    except CometError as error:
        wrong("brokerIP1", str(error), "an address of this machine that clients can connect to")
    else:
        if not advertised.is_own(ip):
            wrong(
                "brokerIP1",
                f"{config.broker_ip1} is not an address of this machine",
                "correct only if the port is forwarded to this machine, as for a container",
                serious=False,
            )
    for key, interface, port in ports_of(config):
        try:
            check_port(key, interface, port)
        except ConfigError as error:
            cure = "another process uses the port, perhaps this broker; ports below 1024 need privileges"
            wrong(key, str(error), cure)
    for key, directories in config.store.directories.items():
        for directory in directories:
            _look_at(key, Path(directory), wrong)
    if not config.namesrv_addr and not config.fetch_namesrv_addr_by_address_server:
        wrong(
            "namesrvAddr", "not set, so clients will not find this broker",
            "namesrvAddr=HOST:9876 in the file, mqbroker -n, or NAMESRV_ADDR", serious=False,
        )  # fmt: skip
    return findings


def _look_at(key: str, directory: Path, wrong: Callable[[str, str, str], None]) -> None:
    """Report a store directory that cannot be created or written, or whose disk is nearly full."""
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        wrong(key, f"{there} is not a directory", "another path, or move the file away")
    elif not os.access(there, os.W_OK | os.X_OK):
        wrong(key, f"{there} is not writable for this user", "change its owner to the broker's user")
    else:
        usage = shutil.disk_usage(there)
        if usage.free < MIN_FREE_RATIO * usage.total:
            wrong(
                key,
                f"the disk of {there} is {1 - usage.free / usage.total:.0%} full",
                "messages are refused from 90 % on (diskSpaceWarningLevelRatio): free space, or add a disk",
            )
