"""`mqadmin` commands that set consumer offsets: to a time, to the end, or to the offsets of another group."""

from __future__ import annotations

from collections.abc import Iterable

import click

from cometmq.admin.admin import Admin
from cometmq.admin.commands import formats
from cometmq.admin.commands.shell import (
    CLUSTER,
    TOPIC,
    admin_command,
    announce,
    changes,
    flag,
    name_option,
    number,
    opt,
    show_problem,
    tell,
    time_ms,
    wants_json,
)
from cometmq.admin.errors import UnknownNameError
from cometmq.admin.offsets import END, Reset
from cometmq.admin.values import OffsetWay, QueueReset

GROUP = name_option("-g", "--group", required=True, help="Consumer group.")
FORCE = opt(
    "-f",
    "--force",
    type=bool,
    is_flag=False,
    flag_value=True,
    metavar="[BOOL]",
    help="false: move offsets only backwards. true: also create the offsets of an unknown group.",
)


@admin_command(
    "resetOffsetByTime",
    GROUP,
    TOPIC,
    opt(
        "-s",
        "--timestamp",
        "moment",
        required=True,
        type=str.strip,
        metavar="TIME",
        help="Time to reset to: now or -1 (the end), ms since 1970, or yyyy-MM-dd#HH:mm:ss:SSS.",
    ),
    FORCE,
    flag("-c", "--cplus", help="Notify clients in the C++ format. Only Apache's brokers use this flag."),
    opt("-b", "--broker", "broker_addr", metavar="HOST:PORT", help="Only at this master."),
    number("-q", "--queue", "queue_id", metavar="ID", help="Only this queue; needs -b."),
    number("-o", "--offset", metavar="OFFSET", help="Set this offset instead of a time; needs -b and -q."),
    name_option("--cluster", help="Only the masters of this cluster."),
    changes,
)
async def reset_offset_by_time(
    admin: Admin,
    group: str,
    topic: str,
    moment: str,
    force: bool | None,
    cplus: bool,
    broker_addr: str | None,
    queue_id: int | None,
    offset: int | None,
    cluster: str | None,
) -> None:
    """Reset a group's consumer offsets to a time.

    The group consumes messages again if an offset moves backwards, and skips messages if it moves forwards.
    """
    if queue_id is not None and broker_addr is None:
        raise click.UsageError("-q/--queue needs -b/--broker")
    if offset is not None and queue_id is None:
        raise click.UsageError("-o/--offset needs -q/--queue")
    at_ms = END if moment in ("now", str(END)) else time_ms(moment)
    wanted = Reset(
        group=group,
        topic=topic,
        at_ms=at_ms,
        force=force is not False,
        new_group=force is True,
        broker_addr=broker_addr,
        queue_id=queue_id,
        offset=offset,
        in_cpp_form=cplus,
        cluster=cluster,
    )
    forced = str(wanted.force).lower()
    title = (
        f"rollback consumer offset by specified group[{group}], topic[{topic}], force[{forced}], "
        f"timestamp(string)[{moment}], timestamp(long)[{at_ms}]"
    )
    await reset(admin, wanted, [title])


@admin_command("skipAccumulatedMessage", GROUP, TOPIC, FORCE, CLUSTER, changes)
async def skip_accumulated_message(
    admin: Admin, group: str, topic: str, force: bool | None, cluster: str | None
) -> None:
    """Skip all messages that a group has not consumed yet.

    The group never receives the skipped messages.
    """
    wanted = Reset(
        group=group, topic=topic, force=force is not False, new_group=force is True, cluster=cluster
    )
    await reset(admin, wanted, [])


async def reset(admin: Admin, wanted: Reset, title: Iterable[str]) -> None:
    """Print the planned reset, execute it, and print the offsets observed afterwards."""
    try:
        planned = await admin.plan_reset(wanted)
    except UnknownNameError as error:
        if error.kind == "consumer group" and not wants_json():
            show_problem("--force creates the offsets of an unknown group.")
        raise
    announce(*(describe_reset(wanted, each) for each in planned), danger=True)
    done = await admin.reset_offset(wanted)
    tell(done, [*title, *formats.resets(done)])
    problems = [each for each in done if each.problem]
    for each in problems:
        show_problem(f"{each.broker_name} queue {each.queue_id}: {each.problem}")
    if problems:
        raise click.exceptions.Exit(1)


def describe_reset(wanted: Reset, each: QueueReset) -> str:
    """Describe the reset of one queue in a line."""
    place = f"{wanted.group} in {wanted.topic} at {each.broker_name} queue {each.queue_id}"
    if not each.changes:
        return f"leave {place} at {each.consumer_offset}"
    before = {-1: "no offset", 0: "0 (or no offset)"}.get(each.consumer_offset, str(each.consumer_offset))
    how = "through its members" if each.way is OffsetWay.MEMBERS else "in the broker"
    return f"set {place} from {before} to {each.rollback_offset}, {how}"


@admin_command(
    "cloneGroupOffset",
    name_option("-s", "--srcGroup", "source", required=True, help="Group whose offsets are copied."),
    name_option("-d", "--destGroup", "target", required=True, help="Group whose offsets are set."),
    TOPIC,
    opt(
        "-o",
        "--offline",
        metavar="BOOL",
        expose_value=False,
        help="Accepted for compatibility; has no effect.",
    ),
    flag("--force", help="Create the offsets of an unknown group (CometMQ only)."),
    changes,
)
async def clone_group_offset(admin: Admin, source: str, target: str, topic: str, force: bool) -> None:
    """Copy another group's consumer offsets in a topic.

    Stop the members of the target group first: running members overwrite the copied offsets.
    """
    rows = await admin.clone_offsets(source, target, topic, execute=False, new_group=force)
    deeds = (
        f"set {target} at {row.broker_name} queue {row.queue_id} to {row.consumer_offset}" for row in rows
    )
    announce(*deeds)
    rows = await admin.clone_offsets(source, target, topic, new_group=force)
    line = f"clone group offset success. srcGroup[{source}], destGroup=[{target}], topic[{topic}]"
    tell(rows, [line])
