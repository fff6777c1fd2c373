"""`cometmq consume`: join a consumer group and print messages as they arrive."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import click

from cometmq import logs
from cometmq.cli.options import HELP, check_utf8, listening_options, namesrv_option, stop_on_signals
from cometmq.cli.outcome import MAX_ERROR_CHARS
from cometmq.cli.printing import LinePrinter, as_line
from cometmq.message import check_topic_name
from cometmq.protocol.codes import RETRY_PREFIX
from cometmq.text import printable

if TYPE_CHECKING:
    from cometmq.client import ClientInstance, PushConsumer
    from cometmq.message import MessageExt

MEMBERSHIP = logs.logger("cometmq.client.consumer.rebalance")
HINT_DELAY_S = 3.0
DRAIN_TIMEOUT_S = 0.1
"""Maximum time in seconds to wait at the end until printed messages are acknowledged.

Messages that were not printed are never acknowledged.
"""


@click.command(context_settings=HELP)
@click.argument("topic")
@namesrv_option
@click.option(
    "-g",
    "--group",
    metavar="NAME",
    help="Consumer group; its members share the queues, and it continues at its stored offsets. "
    "[default: cometmq-cli-TOPIC]",
)
@click.option(
    "--from",
    "start",
    type=click.Choice(["first", "last"]),
    default="first",
    help="Start of a group without offsets in TOPIC: at the first message, or after the last one.",
)
@listening_options
def consume(
    topic: str,
    namesrv: str,
    group: str | None,
    tags: str,
    start: str,
    count: int | None,
    idle_s: float | None,
    as_json: bool,
    raw: bool,
) -> None:
    """Print the messages of TOPIC until Ctrl-C. Printed messages are acknowledged for the group."""
    from cometmq.client import ClientInstance, ConsumeFromWhere, PushConsumer, PushOptions

    check_topic_name(topic)
    check_utf8(tags)
    name = group if group is not None else f"cometmq-cli-{topic}"
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, drain_timeout_s=DRAIN_TIMEOUT_S)

    async def run() -> None:
        printer = LinePrinter(count)

        async def show(messages: list[MessageExt]) -> None:
            for message in messages:
                # The listener returns, and so acknowledges the message, only after the message was printed. A
                # message that was not printed is delivered to the group's next member.
                await printer.print(as_line(message, as_json=as_json, raw=raw))

        stop = stop_on_signals()
        MEMBERSHIP.setLevel(logging.ERROR)  # no warnings, because `print_problems` prints the problems
        async with ClientInstance(namesrv) as client:
            if start == "last":
                await skip_to_end(client, name, topic)
            async with PushConsumer(name, show, {topic: tags}, client=client, options=options) as consumer:
                hint = asyncio.create_task(print_problems(consumer, printer))
                await printer.wait(stop, idle_s)
                hint.cancel()
                await printer.close()
                # The command leaves messages that it has not printed unacknowledged on purpose. Suppress the
                # client's warnings about these messages.
                logs.logger("cometmq.client").setLevel(logging.ERROR)
                problems = [] if printer.printed else problems_of(consumer)
        printer.check()
        if problems:
            raise click.ClickException(f"no message was received: {'; '.join(problems)}")

    asyncio.run(run())


async def skip_to_end(client: ClientInstance, group: str, topic: str) -> None:
    """Set a group's offsets to the ends of a topic's queues, on brokers that store no offsets of the group.

    CONSUME_FROM_LAST_OFFSET does not suffice: if a queue's first message is still stored, brokers let a new
    group begin with that message.
    """
    from cometmq.admin.groups import groups_at
    from cometmq.client.cluster.requests import NameServersUnreachable, pull_request
    from cometmq.errors import NoRouteError

    try:
        queues = await client.read_queues(topic)
    except NameServersUnreachable:
        raise
    except NoRouteError:
        return  # the topic does not exist yet, so all its messages will be new
    known: dict[str, bool] = {}
    for queue in queues:
        addr = await client.find_addr(queue)
        if addr not in known:
            known[addr] = group in await groups_at(client, addr, topic)
        if not known[addr]:
            end = await client.brokers.max_offset(addr, queue)
            # A 5.x broker accepts offsets only for existing groups. The pull creates the group.
            await client.brokers.pull(addr, queue, pull_request(group, queue, end, 1))
            await client.brokers.update_consumer_offset(addr, group, queue, end)


async def print_problems(consumer: PushConsumer, printer: LinePrinter) -> None:
    """Print the problems that the consumer reports, if no message was printed in the first seconds."""
    await asyncio.sleep(HINT_DELAY_S)
    MEMBERSHIP.setLevel(logging.NOTSET)
    if not printer.printed:
        for problem in problems_of(consumer):
            click.echo(f"waiting: {printable(problem, MAX_ERROR_CHARS)}", err=True)


def problems_of(consumer: PushConsumer) -> list[str]:
    """Return the problems of a consumer.

    Problems with its retry topic are omitted if there are other problems.
    """
    problems = consumer.health().problems
    return [problem for problem in problems if not problem.startswith(RETRY_PREFIX)] or list(problems)
