"""`cometmq tail`: print the messages of a topic without a consumer group."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

import click

from cometmq.cli.options import (
    HELP,
    check_utf8,
    listening_options,
    moment,
    namesrv_option,
    stop_on_signals,
)
from cometmq.cli.outcome import MAX_ERROR_CHARS
from cometmq.cli.printing import LinePrinter, as_line
from cometmq.message import check_topic_name
from cometmq.periodic import Periodic
from cometmq.protocol.codes import TOOLS_CONSUMER_GROUP
from cometmq.text import printable

if TYPE_CHECKING:
    from cometmq.client import ClientInstance
    from cometmq.client.cluster.routes import ReadTarget
    from cometmq.client.group.subscription import Subscription
    from cometmq.message import MessageQueue, PullResult
    from cometmq.protocol.frame import Frame

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
@click.option(
    "--from",
    "begin_ms",
    type=start_time,
    default="now",
    metavar="WHEN",
    help="Begin at: now, first, a time ago (30s, 10m, 2h, 1d), ms since 1970, or yyyy-MM-dd#HH:mm:ss:SSS.",
)
@click.option("-p", "--properties", is_flag=True, help="Print the properties, too.")
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


if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Show = Callable[[PullResult], Awaitable[None]]
