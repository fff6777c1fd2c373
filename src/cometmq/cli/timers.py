"""`cometmq timers`: messages that wait for their time, and taking them back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from cometmq.cli.options import HELP, check_utf8, namesrv_option
from cometmq.text import counted, printable, printable_json

if TYPE_CHECKING:
    from cometmq.message import WaitingMessage

BODY_SHOWN = 200  # characters of a body in a list


@click.group(context_settings=HELP)
def timers() -> None:
    """Messages that wait for their time: show them, and take them back (CometMQ brokers)."""


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
    "-c", "--count", type=click.IntRange(min=1), default=100, metavar="N", help="At most so many of a broker."
)
@_listing
def list_timers(namesrv: str, topic: str | None, broker: str | None, count: int, as_json: bool) -> None:
    """Messages that wait, those first that will come first."""
    asyncio.run(_show(namesrv, topic, broker, None, count, as_json))


@timers.command("show")
@click.argument("key")
@_listing
def show_timer(namesrv: str, topic: str | None, broker: str | None, key: str, as_json: bool) -> None:
    """Messages that wait, with a KEY of theirs or their id."""
    check_utf8(key)
    found = asyncio.run(_show(namesrv, topic, broker, key, 64, as_json))
    if not found:
        raise click.ClickException(f"no message that waits has the key or id {printable(key)}")


@timers.command("cancel")
@click.argument("handles", nargs=-1, required=True, metavar="HANDLE...")
@namesrv_option
def cancel_timers(namesrv: str, handles: tuple[str, ...]) -> None:
    """Take messages back, by the handles that `send` and `list` print: they will not be delivered."""
    from cometmq.admin import Admin

    async def run() -> None:
        async with Admin(namesrv) as admin:
            for handle in handles:
                click.echo(f"taken back: {printable(await admin.recall(handle), None)}")

    asyncio.run(run())


async def _show(
    namesrv: str, topic: str | None, broker: str | None, key: str | None, count: int, as_json: bool
) -> int:
    from cometmq.admin import Admin

    shown: dict[str, int] = {}
    async with Admin(namesrv) as admin:
        async for waiting in admin.timers(topic, broker_addr=broker, key=key, limit=count):
            name = waiting.message.broker_name
            shown[name] = shown.get(name, 0) + 1
            click.echo(_as_json(waiting) if as_json else _line(waiting))
    if not as_json:
        click.echo(counted(sum(shown.values()), "message"), err=True)
    return sum(shown.values())


def _line(waiting: WaitingMessage) -> str:
    from cometmq.admin.values import MessageView
    from cometmq.text import local_time

    view = MessageView.of(waiting.message)
    facts = [local_time(waiting.deliver_at_ms), waiting.topic, view.msg_id]
    if view.tags:
        facts.append(f"tag={view.tags}")
    if view.keys:
        facts.append(f"keys={','.join(view.keys)}")
    if waiting.recall_handle:
        facts.append(f"recall={waiting.recall_handle}")
    return f"{printable(' '.join(facts), None)}  {printable(view.body, BODY_SHOWN)}"


def _as_json(waiting: WaitingMessage) -> bytes:
    import msgspec

    from cometmq.admin.values import WaitingView

    return printable_json(msgspec.json.encode(WaitingView.of(waiting)))
