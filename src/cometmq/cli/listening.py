"""`cometmq tail` and `cometmq consume`: print messages of a topic as they arrive, one line each."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import sys
import threading
import time
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import click

from cometmq import logs
from cometmq.cli.options import (
    HELP,
    check_utf8,
    facts_line,
    json_line,
    listening_options,
    moment,
    namesrv_option,
    stop_on_signals,
)
from cometmq.cli.outcome import MAX_ERROR_CHARS
from cometmq.command_options import opt
from cometmq.message import check_topic_name
from cometmq.periodic import Periodic
from cometmq.protocol.codes import RETRY_PREFIX, TOOLS_CONSUMER_GROUP
from cometmq.text import printable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cometmq.client import ClientInstance, PushConsumer
    from cometmq.client.cluster.routes import ReadTarget
    from cometmq.client.group.subscription import Subscription
    from cometmq.message import MessageExt, MessageQueue, PullResult
    from cometmq.protocol.frame import Frame

    Show = Callable[[PullResult], Awaitable[None]]

CLOSE_TIMEOUT_S = 0.5
"""Maximum time in seconds to wait at the end for the current write to standard output.

A write that takes longer probably never ends, because no program reads the output.
"""


class LinePrinter:
    """Writes lines to standard output, at most `limit` of them, in a separate thread.

    If no program reads the output, only this thread is blocked. Construct the object in the running event
    loop.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.printed = 0
        self.problem: OSError | None = None
        """The error that ended the printing, or None."""
        self._accepted = 0
        self._closing = False
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._lines: SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = SimpleQueue()
        self._descriptor = sys.stdout.fileno()
        # A daemon thread, because a write that blocks forever must not keep the process alive.
        threading.Thread(target=self._write_all, name="cometmq-print", daemon=True).start()

    @property
    def full(self) -> bool:
        return self.limit is not None and self.printed >= self.limit

    async def print(self, line: bytes) -> None:
        """Print a line and return once the line has been written.

        After `limit` lines, or once printing has stopped, the line is not written and the call never returns.
        """
        written = self._loop.create_future()
        if not self._closing and (self.limit is None or self._accepted < self.limit):
            self._accepted += 1
            self._lines.put((line, written))
        await written

    async def wait(self, stop: asyncio.Event, idle_s: float | None) -> None:
        """Wait for `limit` lines, for `stop`, for a failed write, or for `idle_s` seconds without a line."""
        while not (self.full or self.problem or stop.is_set()):
            self._news.clear()
            waits = [asyncio.ensure_future(self._news.wait()), asyncio.ensure_future(stop.wait())]
            done, pending = await asyncio.wait(waits, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in pending:
                wait.cancel()
            if not done:
                return

    async def close(self) -> None:
        """Stop printing.

        Waiting lines are dropped; the line being written has CLOSE_TIMEOUT_S seconds to complete.
        """
        self._closing = True
        self._lines.put(None)
        await asyncio.wait({self._ended}, timeout=CLOSE_TIMEOUT_S)

    def check(self) -> None:
        """Raise BrokenPipeError if the reader closed the output, ClickException if printing failed."""
        if isinstance(self.problem, BrokenPipeError):
            raise self.problem
        if self.problem is not None:
            raise click.ClickException(f"cannot print: {self.problem.strerror}")

    def _write_all(self) -> None:
        try:
            while (entry := self._lines.get()) is not None and not self._closing:
                line, written = entry
                try:
                    write(self._descriptor, line)
                except OSError as error:
                    self._loop.call_soon_threadsafe(self._failed, error)
                    break
                self._loop.call_soon_threadsafe(self._wrote, written)
            self._loop.call_soon_threadsafe(self._ended.set_result, None)
        except RuntimeError:
            pass  # the event loop is closed, so no coroutine waits for a line to be written

    def _wrote(self, written: asyncio.Future[None]) -> None:
        self.printed += 1
        self._news.set()
        if not written.done():
            written.set_result(None)

    def _failed(self, error: OSError) -> None:
        self.problem = error
        self._news.set()


def write(descriptor: int, data: bytes) -> None:
    """Write all data, even to a non-blocking descriptor. Raises OSError."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def as_line(message: MessageExt, *, as_json: bool, raw: bool, properties: bool = False) -> bytes:
    """Return a message as one line of text, or with `as_json` as one line of JSON.

    The text contains the position, tag, keys and body, and with `properties` also the properties. With `raw`,
    names and body are not escaped, so they may control the terminal or break the line.
    """
    from cometmq.admin.values import MessageView

    view = MessageView.of(message)
    if as_json:
        return json_line(view) + b"\n"
    head = facts_line(
        f"{view.broker_name}/{view.queue_id}/{view.queue_offset}", tag=view.tags, keys=",".join(view.keys),
        tries=view.reconsume_times,
    )  # fmt: skip
    if properties:
        head = " ".join([head, *(f"{name}={value}" for name, value in view.properties.items())])
    head += "  "
    if raw:
        return head.encode("utf-8", "surrogateescape") + bytes(message.body) + b"\n"
    return f"{printable(head, None)}{printable(view.body, None)}\n".encode(
        sys.stdout.encoding, "backslashreplace"
    )


ROUTE_INTERVAL_S = 5.0  # seconds between two searches for new queues and brokers
RETRY_INTERVAL_S = 1.0  # seconds between a failed pull and the next pull
EMPTY_PULL_INTERVAL_S = 0.1  # seconds between a pull that returns no messages and the next pull
SUSPEND_TIMEOUT_S = 15.0  # maximum time in seconds for which a broker holds a pull, as with Java's consumers
PULL_BATCH = 32  # maximum number of messages per pull
MAX_CLOCK_SKEW_MS = 60_000  # maximum number of ms by which a broker's clock may be behind this machine's


def start_time(text: str) -> int | None:
    """Parse the value of `--from`.

    Returns:
        The time in ms since 1970. 0 for `first`, None for `now`.

    Raises:
        click.BadParameter: The text is not `first`, not `now` and not a valid time.
    """
    if text in ("now", "first"):
        return None if text == "now" else 0
    return moment(text, "now, first, ")


@click.command(context_settings=HELP)
@click.argument("topic")
@namesrv_option
@opt(
    "--from begin_ms",
    type=start_time,
    default="now",
    metavar="WHEN",
    help="Begin at: now, first, a time ago (30s, 10m, 2h, 1d), ms since 1970, or yyyy-MM-dd#HH:mm:ss:SSS.",
)
@opt("-p --properties", is_flag=True, help="Print the properties, too.")
@listening_options
def tail(
    topic: str,
    namesrv: str,
    begin_ms: int | None,
    tags: str,
    properties: bool,
    count: int | None,
    idle_s: float | None,
    as_json: bool,
    raw: bool,
) -> None:
    """Print the messages of TOPIC as they arrive, until Ctrl-C.

    The command joins no group and changes no offsets.
    """
    from cometmq.client import ClientInstance
    from cometmq.client.group.subscription import as_subscription

    check_topic_name(topic)
    check_utf8(tags)
    subscription = as_subscription(topic, tags)

    async def run() -> None:
        printer = LinePrinter(count)

        async def show(result: PullResult) -> None:
            wanted = [
                message
                for message in subscription.filter(result.messages)
                if message.store_timestamp_ms >= (begin_ms or 0)
            ]
            lines = (as_line(m, as_json=as_json, raw=raw, properties=properties) for m in wanted)
            await asyncio.gather(*map(printer.print, lines))

        stop = stop_on_signals()
        async with ClientInstance(namesrv) as client:
            watch = Watch(client, subscription, begin_ms, show)
            await watch.start()
            try:
                await printer.wait(stop, idle_s)
            finally:
                await watch.stop()
                await printer.close()
        printer.check()

    asyncio.run(run())


class Watch:
    """Reads all queues of a topic, including queues that are created later."""

    def __init__(
        self, client: ClientInstance, subscription: Subscription, begin_ms: int | None, show: Show
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._topic = subscription.topic
        self._begin_ms = begin_ms
        self._show = show
        self._followers: dict[MessageQueue, asyncio.Task[None]] = {}
        loop = asyncio.get_running_loop()
        self._looking = Periodic(
            loop, ROUTE_INTERVAL_S, self._look_for_queues, name="the search for new queues"
        )
        self._started_ms = int(time.time() * 1000)
        self._printed_problems: dict[MessageQueue | str, str] = {}
        """The last printed problem of each queue.

        The topic is the key of problems that concern the whole topic.
        """

    async def start(self) -> None:
        """Start to read the existing queues of the topic. If the topic does not exist, wait for it.

        Raises NameServersUnreachable.
        """
        from cometmq.client.cluster.requests import NameServersUnreachable
        from cometmq.errors import CometError, NoRouteError

        try:
            queues = await self._client.read_queues(self._topic)
        except NameServersUnreachable:
            raise
        except NoRouteError as error:
            self._print_problem(self._topic, error)
            queues = ()
        # Read all start offsets before any message, so that no message that arrives from now on is missed.
        for queue in queues:
            offset: int | None = None
            try:
                offset = await self._start_offset(queue, self._begin_ms)
            except CometError as error:
                self._print_problem(queue, error)
            self._follow(queue, self._begin_ms, offset)
        self._looking.start()

    async def stop(self) -> None:
        self._looking.cancel()
        for task in self._followers.values():
            task.cancel()
        await asyncio.gather(*self._followers.values(), return_exceptions=True)

    def _follow(self, queue: MessageQueue, begin_ms: int | None, offset: int | None = None) -> None:
        self._followers[queue] = asyncio.create_task(self._read(queue, begin_ms, offset))

    async def _start_offset(self, queue: MessageQueue, begin_ms: int | None) -> int:
        brokers = self._client.brokers

        async def ask(target: ReadTarget) -> int:
            if begin_ms is None:
                return await brokers.max_offset(target.addr, queue)
            first = await brokers.min_offset(target.addr, queue)
            if begin_ms == 0:
                return first
            # A 4.9 broker returns the offset of the message nearest to the time. This message may have been
            # stored before the time, so `show` omits such messages.
            return max(first, await brokers.offset_by_time(target.addr, queue, begin_ms - 1))

        return await self._client.reads.run(queue, ask)

    async def _look_for_queues(self) -> None:
        """Find queues that did not exist at the start, and read them.

        They may contain older messages, for example if their broker was only unreachable.
        """
        begin_ms = self._started_ms - MAX_CLOCK_SKEW_MS if self._begin_ms is None else self._begin_ms
        failures = await self._client.refresh_routes([self._topic])
        for topic, error in failures.items():
            self._print_problem(topic, error)
        route = self._client.routes.get(self._topic)
        for queue in route.read_queues if route is not None else ():
            if queue not in self._followers:
                self._follow(queue, begin_ms)

    async def _read(self, queue: MessageQueue, begin_ms: int | None, offset: int | None) -> None:
        """Pull one queue forever. `offset` is the start offset, or None if it is not known yet."""
        from cometmq.client.cluster.requests import pull_request
        from cometmq.errors import CometError

        broker_id = 0
        while True:
            try:
                if offset is None:
                    offset = await self._start_offset(queue, begin_ms)
                request = pull_request(
                    # Every broker has this group. The command commits no offsets for the group.
                    TOOLS_CONSUMER_GROUP,
                    queue,
                    offset,
                    PULL_BATCH,
                    self._subscription.expression,
                    sub_version=self._subscription.version,
                    suspend_s=SUSPEND_TIMEOUT_S,
                )
                pull = partial(self._pull, queue, request)
                result = await self._client.reads.run(queue, pull, broker_id)
            except CometError as error:
                self._print_problem(queue, error)
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            self._printed_problems.pop(queue, None)
            broker_id = result.suggest_which_broker_id
            await self._show(result)
            if not result.messages and result.next_begin_offset <= offset:
                # Most brokers delay their response to a pull until there are messages. This pause limits the
                # rate of pulls from brokers that respond immediately.
                await asyncio.sleep(EMPTY_PULL_INTERVAL_S)
            offset = result.next_begin_offset

    async def _pull(self, queue: MessageQueue, request: Frame, target: ReadTarget) -> PullResult:
        return await self._client.brokers.pull(target.addr, queue, request, SUSPEND_TIMEOUT_S + 10.0)

    def _print_problem(self, source: MessageQueue | str, error: Exception) -> None:
        """Print a problem once, even if many queues have it."""
        text = printable(str(error), MAX_ERROR_CHARS)
        if text not in self._printed_problems.values():
            click.echo(f"waiting: {text}", err=True)
        self._printed_problems[source] = text


MEMBERSHIP = logs.logger("cometmq.client.consumer.rebalance")
HINT_DELAY_S = 3.0
DRAIN_TIMEOUT_S = 0.1
"""Maximum time in seconds to wait at the end until printed messages are acknowledged.

Messages that were not printed are never acknowledged.
"""


@click.command(context_settings=HELP)
@click.argument("topic")
@namesrv_option
@opt(
    "-g --group",
    metavar="NAME",
    help="Consumer group; its members share the queues, and it continues at its stored offsets. "
    "[default: cometmq-cli-TOPIC]",
)
@opt(
    "--from start",
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
