"""`cometmq raft`, `cometmq timers` and `cometmq dlq`: changes of a cluster that mqadmin does not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import click
import msgspec

from cometmq.admin import operations
from cometmq.admin.admin import Admin
from cometmq.admin.commands import shell
from cometmq.admin.dead_letters import Resend, Resending, ResendResult, Selection, view
from cometmq.admin.errors import IndexSilent, ResendStopped
from cometmq.admin.values import DeadLetterCount, DeadLetterView, MessageView, WaitingView
from cometmq.cli.app import CometGroup
from cometmq.cli.options import (
    COUNT,
    HELP,
    check_utf8,
    facts_line,
    json_line,
    moment,
    namesrv_option,
    with_admin,
)
from cometmq.command_options import FiniteRange, nonempty_name, opt, stacked, watch_option
from cometmq.message import WaitingMessage
from cometmq.protocol.bodies.admin import RaftStatus
from cometmq.text import counted, local_time, printable

ACTIONS = {
    "transfer": ("transfer", "Make MEMBER the leader, once its log is complete."),
    "add": (
        "addLearner",
        "Replicate the log to MEMBER, without a vote. MEMBER must run with dLegerJoin=true.",
    ),
    "promote": ("promote", "Give MEMBER a vote, once it has caught up."),
    "remove": ("remove", "Remove MEMBER from the group."),
}
broker_option = opt(
    "-b --broker", metavar="NAME", help="The group's brokerName, if the cluster has several brokers."
)


@click.group(cls=CometGroup, context_settings=HELP)
def raft() -> None:
    """Show a raft group (enableDLegerCommitLog), change its leader and its members.

    See docs/replication.md.
    """


@raft.command()
@namesrv_option
@broker_option
@watch_option
@opt("--json as_json", is_flag=True, help="Print each member's report as a line of JSON.")
@with_admin
async def status(admin: Admin, broker: str | None, as_json: bool) -> None:
    """Show the state of the raft group that each of its members reports."""
    for addr, found in (await admin.raft_group(broker)).items():
        if as_json:
            known = {"problem": found} if isinstance(found, str) else msgspec.to_builtins(found)
            click.echo(json_line({"addr": addr, **known}))
        else:
            click.echo(printable(_member_line(addr, found), None))


def _member_line(addr: str, found: RaftStatus | str) -> str:
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
    @shell.changes
    @click.argument("member")
    @with_admin
    async def change(admin: Admin, broker: str | None, member: str) -> None:
        await shell.execute(await operations.change_raft_group(admin, action, member, broker))
        click.echo(f"{name} {printable(member)}: started; `cometmq raft status` shows the progress")


for _name, (_action, _text) in ACTIONS.items():
    _change(_name, _action, _text)


MAX_BODY_CHARS = 200  # maximum characters of a body in a list


@click.group(cls=CometGroup, context_settings=HELP)
def timers() -> None:
    """List delayed and scheduled messages, and cancel them (CometMQ brokers)."""


_listing = stacked(
    namesrv_option,
    opt("-t --topic", metavar="TOPIC", help="Only messages for this topic."),
    opt("-b --broker", metavar="ADDR", help="Only this broker."),
    opt("--json as_json", is_flag=True, help="Print each message as a line of JSON."),
)


@timers.command("list")
@watch_option
@opt(
    "-c --count", type=click.IntRange(min=1), default=100, metavar="N", help="At most N messages per broker."
)
@_listing
@with_admin
async def list_timers(admin: Admin, topic: str | None, broker: str | None, count: int, as_json: bool) -> None:
    """List delayed and scheduled messages, by delivery time."""
    shown = 0
    async for waiting in admin.timers(topic, broker_addr=broker, limit=count):
        shown += 1
        _print_timer(waiting, as_json)
    if not as_json:
        click.echo(counted(shown, "message"), err=True)


@timers.command("show")
@click.argument("key")
@_listing
@with_admin
async def show_timer(admin: Admin, topic: str | None, broker: str | None, key: str, as_json: bool) -> None:
    """Show delayed and scheduled messages by KEY or id, among the newest 64 with that KEY."""
    check_utf8(key)
    found, more = await admin.timers_with_key(key, topic, broker_addr=broker)
    for waiting in found:
        _print_timer(waiting, as_json)
    if more:
        why = "a broker examines the newest 64 messages with this key, at most 1 MiB"
        click.echo(f"there may be more: {why}; `timers list` shows all", err=True)
    if not found:
        raise click.ClickException(f"no waiting message has the key or id {printable(key)}")
    if not as_json:
        click.echo(counted(len(found), "message"), err=True)


@timers.command("cancel")
@click.argument("handles", nargs=-1, required=True, metavar="HANDLE...")
@namesrv_option
@shell.changes
@with_admin
async def cancel_timers(admin: Admin, handles: tuple[str, ...]) -> None:
    """Cancel the delivery of scheduled messages, by the handles that `send` and `list` print.

    Messages at a delay level have no handle and cannot be cancelled.
    """
    operation = await operations.cancel_timers(admin, handles)
    await shell.execute(operation, lambda msg_id: click.echo(f"cancelled: {printable(msg_id, None)}"))


def _print_timer(waiting: WaitingMessage, as_json: bool) -> None:
    click.echo(json_line(WaitingView.of(waiting)) if as_json else _timer_line(waiting))


def _timer_line(waiting: WaitingMessage) -> str:
    view = MessageView.of(waiting.message)
    facts = facts_line(
        local_time(waiting.deliver_at_ms), waiting.topic, view.msg_id, level=waiting.delay_level,
        tag=view.tags, keys=",".join(view.keys), recall=waiting.recall_handle,
    )  # fmt: skip
    return f"{printable(facts, None)}  {printable(view.body, MAX_BODY_CHARS)}"


selecting_options = stacked(
    opt("-t --topic", metavar="NAME", help="Only messages whose original topic is this one."),
    opt("-k --key", metavar="KEY", help="Only messages with this key."),
    opt(
        "--begin begin_ms",
        type=moment,
        metavar="WHEN",
        help="Only messages that became dead letters at or after this time: 30s, 10m, 2h, 1d ago, ms "
        "since 1970, or yyyy-MM-dd#HH:mm:ss:SSS.",
    ),
    opt(
        "--end end_ms",
        type=moment,
        metavar="WHEN",
        help="Only messages that became dead letters before this time.",
    ),
    opt("--sql", metavar="EXPR", help="Only messages whose properties match: 'amount > 5'."),
)
LIMIT = opt("--limit", type=COUNT, metavar="N", help="At most N messages.")
ALL_GROUPS = "%-64s  %-12s  %-20s  %s"
LETTER = "%-32s  %-24s  %5s  %7s  %-19s  %-16s  %s"


def selection(group: str, ids: Iterable[str] = (), **wanted: Any) -> Selection:
    """Convert the command's options to a selection of dead letters.

    Raises UsageError for arguments that are not UTF-8.
    """
    check_utf8(group, *ids, wanted.get("topic"), wanted.get("key"), wanted.get("sql"))
    return Selection(group=group, ids=frozenset(ids), **wanted)


@click.group(cls=CometGroup, context_settings=HELP)
def dlq() -> None:
    """List, show and resend dead letters: messages whose retries are exhausted, in topic %DLQ%GROUP."""


@dlq.command("list", context_settings=HELP)
@click.argument("group", type=nonempty_name, required=False)
@namesrv_option
@selecting_options
@LIMIT
@watch_option
@shell.result_options
@with_admin
async def list_letters(admin: Admin, group: str | None, limit: int | None, **wanted: Any) -> None:
    """List the dead letters of GROUP. Without GROUP, list each group's number of dead letters."""
    if group is None:
        if any(value is not None for value in (limit, *wanted.values())):
            raise click.UsageError("These options select messages of a GROUP: specify one.")
        counts = await admin.dead_letter_counts()
        shell.tell(counts, count_table(counts))
        return
    await warn_of_retry_limits(admin, group)
    shown = 0
    async for message in admin.dead_letters(selection(group, **wanted)):
        letter = view(message)
        # A list may be long, so each message is printed when it arrives: one JSON object per line.
        shell.tell(letter, letter_lines(letter, title=not shown), indent=None)
        shown += 1
        if shown == limit:
            break
    if not shown:
        shell.show_problem(f"group {group} has no such dead letters")


