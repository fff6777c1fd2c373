"""`cometmq bench`: measure the sends, the consumption and the latency of a cluster of ours or of Apache's."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import shlex
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import click

from cometmq.cli.app import CometGroup
from cometmq.cli.listening import skip_to_end
from cometmq.cli.options import HELP, namesrv_option, progress_bar, stop_on_signals
from cometmq.cli.outcome import MAX_ERROR_CHARS
from cometmq.command_options import FiniteRange, opt, stacked
from cometmq.errors import BrokerError, CometError
from cometmq.message import Message, MessageExt, check_topic_name
from cometmq.protocol.codes import RETRY_PREFIX
from cometmq.text import counted, printable, rate

if TYPE_CHECKING:
    from cometmq.admin import Admin
    from cometmq.client import Producer

    Measurement = Callable[[Admin, "Figures", asyncio.Event], Awaitable[None]]

PERCENTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
MAX_MESSAGE_SIZE = 4 * 1024 * 1024
MARK_BYTES = 16
"""The bytes at the beginning of a message that contain the id of the measurement and the time of the send."""
MAX_IN_FLIGHT = 10_000
"""The maximum number of messages in flight. `latency` skips further sends and reports their number."""
SEND_TIMEOUT_S = 3.0
FAILURE_PAUSE_S = 0.1
"""The pause of a sender after a failed send, so that an unreachable broker does not cause a busy loop."""
LAST_MESSAGES_S = 10.0
"""The maximum time, in seconds, for which `latency` waits for its last messages."""
CLEAN_UP_S = 5.0
"""The maximum time, in seconds, for the requests after a measurement: offsets, deletion of the group."""
REPORT_INTERVAL_S = 0.2
PRODUCER_GROUP = "cometmq-bench"


class Figures:
    """The counts and latencies of one measurement.

    Attributes:
        messages: The number of messages that were sent or received.
        size: The bytes of their bodies.
        failed: The number of failed sends.
        lost: The number of messages that were not received although their sends did not fail.
        skipped: The number of messages that were not sent because too many were in flight.
        failure: The last failure.
        seconds: The length of the measurement, in seconds.
    """

    def __init__(self) -> None:
        self.messages = self.size = self.failed = self.lost = self.skipped = 0
        self.failure: CometError | None = None
        self.seconds = 0.0
        # By the rounded logarithm of the time, so that memory is bounded and a percentile is right to 1 %.
        self._latencies: Counter[int] = Counter()

    def add(self, count: int, size: int, latency_s: float | None = None) -> None:
        """Count messages with the bytes of their bodies, and a latency."""
        self.messages += count
        self.size += size
        if latency_s is not None:
            self._latencies[round(math.log(max(latency_s, 1e-6)) * 50)] += 1

    def add_failure(self, error: CometError) -> None:
        """Count a failed send."""
        self.failed += 1
        self.failure = error

    def latency_ms(self) -> dict[str, float]:
        """Return percentiles of the latencies in ms; none if there are no latencies."""
        total, passed, found = self._latencies.total(), 0, {}
        left = list(PERCENTILES.items())
        for bucket, count in sorted(self._latencies.items()):
            passed += count
            while left and passed >= left[0][1] * total:
                found[left.pop(0)[0]] = round(1000 * math.exp(bucket / 50), 3)
        return found

    @asynccontextmanager
    async def timed(self) -> AsyncIterator[None]:
        """Measure the time of a block, and show the progress."""
        began = time.perf_counter()
        with progress_bar("measuring") as report:

            async def keep_reporting() -> None:
                while True:
                    report(self.messages, None)
                    await asyncio.sleep(REPORT_INTERVAL_S)

            reporting = asyncio.create_task(keep_reporting())
            try:
                yield
            finally:
                self.seconds = time.perf_counter() - began
                reporting.cancel()

    def print_summary(self, verb: str, as_json: bool) -> None:
        """Print the figures of messages that were sent, consumed or received (`verb`).

        Raises click.ClickException if no message was counted.
        """
        reason = printable(str(self.failure), MAX_ERROR_CHARS)
        if not self.messages:
            raise click.ClickException(f"no message was {verb}" + (f": {reason}" if self.failure else ""))
        latency = self.latency_ms()
        if as_json:
            facts = {
                "messages": self.messages, "bytes": self.size, "seconds": round(self.seconds, 3),
                "perSecond": round(self.messages / self.seconds, 1), "failed": self.failed,
                "lost": self.lost, "skipped": self.skipped, "latencyMs": latency,
            }  # fmt: skip
            click.echo(json.dumps(facts))
            return
        speed = f"{rate(self.messages, self.seconds)}, {self.size / self.seconds / 2**20:,.1f} MiB/s"
        click.echo(f"{verb} {counted(self.messages, 'message', ',')} in {self.seconds:,.2f} s ({speed})")
        if latency:
            click.echo("latency: " + ", ".join(f"{name} {value:,.2f} ms" for name, value in latency.items()))
        for number, noun, problem in (
            (self.failed, "send", f"failed, the last one: {reason}"),
            (self.lost, "message", "had not arrived at the end"),
            (self.skipped, "send", f"skipped: {MAX_IN_FLIGHT:,} messages were in flight"),
        ):
            if number:
                click.echo(f"{counted(number, noun, ',')} {problem}", err=True)


def _measure(measurement: Measurement, namesrv: str, verb: str, as_json: bool) -> None:
    """Run a measurement, which sets the event at its end, and print its figures.

    A signal sets the event, too. Raises click's Exit with 128 plus the signal, or with 1 if sends failed or
    messages were lost.
    """
    from cometmq.admin import Admin

    figures = Figures()

    async def run() -> int:
        ended = stop_on_signals()

        async def limit_clean_up(admin: Admin) -> None:
            await ended.wait()
            await asyncio.sleep(CLEAN_UP_S)
            await admin.client.remoting.close(0)  # requests to a broker that hangs fail now

        try:
            async with Admin(namesrv) as admin:
                limiting = asyncio.create_task(limit_clean_up(admin))
                await measurement(admin, figures, ended)
                limiting.cancel()
        except CometError:
            if not ended.signum:
                raise
        return ended.signum

    signum = asyncio.run(run())
    if figures.messages or not signum:
        figures.print_summary(verb, as_json)
    if code := 128 + signum if signum else int(figures.failed + figures.lost > 0):
        raise click.exceptions.Exit(code)


@asynccontextmanager
async def _new_group(admin: Admin, namesrv: str) -> AsyncIterator[str]:
    """Yield the name of a new consumer group, and delete the group at the end."""
    group = f"cometmq-bench-{secrets.token_hex(4)}"
    retry_topic = RETRY_PREFIX + group
    masters = await admin.masters()
    try:
        yield group
    finally:
        try:
            for addr in masters.values():
                # This order, because the deletion of a topic wakes pulls, which create their group.
                await admin.delete_topic_in_brokers(retry_topic, broker_addr=addr)
                await admin.delete_group(addr, group, with_offsets=True)
            await admin.delete_topic_in_name_servers(retry_topic)
        except CometError as error:
            reason = str(error) if isinstance(error, BrokerError) else "a server does not answer"
            text = f"the group {group} and its topic {retry_topic} could not be deleted: {reason}"
            command = f"mqadmin deleteSubGroup -n {shlex.quote(namesrv)} -c CLUSTER -g {group} -r true"
            click.echo(f"{printable(text, MAX_ERROR_CHARS)}. To delete both: {command}", err=True)


def _new_producer(admin: Admin, in_flight: int) -> Producer:
    from cometmq.client import Producer, ProducerOptions

    # No body is compressed, so that the broker is measured and not zlib.
    options = ProducerOptions(
        send_timeout_s=SEND_TIMEOUT_S, compress_over=MAX_MESSAGE_SIZE + 1, max_in_flight=in_flight
    )
    return Producer(PRODUCER_GROUP, client=admin.client, options=options)


async def _due_times(count: int, per_second: int) -> AsyncIterator[int]:
    """Yield `count` due times in ns of `time.perf_counter_ns`, `per_second` a second, each when it is due."""
    begin_ns = time.perf_counter_ns()
    for number in range(count):
        due_ns = begin_ns + number * 1_000_000_000 // per_second
        await asyncio.sleep((due_ns - time.perf_counter_ns()) / 1e9)
        yield due_ns


@click.group(cls=CometGroup, context_settings=HELP)
def bench() -> None:
    """Measure a cluster, CometMQ's or Apache's, with CometMQ's client on this machine."""


