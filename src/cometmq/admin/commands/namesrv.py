"""`mqadmin` commands for name servers: settings, key-value configuration, write permission of brokers."""

from __future__ import annotations

import click

from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats
from cometmq.admin.commands.shell import (
    admin_command,
    dangerous,
    name_option,
    opt,
    should_execute,
    show_problem,
    tell,
    wants_json,
)
from cometmq.admin.values import PermChange

NAMESPACE = name_option("-s", "--namespace", required=True, help="Namespace.")
KEY = opt("-k", "--key", required=True, type=str.strip, metavar="KEY", help="Key.")
VALUE = opt("-v", "--value", required=True, type=str.strip, metavar="TEXT", help="Value.")
BROKER_NAME = name_option("-b", "--brokerName", required=True, help="Name of the broker.")


@admin_command("updateKvConfig", NAMESPACE, KEY, VALUE)
async def update_kv_config(admin: Admin, namespace: str, key: str, value: str) -> None:
    """Create or update a KV config entry at all name servers."""
    await admin.put_kv_config(namespace, key, value)
    set_to = {"namespace": namespace, "key": key, "value": value}
    tell(set_to, ["create or update kv config to namespace success."])


@admin_command("deleteKvConfig", NAMESPACE, KEY, dangerous)
async def delete_kv_config(admin: Admin, namespace: str, key: str, dry_run: bool) -> None:
    """Delete a KV config entry at all name servers."""
    value = await admin.kv_config(namespace, key)
    if should_execute(dry_run, f"delete key {key} of namespace {namespace}, whose value is {value}"):
        await admin.delete_kv_config(namespace, key)
        deleted = {"namespace": namespace, "key": key, "value": value}
        tell(deleted, ["delete kv config from namespace success."])


@admin_command("wipeWritePerm", BROKER_NAME, dangerous)
async def wipe_write_perm(admin: Admin, broker_name: str, dry_run: bool) -> None:
    """Remove the write permission of a broker's topics.

    Producers leave the broker within 30 seconds, so that it can be stopped. addWritePerm reverts the change.
    """
    if should_execute(dry_run, f"remove the write permission of all topics of {broker_name}"):
        show_perm_changes("wipe", await admin.wipe_write_perm(broker_name))


@admin_command("addWritePerm", BROKER_NAME)
async def add_write_perm(admin: Admin, broker_name: str) -> None:
    """Restore the write permission of a broker's topics."""
    show_perm_changes("add", await admin.add_write_perm(broker_name))


def show_perm_changes(verb: str, changes: list[PermChange]) -> None:
    """Print a line for each name server. Exit with code 1 if one of them refused."""
    tell(changes, formats.perm_changes(verb, changes))
    problems = [each for each in changes if each.problem]
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


@admin_command("updateNamesrvConfig", KEY, VALUE)
async def update_namesrv_config(admin: Admin, key: str, value: str) -> None:
    """Update a setting of name servers."""
    addrs = await admin.update_namesrv_config({key: value})
    lines = [f"update name server config success![{', '.join(addrs)}]", f"{key} : {value}"]
    tell({"namesrvs": addrs, "key": key, "value": value}, lines)