@dlq.command("show", context_settings=HELP)
@click.argument("group", type=nonempty_name)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@namesrv_option
@shell.result_options
@with_admin
async def show_letters(admin: Admin, group: str, ids: tuple[str, ...]) -> None:
    """Show dead letters of GROUP in full.

    ID: an offset id or unique key, or the offset id of the original message.
    """
    found = 0
    async for message in admin.dead_letters(selection(group, ids)):
        found += 1
        letter = view(message)
        if shell.wants_json():
            shell.show_json(letter, indent=None)
            continue
        try:
            again = "yes" if await admin.was_resent(group, message) else "no"
        except IndexSilent as error:
            again = str(error)
        shell.show(details(letter, again))
    if not found:
        raise click.ClickException(f"group {group} has no dead letter with this id")


@dlq.command(context_settings=HELP)
@click.argument("group", type=nonempty_name)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@namesrv_option
@selecting_options
@LIMIT
@opt("--all all_letters", is_flag=True, help="All dead letters of GROUP.")
@opt(
    "--to",
    type=click.Choice(["group", "topic"]),
    default="group",
    help="group: resend to GROUP only, by its retry topic. "
    "topic: resend to all groups of the original topic.",
)
@opt("--again", is_flag=True, help="Include dead letters that were resent before.")
@opt("--dry-run", is_flag=True, help="Print what would be sent, and send nothing.")
@opt("--rate", type=FiniteRange(min=0, min_open=True), metavar="N", help="At most N messages per second.")
@shell.result_options
@with_admin
async def resend(
    admin: Admin,
    group: str,
    ids: tuple[str, ...],
    limit: int | None,
    all_letters: bool,
    to: str,
    again: bool,
    dry_run: bool,
    rate: float | None,
    **wanted: Any,
) -> None:
    """Resend dead letters of GROUP, each once.

    A second run skips the messages that an earlier run sent, so an interrupted run is continued by running
    the command again. The dead letters remain in their topic.

    Exit code 1 if any dead letter could not be sent.
    """
    if all_letters == bool(ids or any(value is not None for value in wanted.values())):
        raise click.UsageError("Select messages: IDs, --topic, --key, --begin, --end, --sql; or --all.")
    how = Resending(to_topic=to == "topic", again=again, dry_run=dry_run, rate=rate, limit=limit)
    states: Counter[Resend] = Counter()
    try:
        async for result in admin.resend(selection(group, ids, **wanted), how):
            states[result.state] += 1
            shell.tell(result, result_lines(result), indent=None)
    except ResendStopped as error:
        shell.show_problem(f"{summary(states)}; run the command again to continue")
        raise click.ClickException(str(error)) from None
    shell.show_problem(summary(states))
    if states[Resend.FAILED] or (ids and not states):
        raise click.exceptions.Exit(1)