_measuring = stacked(
    namesrv_option,
    opt(
        "--seconds",
        type=FiniteRange(min=0, min_open=True),
        default=10.0,
        metavar="SECONDS",
        help="Length of the measurement, in seconds.",
    ),
    opt("--json as_json", is_flag=True, help="Print the figures as a line of JSON."),
)


_size = opt(
    "--size",
    type=click.IntRange(MARK_BYTES, MAX_MESSAGE_SIZE),
    default=1024,
    help="Size of a message body, in bytes. Bodies are not compressed.",
)


@bench.command("send")
@click.argument("topic")
@opt(
    "--in-flight",
    type=click.IntRange(1, MAX_IN_FLIGHT),
    default=64,
    help="Maximum number of sends in flight.",
)
@_size
@_measuring
def bench_send(topic: str, namesrv: str, seconds: float, as_json: bool, size: int, in_flight: int) -> None:
    """Send messages to TOPIC as fast as answers arrive.

    The latency is the time from a send to its answer, of successful sends only. TOPIC is created if it does
    not exist. The messages stay there, and consumers of TOPIC receive them.
    """
    check_topic_name(topic)
    body = os.urandom(size)

    async def measurement(admin: Admin, figures: Figures, ended: asyncio.Event) -> None:
        async def keep_sending(producer: Producer) -> None:
            while not ended.is_set():
                began = time.perf_counter()
                try:
                    await producer.send(Message(topic, body))
                except CometError as error:
                    figures.add_failure(error)
                    await asyncio.sleep(FAILURE_PAUSE_S)
                else:
                    figures.add(1, size, time.perf_counter() - began)

        async with _new_producer(admin, in_flight) as producer:
            await producer.send(Message(topic, body))  # creates the topic and the connection
            asyncio.get_running_loop().call_later(seconds, ended.set)
            async with figures.timed():
                await asyncio.gather(*(keep_sending(producer) for _ in range(in_flight)))

    _measure(measurement, namesrv, "sent", as_json)


