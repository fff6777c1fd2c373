"""`mqadmin` commands about consumer groups: consumerProgress."""

from __future__ import annotations

import click

from cometmq.admin import formats
from cometmq.admin.admin import Admin
from cometmq.admin.shell import SETTINGS, json_option, namesrv_option, show, show_json, with_admin


@click.command("consumerProgress", context_settings=SETTINGS)
@namesrv_option
@click.option(
    "-g", "--groupName", "group", metavar="NAME", help="This group, queue by queue; else all groups."
)
@click.option(
    "-s",
    "--showClientIP",
    "show_client_ip",
    type=bool,
    default=False,
    metavar="BOOL",
    help="Show which client holds each queue.",
)
@json_option
def consumer_progress(namesrv: str, group: str | None, show_client_ip: bool, as_json: bool) -> None:
    """Query consumers's progress, speed."""

    async def work(admin: Admin) -> None:
        if group is None:
            groups = await admin.groups()
            show_json(groups) if as_json else show(formats.group_summaries(groups))
            return
        progress = await admin.progress(group.strip(), with_client_ip=show_client_ip)
        if as_json:
            show_json(progress)
        else:
            show(formats.group_progress(progress, show_client_ip=show_client_ip))

    with_admin(namesrv, work)
