"""`cometmq timers`: list waiting messages, and cancel those with a delivery time of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from cometmq.admin import operations
from cometmq.admin.commands.shell import changes, execute
from cometmq.cli.lazy import CometGroup
from cometmq.cli.options import HELP, check_utf8, namesrv_option, with_admin
from cometmq.text import counted, printable, printable_json

if TYPE_CHECKING:
    from cometmq.admin import Admin
    from cometmq.message import WaitingMessage

MAX_BODY_CHARS = 200  # maximum characters of a body in a list


@click.group(cls=CometGroup, context_settings=HELP)
def timers() -> None:
    """List delayed and scheduled messages, and cancel them (CometMQ brokers)."""


def _listing(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print each message as a line of JSON."),
        click.option("-b", "--broker", metavar="ADDR", help="Only this broker."),
        click.option("-t", "--topic", metavar="TOPIC", help="Only messages for this topic."),
        namesrv_option,
    ):
        command = option(command)
    return command


@timers.command("list")
@click.option(
    "-c",
    "--count",
    type=click.IntRange(min=1),
    default=100,
    metavar="N",
    help="At most N messages per broker.",
)
@_listing
def list_timers(namesrv: str, topic: str | None, broker: str | None, count: int, as_json: bool) -> None:
    """List delayed and scheduled messages, by delivery time."""

    async def run(admin: Admin) -> int:
        shown = 0
        async for waiting in admin.timers(topic, broker_addr=broker, limit=count):
            shown += 1
            _print(waiting, as_json)
        return shown

    shown = with_admin(namesrv, run)
    if not as_json:
        click.echo(counted(shown, "message"), err=True)


@timers.command("show")
@click.argument("key")
@_listing
def show_timer(namesrv: str, topic: str | None, broker: str | None, key: str, as_json: bool) -> None:
    """Show delayed and scheduled messages by KEY or id, among the newest 64 with that KEY."""
    check_utf8(key)
    found, more = with_admin(namesrv, lambda admin: admin.timers_with_key(key, topic, broker_addr=broker))
    for waiting in found:
        _print(waiting, as_json)
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
@changes
def cancel_timers(namesrv: str, handles: tuple[str, ...]) -> None:
    """Cancel the delivery of scheduled messages, by the handles that `send` and `list` print.

    Messages at a delay level have no handle and cannot be cancelled.
    """

    async def run(admin: Admin) -> None:
        operation = await operations.cancel_timers(admin, handles)
        await execute(operation, lambda msg_id: click.echo(f"cancelled: {printable(msg_id, None)}"))

    with_admin(namesrv, run)


def _print(waiting: WaitingMessage, as_json: bool) -> None:
    click.echo(_as_json(waiting) if as_json else _line(waiting))


def _line(waiting: WaitingMessage) -> str:
    from cometmq.admin.values import MessageView
    from cometmq.text import local_time

    view = MessageView.of(waiting.message)
    facts = [local_time(waiting.deliver_at_ms), waiting.topic, view.msg_id]
    if waiting.delay_level:
        facts.append(f"level={waiting.delay_level}")
    if view.tags:
        facts.append(f"tag={view.tags}")
    if view.keys:
        facts.append(f"keys={','.join(view.keys)}")
    if waiting.recall_handle:
        facts.append(f"recall={waiting.recall_handle}")
    return f"{printable(' '.join(facts), None)}  {printable(view.body, MAX_BODY_CHARS)}"


def _as_json(waiting: WaitingMessage) -> bytes:
    import msgspec

    from cometmq.admin.values import WaitingView

    return printable_json(msgspec.json.encode(WaitingView.of(waiting)))