@bench.command("consume")
@click.argument("topic")
@opt(
    "--batch",
    type=click.IntRange(1, 32),
    default=32,
    help="Maximum number of messages per listener call. A broker returns at most 32 per pull by default.",
)
@_measuring
def bench_consume(topic: str, namesrv: str, seconds: float, as_json: bool, batch: int) -> None:
    """Consume the messages of TOPIC from the first one, as a new group that is deleted at the end.

    The measurement begins with the start of the consumer. It ends early when all messages that were stored at
    its start are consumed.
    """
    from cometmq.client import ConsumeFromWhere, PushConsumer, PushOptions

    check_topic_name(topic)
    options = PushOptions(
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET, consume_batch_max_size=batch, drain_timeout_s=1.0
    )

    async def measurement(admin: Admin, figures: Figures, ended: asyncio.Event) -> None:
        stored = sum(each.max_offset - each.min_offset for each in await admin.topic_status(topic))
        if not stored:
            raise click.ClickException(f"topic {topic} has no messages")

        async def listener(messages: list[MessageExt]) -> None:
            if not ended.is_set():
                figures.add(len(messages), sum(len(message.body) for message in messages))
            if figures.messages >= stored:
                ended.set()

        async with _new_group(admin, namesrv) as group, AsyncExitStack() as stack:
            consumer = PushConsumer(group, listener, topic, client=admin.client, options=options)
            asyncio.get_running_loop().call_later(seconds, ended.set)
            async with figures.timed():  # includes the start, because the listener is called before its end
                await stack.enter_async_context(consumer)
                await ended.wait()

    _measure(measurement, namesrv, "consumed", as_json)


@bench.command("latency")
@click.argument("topic")
@opt("--rate per_second", type=click.IntRange(1, 100_000), default=100, help="Messages per second.")
@_size
@_measuring
def bench_latency(
    topic: str, namesrv: str, seconds: float, as_json: bool, size: int, per_second: int
) -> None:
    """Send messages to TOPIC at a fixed rate and consume them as a new group, which is deleted at the end.

    The latency is the time from a send to the listener. Late answers do not delay further sends, so pauses of
    the broker show in the latency. TOPIC is created if it does not exist. The messages stay there, and other
    consumers of TOPIC receive them, too.
    """
    from cometmq.client import PushConsumer, PushOptions

    check_topic_name(topic)
    mark, rest = os.urandom(8), os.urandom(size - MARK_BYTES)
    options = PushOptions(consume_batch_max_size=32, drain_timeout_s=1.0)
    # By the due time of each message that was not received: whether its send failed. Such a message may be
    # stored nevertheless, unless the broker has refused it.
    waiting: dict[int, bool] = {}

    async def measurement(admin: Admin, figures: Figures, ended: asyncio.Event) -> None:
        async def listener(messages: list[MessageExt]) -> None:
            now = time.perf_counter_ns()
            for message in messages:
                due_ns = int.from_bytes(message.body[len(mark) : MARK_BYTES], "big")
                if message.body.startswith(mark) and waiting.pop(due_ns, None) is not None:
                    figures.add(1, size, (now - due_ns) / 1e9)

        async def send(producer: Producer, due_ns: int) -> None:
            try:
                await producer.send(Message(topic, mark + due_ns.to_bytes(8, "big") + rest))
            except CometError as error:
                figures.add_failure(error)
                if isinstance(error, BrokerError):
                    waiting.pop(due_ns, None)
                elif due_ns in waiting:
                    waiting[due_ns] = True

        async with _new_producer(admin, MAX_IN_FLIGHT) as producer:
            await producer.send(Message(topic, bytes(size)))  # creates the topic and the connection
            async with _new_group(admin, namesrv) as group:
                await skip_to_end(admin.client, group, topic)
                consumer = PushConsumer(group, listener, topic, client=admin.client, options=options)
                async with consumer, asyncio.TaskGroup() as sends:
                    async with figures.timed():
                        async for due_ns in _due_times(round(seconds * per_second), per_second):
                            if ended.is_set():
                                break
                            if len(waiting) < MAX_IN_FLIGHT:
                                waiting[due_ns] = False
                                sends.create_task(send(producer, due_ns))
                            else:
                                figures.skipped += 1
                    asyncio.get_running_loop().call_later(LAST_MESSAGES_S, ended.set)
                    while waiting and not ended.is_set():  # noqa: ASYNC110 - two conditions
                        await asyncio.sleep(0.01)
                    ended.set()
        figures.lost = list(waiting.values()).count(False)

    _measure(measurement, namesrv, "received", as_json)
