"""`mqadmin` commands about consumer groups: consumerProgress, consumerStatus."""

from __future__ import annotations

import click

from cometmq.admin import formats
from cometmq.admin.admin import Admin
from cometmq.admin.shell import admin_command, json_option, show, show_json, switch


@admin_command("consumerProgress")
@click.option(
    "-g", "--groupName", "group", metavar="NAME", help="This group, queue by queue; else all groups."
)
@switch("-s", "--showClientIP", "show_client_ip", help="Show which client holds each queue.")
@json_option
async def consumer_progress(admin: Admin, group: str | None, show_client_ip: bool, as_json: bool) -> None:
    """Query consumers's progress, speed."""
    if group is None:
        groups = await admin.groups()
        show_json(groups) if as_json else show(formats.group_summaries(groups))
        return
    progress = await admin.progress(group.strip(), with_client_ip=show_client_ip)
    if as_json:
        show_json(progress)
    else:
        show(formats.group_progress(progress, show_client_ip=show_client_ip))


@admin_command("consumerStatus")
@click.option("-g", "--consumerGroup", "group", metavar="NAME", required=True, help="This group.")
@json_option
async def consumer_status(admin: Admin, group: str, as_json: bool) -> None:
    """Query what a group's members subscribe, and in what they differ."""
    found = await admin.subscriptions(group.strip())
    show_json(found) if as_json else show(formats.consumer_status(found))