async def warn_of_retry_limits(admin: Admin, group: str) -> None:
    """Warn on standard error if the maximum retries of members differ from the group's or each other's."""
    limits = await admin.retry_limits(group)
    if limits.differ:
        named = sorted(limits.members.items())[:16]
        members = ", ".join(f"{client_id} {limit}" for client_id, limit in named)
        shell.show_problem(
            f"{group} allows different numbers of retries, and the failing member decides, before the "
            f"group's retryMaxTimes={limits.group}: {members}"
        )


def count_table(counts: Iterable[DeadLetterCount]) -> Iterator[str]:
    yield ALL_GROUPS % ("#Group", "#Messages", "#Last", "")
    for each in counts:
        last = local_time(max(each.last_update_timestamp, 0))
        yield (ALL_GROUPS % (each.group, each.count, last, each.problem)).rstrip()


def letter_lines(letter: DeadLetterView, *, title: bool) -> Iterator[str]:
    if title:
        yield LETTER % ("#Message ID", "#Topic", "#Tries", "#Resent", "#Died", "#Tag", "#Keys")
    yield (
        LETTER % (
            *(letter.msg_id, letter.original_topic or "?", letter.reconsume_times, letter.resend_times),
            *(local_time(letter.store_timestamp), letter.tags or "", " ".join(letter.keys)),
        )
    ).rstrip()  # fmt: skip


def details(letter: DeadLetterView, sent_again: str) -> Iterator[str]:
    facts = (
        ("Message ID:", letter.msg_id),
        ("Offset ID:", letter.offset_msg_id),
        ("Original Topic:", letter.original_topic or "unknown"),
        ("Original Offset ID:", letter.origin_msg_id),
        ("Tag:", letter.tags or ""),
        ("Keys:", " ".join(letter.keys)),
        ("Tries:", letter.reconsume_times),
        ("Born:", f"{local_time(letter.born_timestamp, ',')} at {letter.born_host}"),
        ("Died:", f"{local_time(letter.store_timestamp, ',')} at {letter.store_host}"),
        ("Place:", f"{letter.broker_name} queue {letter.queue_id} offset {letter.queue_offset}"),
        ("Resent before:", letter.resend_times),
        ("Resent since:", sent_again),
        ("Properties:", " ".join(f"{name}={value}" for name, value in letter.properties.items())),
        ("Body:", letter.body),
    )
    for name, value in facts:
        yield f"{name:<20} {value}".rstrip()
    yield ""


def result_lines(result: ResendResult) -> Iterator[str]:
    what = {
        Resend.RESENT: f"sent to {result.target}",
        Resend.PLANNED: f"would be sent to {result.target}",
        Resend.SKIPPED: "skipped: it was resent before",
        Resend.FAILED: f"FAILED: {result.problem}",
    }[result.state]
    yield f"{result.msg_id}  {what}"


def summary(states: Counter[Resend]) -> str:
    """Return the number of dead letters with each outcome, for example `3 messages sent again, 1 skipped`."""
    sent = counted(states[Resend.RESENT], "message") + " sent again"
    if states[Resend.PLANNED]:
        sent = counted(states[Resend.PLANNED], "message") + " would be sent again"
    others = ((Resend.SKIPPED, "skipped"), (Resend.FAILED, "failed"))
    return ", ".join([sent, *(f"{states[state]} {word}" for state, word in others if states[state])])
