"""`cometmq consume`: join a group and print what arrives."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING

import click

from cometmq import logs

from .options import HELP, namesrv_option, stop_on_signals

if TYPE_CHECKING:
    from cometmq.client import PushConsumer
    from cometmq.message import MessageExt

PATIENCE_S = 3.0


@click.command(context_settings=HELP)
@click.argument("topic")
@namesrv_option
@click.option(
    "-g",
    "--group",
    default="cometmq-cli",
    show_default=True,
    metavar="NAME",
    help="Consumer group; its members share the queues, and it goes on where it stopped.",
)
@click.option(
    "-t", "--tags", default="*", show_default=True, metavar="EXPR", help="Only these tags: 'A || B'."
)
@click.option(
    "--from",
    "start",
    type=click.Choice(["first", "last"]),
    default="first",
    show_default=True,
    help="Where a new group starts.",
)
@click.option("-c", "--count", type=click.IntRange(min=1), metavar="N", help="Stop after so many messages.")
@click.option(
    "--timeout",
    "idle_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop when nothing has arrived for so long.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each message as a line of JSON.")
def consume(
    topic: str,
    namesrv: str,
    group: str,
    tags: str,
    start: str,
    count: int | None,
    idle_s: float | None,
    as_json: bool,
) -> None:
    """Print the messages of TOPIC until Ctrl-C. What was printed is acknowledged for the group."""
    from cometmq.client import ConsumeFromWhere, PushConsumer, PushOptions

    printer = Printer(count, as_json)
    first = ConsumeFromWhere.FIRST_OFFSET if start == "first" else ConsumeFromWhere.LAST_OFFSET
    # A call either prints at once or holds its message back for good: there is nothing to drain.
    options = PushOptions(consume_from_where=first, drain_timeout_s=0.0)

    async def run() -> None:
        stop = stop_on_signals()
        async with PushConsumer(
            group, printer.take, {topic: tags}, namesrv=namesrv, options=options
        ) as consumer:
            hint = asyncio.create_task(tell_why_nothing_comes(consumer, printer))
            await printer.wait(stop, idle_s)
            hint.cancel()
            if printer.full or printer.reader_gone:
                # That messages are held back is what was asked for, and no warning.
                logs.logger("cometmq.client").setLevel(logging.ERROR)
            problems = () if printer.printed else consumer.health().problems
        if printer.reader_gone:
            raise BrokenPipeError
        if problems:
            raise click.ClickException(f"nothing received: {'; '.join(problems)}")

    asyncio.run(run())


async def tell_why_nothing_comes(consumer: PushConsumer, printer: Printer) -> None:
    """After a moment without a message, what the consumer itself says keeps it from its work."""
    await asyncio.sleep(PATIENCE_S)
    if not printer.printed:
        for problem in consumer.health().problems:
            click.echo(f"waiting: {problem}", err=True)


class Printer:
    """The listener: prints messages up to a limit and holds back what comes after it."""

    def __init__(self, limit: int | None, as_json: bool) -> None:
        self.limit = limit
        self.printed = 0
        self.reader_gone = False
        self._as_json = as_json
        self._news = asyncio.Event()

    async def take(self, messages: list[MessageExt]) -> None:
        for message in messages:
            if self.full or not self._print(message):
                # Neither printed nor acknowledged: the group's next member gets it.
                await asyncio.Event().wait()
        self._news.set()

    def _print(self, message: MessageExt) -> bool:
        """Whether somebody reads what we print."""
        try:
            click.echo(as_line(message, self._as_json))
            sys.stdout.flush()
        except BrokenPipeError:
            self.reader_gone = True
            self._news.set()
            return False
        self.printed += 1
        return True

    @property
    def full(self) -> bool:
        return self.limit is not None and self.printed >= self.limit

    async def wait(self, stop: asyncio.Event, idle_s: float | None) -> None:
        """Return at the limit, at a signal, without a reader, or after `idle_s` seconds with nothing new."""
        while not (self.full or self.reader_gone or stop.is_set()):
            self._news.clear()
            waits = [asyncio.ensure_future(self._news.wait()), asyncio.ensure_future(stop.wait())]
            done, pending = await asyncio.wait(waits, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in pending:
                wait.cancel()
            if not done:
                return


def as_line(message: MessageExt, as_json: bool) -> str | bytes:
    """A message on one line."""
    from cometmq.admin.values import MessageView

    view = MessageView.of(message)
    if as_json:
        import msgspec

        return msgspec.json.encode(view)
    facts = [f"{view.broker_name}/{view.queue_id}/{view.queue_offset}"]
    if view.tags:
        facts.append(f"tag={view.tags}")
    if view.keys:
        facts.append(f"keys={','.join(view.keys)}")
    return f"{' '.join(facts)}  {view.body}"
