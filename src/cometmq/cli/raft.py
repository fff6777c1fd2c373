"""`cometmq raft`: the state of a raft group, and changes of its leader and members."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cometmq.admin import operations
from cometmq.admin.commands.shell import changes, execute
from cometmq.cli.lazy import CometGroup
from cometmq.cli.options import HELP, namesrv_option, with_admin
from cometmq.text import printable, printable_json

if TYPE_CHECKING:
    from cometmq.admin import Admin
    from cometmq.protocol.bodies.admin import RaftStatus

ACTIONS = {
    "transfer": ("transfer", "Make MEMBER the leader, once its log is complete."),
    "add": (
        "addLearner",
        "Replicate the log to MEMBER, without a vote. MEMBER must run with dLegerJoin=true.",
    ),
    "promote": ("promote", "Give MEMBER a vote, once it has caught up."),
    "remove": ("remove", "Remove MEMBER from the group."),
}
broker_option = click.option(
    "-b", "--broker", metavar="NAME", help="The group's brokerName, if the cluster has several brokers."
)


@click.group(cls=CometGroup, context_settings=HELP)
def raft() -> None:
    """Show a raft group (enableDLegerCommitLog), change its leader and its members.

    See docs/replication.md.
    """


@raft.command()
@namesrv_option
@broker_option
@click.option("--json", "as_json", is_flag=True, help="Print each member's report as a line of JSON.")
def status(namesrv: str, broker: str | None, as_json: bool) -> None:
    """Show the state of the raft group that each of its members reports."""
    import msgspec

    for addr, found in with_admin(namesrv, lambda admin: admin.raft_group(broker)).items():
        if as_json:
            known = {"problem": found} if isinstance(found, str) else msgspec.to_builtins(found)
            click.echo(printable_json(msgspec.json.encode({"addr": addr, **known})))
        else:
            click.echo(printable(_line(addr, found), None))


def _line(addr: str, found: RaftStatus | str) -> str:
    if isinstance(found, str):
        return f"{addr:<21}  {found}"
    behind = {each.member: found.last - each.match for each in found.members if each.match >= 0}
    members = ", ".join(
        each.member
        + ("" if each.voter else " (learner)")
        + (f" {behind[each.member]} behind" if behind.get(each.member) else "")
        for each in found.members
    )
    entries = f"entries {found.first} to {found.last}, committed to {found.committed}"
    return f"{addr:<21}  {found.member}: {found.role}, term {found.term}, {entries}; members {members}"


def _change(name: str, action: str, text: str) -> None:
    @raft.command(name, help=text)
    @namesrv_option
    @broker_option
    @changes
    @click.argument("member")
    def change(namesrv: str, broker: str | None, member: str) -> None:
        async def run(admin: Admin) -> None:
            await execute(await operations.change_raft_group(admin, action, member, broker))

        with_admin(namesrv, run)
        click.echo(f"{name} {printable(member)}: started; `cometmq raft status` shows the progress")


for _name, (_action, _text) in ACTIONS.items():
    _change(_name, _action, _text)
