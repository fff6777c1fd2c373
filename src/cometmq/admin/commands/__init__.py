"""The program `mqadmin`: all its commands, and the headings under which the help lists them."""

from __future__ import annotations

import click

from cometmq import __version__
from cometmq.admin.commands import access, brokers, consumers, lite, measuring, messages, topics
from cometmq.admin.commands.shell import SETTINGS, MqAdmin
from cometmq.command_options import color_option


@click.group(cls=MqAdmin, context_settings=SETTINGS, invoke_without_command=True)
@click.version_option(__version__, "-V", "--version", prog_name="mqadmin")
@color_option
@click.pass_context
def mqadmin(ctx: click.Context) -> None:
    """Manage topics, groups, messages and brokers with RocketMQ's commands."""
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
        click.echo(group.listing(ctx.parent))
        return
    found = group.get_command(ctx.parent, command)
    if found is None:
        raise click.ClickException(f"The sub command {command} not exist.{group.nearest(command)}")
    with click.Context(found, info_name=f"mqadmin {found.name}", **found.context_settings) as shown:
        click.echo(found.get_help(shown))


SECTIONS = {
    "Topics": (topics,),
    "Groups": (consumers,),
    "Lite topics": (lite,),
    "Messages": (messages, measuring),
    "Brokers and name servers": (brokers,),
    "Access": (access,),
}
for heading, modules in SECTIONS.items():
    found = [value for module in modules for value in vars(module).values()]
    mqadmin.add_section(heading, [value for value in found if isinstance(value, click.Command)])
