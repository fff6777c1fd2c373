"""`cometmq send`: messages from the command line or from standard input, one per line."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from itertools import islice
from typing import TYPE_CHECKING

import click

from .options import HELP, namesrv_option
from .progress import progress_bar

if TYPE_CHECKING:
    from cometmq.client import Producer
    from cometmq.message import Message, SendResult

LINES_AT_ONCE = 1024  # read from a pipe before they are sent; bounds what is held in memory


def name_and_value(text: str) -> tuple[str, str]:
    """A user property given as NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


@click.command(context_settings=HELP)
@click.argument("topic")
@click.argument("body", nargs=-1)
@namesrv_option
@click.option("-t", "--tag", metavar="TAG", help="Tag of each message; consumers choose by it.")
@click.option(
    "-k", "--key", "keys", multiple=True, metavar="KEY", help="Key to find the message by; may be repeated."
)
@click.option(
    "-p",
    "--property",
    "properties",
    multiple=True,
    type=name_and_value,
    metavar="NAME=VALUE",
    help="User property; may be repeated.",
)
@click.option(
    "-d",
    "--delay-level",
    type=click.IntRange(0, 18),
    default=0,
    metavar="LEVEL",
    help="Deliver later: 1 is 1 s, 2 is 5 s, 3 is 10 s, 18 is 2 h.",
)
@click.option(
    "-g", "--group", default="cometmq-cli", show_default=True, metavar="NAME", help="Producer group."
)
@click.option("--json", "as_json", is_flag=True, help="Print each result as a line of JSON.")
def send(
    topic: str,
    body: tuple[str, ...],
    namesrv: str,
    tag: str | None,
    keys: tuple[str, ...],
    properties: tuple[tuple[str, str], ...],
    delay_level: int,
    group: str,
    as_json: bool,
) -> None:
    """Send each BODY as a message to TOPIC; without a BODY each line of standard input that is not empty."""
    from cometmq.client import Producer
    from cometmq.message import Message

    def message(text: bytes) -> Message:
        return Message(
            topic=topic, body=text, tags=tag, keys=keys, delay_level=delay_level, properties=dict(properties)
        )

    async def run() -> None:
        async with Producer(group, namesrv=namesrv) as producer:
            if body:
                for text in body:
                    show(await producer.send(message(text.encode())), as_json)
            else:
                await send_lines(producer, message, as_json)

    asyncio.run(run())


async def send_lines(producer: Producer, message: MessageOf, as_json: bool) -> None:
    """Send standard input's lines, many at once, and say how it went."""
    count = size = 0
    began = time.monotonic()
    with progress_bar("sending", total=None) as advance:
        async for lines in input_lines():
            results = await producer.send_many(message(line) for line in lines)
            count, size = count + len(lines), size + sum(map(len, lines))
            advance(len(lines))
            if as_json:
                for result in results:
                    show(result, as_json)
    seconds = max(time.monotonic() - began, 1e-9)
    click.echo(
        f"sent {count} messages, {size} bytes in {seconds:.2f} s ({count / seconds:,.0f}/s)", err=as_json
    )


async def input_lines() -> AsyncIterator[list[bytes]]:
    """Standard input's lines without their ends, in lists; a person at a terminal gets an answer to each.

    Empty lines are left out: RocketMQ has no messages without a body.
    """
    at_once = 1 if sys.stdin.isatty() else LINES_AT_ONCE
    while lines := await asyncio.to_thread(lambda: list(islice(sys.stdin.buffer, at_once))):
        yield [text for line in lines if (text := line.removesuffix(b"\n").removesuffix(b"\r"))]


def show(result: SendResult, as_json: bool) -> None:
    """One line per sent message."""
    if as_json:
        import msgspec

        from cometmq.admin.values import SendView

        click.echo(msgspec.json.encode(SendView.of(result)))
        return
    queue = result.queue
    place = f"{queue.broker_name} queue {queue.queue_id} offset {result.queue_offset}"
    click.echo(f"{result.status.name} {result.msg_id} {place}")


if TYPE_CHECKING:
    from collections.abc import Callable

    MessageOf = Callable[[bytes], Message]
