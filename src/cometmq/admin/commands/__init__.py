"""The `mqadmin` group with all its commands, in the order of their listing."""

from __future__ import annotations

from importlib.metadata import version

import click

from cometmq.admin.commands import (
    access,
    brokers,
    consumers,
    export,
    measuring,
    messages,
    namesrv,
    offsets,
    reading,
    replication,
    topics,
)
from cometmq.admin.commands.shell import SETTINGS, MqAdmin


@click.group(cls=MqAdmin, context_settings=SETTINGS, invoke_without_command=True)
@click.version_option(version("cometmq"), "-V", "--version", prog_name="mqadmin")
@click.pass_context
def mqadmin(ctx: click.Context) -> None:
    """RocketMQ's administration commands."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@mqadmin.command("help", context_settings=SETTINGS)
@click.argument("command", required=False)
@click.pass_context
def help_command(ctx: click.Context, command: str | None) -> None:
    """Show the options of a command."""
    assert ctx.parent is not None
    group = ctx.parent.command
    assert isinstance(group, MqAdmin)
    if command is None:
        click.echo(group.listing())
        return
    found = group.get_command(ctx.parent, command)
    if found is None:
        raise click.ClickException(f"The sub command {command} not exist.{group.nearest(command)}")
    with click.Context(found, info_name=f"mqadmin {found.name}", **found.context_settings) as shown:
        click.echo(found.get_help(shown))


MODULES = (
    *(topics, brokers, namesrv, consumers, offsets, messages, reading, measuring, export, access),
    replication,
)
for module in MODULES:
    for value in vars(module).values():
        if isinstance(value, click.Command):
            mqadmin.add_command(value)
