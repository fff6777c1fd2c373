"""The `mqadmin` group with all its commands, in the order of their listing."""

from __future__ import annotations

from importlib.metadata import version

import click

from cometmq.admin.cluster_commands import broker_status, cluster_list
from cometmq.admin.consumer_commands import consumer_progress
from cometmq.admin.message_commands import (
    consume_message,
    query_msg_by_id,
    query_msg_by_key,
    query_msg_by_unique_key,
    send_message,
)
from cometmq.admin.shell import SETTINGS, MqAdmin
from cometmq.admin.topic_commands import (
    delete_topic,
    purge_topic,
    topic_list,
    topic_route,
    topic_status,
    update_topic,
)


@click.group(cls=MqAdmin, context_settings=SETTINGS, invoke_without_command=True)
@click.version_option(version("cometmq"), "-V", "--version", prog_name="mqadmin")
@click.pass_context
def mqadmin(ctx: click.Context) -> None:
    """RocketMQ's administration commands."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command("help", context_settings=SETTINGS)
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


mqadmin.add_command(help_command)
for command in (
    update_topic,
    delete_topic,
    purge_topic,
    topic_list,
    topic_route,
    topic_status,
    cluster_list,
    broker_status,
    consumer_progress,
    query_msg_by_id,
    query_msg_by_key,
    query_msg_by_unique_key,
    send_message,
    consume_message,
):
    mqadmin.add(command)
