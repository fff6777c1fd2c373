"""`mqadmin` commands for name servers: settings, key-value configuration, write permission of brokers."""

from __future__ import annotations

import click

from cometmq.admin import operations
from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats
from cometmq.admin.commands.shell import (
    admin_command,
    announce,
    changes,
    execute,
    name_option,
    opt,
    show_problem,
    tell,
    wants_json,
)
from cometmq.admin.values import PermChange

NAMESPACE = name_option("-s", "--namespace", required=True, help="Namespace.")
KEY = opt("-k", "--key", required=True, type=str.strip, metavar="KEY", help="Key.")
VALUE = opt("-v", "--value", required=True, type=str.strip, metavar="TEXT", help="Value.")
BROKER_NAME = name_option("-b", "--brokerName", required=True, help="Name of the broker.")


@admin_command("updateKvConfig", NAMESPACE, KEY, VALUE, changes)
async def update_kv_config(admin: Admin, namespace: str, key: str, value: str) -> None:
    """Create or update a KV config entry at all name servers."""
    announce(f"set key {key} of namespace {namespace} to {value}")
    await admin.put_kv_config(namespace, key, value)
    set_to = {"namespace": namespace, "key": key, "value": value}
    tell(set_to, ["create or update kv config to namespace success."])


@admin_command("deleteKvConfig", NAMESPACE, KEY, changes)
async def delete_kv_config(admin: Admin, namespace: str, key: str) -> None:
    """Delete a KV config entry at all name servers."""
    value = await admin.kv_config(namespace, key)
    announce(f"delete key {key} of namespace {namespace}, whose value is {value}", danger=True)
    await admin.delete_kv_config(namespace, key)
    deleted = {"namespace": namespace, "key": key, "value": value}
    tell(deleted, ["delete kv config from namespace success."])


@admin_command("wipeWritePerm", BROKER_NAME, changes)
async def wipe_write_perm(admin: Admin, broker_name: str) -> None:
    """Remove the write permission of a broker's topics.

    Producers leave the broker within 30 seconds, so that it can be stopped. addWritePerm reverts the change.
    """
    await change_write_perm(admin, broker_name, "wipe")


@admin_command("addWritePerm", BROKER_NAME, changes)
async def add_write_perm(admin: Admin, broker_name: str) -> None:
    """Restore the write permission of a broker's topics."""
    await change_write_perm(admin, broker_name, "add")


async def change_write_perm(admin: Admin, broker_name: str, verb: str) -> None:
    """Print a line for each name server. Exit with code 1 if one of them refused."""
    operation = await operations.change_write_perm(admin, broker_name, allow=verb == "add")
    done: list[PermChange] = await execute(operation)
    tell(done, formats.perm_changes(verb, done))
    problems = [each for each in done if each.problem]
    for each in () if wants_json() else problems:
        show_problem(f"{each.namesrv}: {each.problem}")
    if problems:
        raise click.exceptions.Exit(1)


@admin_command("getNamesrvConfig")
async def get_namesrv_config(admin: Admin) -> None:
    """Show the settings of name servers."""
    found = await admin.namesrv_configs()
    lines = (line for addr, settings in found.items() for line in formats.settings(addr, settings))
    tell(found, lines)


@admin_command("updateNamesrvConfig", KEY, VALUE, changes)
async def update_namesrv_config(admin: Admin, key: str, value: str) -> None:
    """Update a setting of name servers."""
    announce(f"set {key} to {value} at {', '.join(admin.client.namesrv.addrs)}")
    addrs = await admin.update_namesrv_config({key: value})
    lines = [f"update name server config success![{', '.join(addrs)}]", f"{key} : {value}"]
    tell({"namesrvs": addrs, "key": key, "value": value}, lines)
