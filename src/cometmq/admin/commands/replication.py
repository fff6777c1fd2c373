"""`mqadmin` commands for replication: `haStatus`, `resetMasterFlushOffset`, `addBroker`, `removeBroker`."""

from __future__ import annotations

import asyncio

import click

from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats
from cometmq.admin.commands.shell import (
    admin_command,
    announce,
    changes,
    number,
    opt,
    show,
    show_json,
    target_options,
    tell,
    wants_json,
)

container_option = opt(
    "-c",
    "--brokerContainerAddr",
    "container",
    required=True,
    metavar="HOST:PORT",
    help="Address of a broker container of RocketMQ 5.x.",
)


@admin_command("haStatus")
@target_options
@number("-i", "--interval", low=1, metavar="SECONDS", help="Repeat at this interval, in seconds.")
async def ha_status(admin: Admin, broker_addr: str | None, cluster: str | None, interval: int | None) -> None:
    """Show the replication status of brokers."""
    while True:
        addrs = await admin.target_addrs(broker_addr, cluster)
        found = {addr: await admin.ha_status(addr) for addr in addrs}
        if wants_json():
            show_json(found)
        else:
            for addr, status in found.items():
                show(formats.ha_status(addr, status))
        if interval is None:
            return
        await asyncio.sleep(interval)


@admin_command("resetMasterFlushOffset")
@opt("-b", "--brokerAddr", required=True, metavar="HOST:PORT", help="This slave.")
@number("-o", "--offset", high=2**63 - 1, required=True, help="Flushed offset of the master's log, in bytes.")
@changes
async def reset_master_flush_offset(admin: Admin, broker_addr: str, offset: int) -> None:
    """Set the master's flush offset at a slave (5.x)."""
    announce(f"set the master's flush offset to {offset} at {broker_addr}")
    await admin.reset_master_flush_offset(broker_addr.strip(), offset)
    facts = {"brokerAddr": broker_addr, "masterFlushOffset": offset}
    tell(facts, [f"reset master flush offset to {offset} success"])


@admin_command("addBroker")
@container_option
@opt(
    "-b",
    "--brokerConfigPath",
    "path",
    required=True,
    metavar="FILE",
    help="Settings file of the broker, on the container's machine.",
)
@changes
async def add_broker(admin: Admin, container: str, path: str) -> None:
    """Add a broker to a broker container of RocketMQ 5.x."""
    announce(f"start the broker of {path} at {container}")
    await admin.add_broker(container.strip(), path.strip())
    tell({"container": container, "path": path}, [f"add broker to {container.strip()} success"])


@admin_command("removeBroker")
@container_option
@opt(
    "-b",
    "--brokerIdentity",
    "identity",
    required=True,
    metavar="CLUSTER:BROKER:ID",
    help="The broker. For a DLedger member, ID is the number in the member's name.",
)
@changes
async def remove_broker(admin: Admin, container: str, identity: str) -> None:
    """Remove a broker from a broker container of RocketMQ 5.x."""
    words = [word.strip() for word in identity.split(":")]
    if len(words) != 3 or not all(words) or not (words[2].isascii() and words[2].isdigit()):
        raise click.BadParameter(f"{identity!r} is not CLUSTER:BROKER:ID", param_hint="-b/--brokerIdentity")
    announce(f"stop the broker {identity} at {container}")
    await admin.remove_broker(container.strip(), words[0], words[1], int(words[2]))
    tell({"container": container, "broker": identity}, [f"remove broker from {container.strip()} success"])
