"""`cometmq bench`: measure the sends, the consumption and the latency of a cluster of ours or of Apache's."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import click

from cometmq.cli.consume import skip_to_end
from cometmq.cli.lazy import CometGroup
from cometmq.cli.options import HELP, namesrv_option, stop_on_signals
from cometmq.cli.outcome import MAX_ERROR_CHARS
from cometmq.cli.progress import progress_bar
from cometmq.errors import CometError
from cometmq.message import Message, MessageExt, check_topic_name
from cometmq.number_range import FiniteRange
from cometmq.protocol.codes import RETRY_PREFIX
from cometmq.text import counted, printable, rate

if TYPE_CHECKING:
    from cometmq.admin import Admin
    from cometmq.client import Producer

PERCENTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
MAX_MESSAGE_SIZE = 4 * 1024 * 1024
MARK_BYTES = 16
"""The bytes at the beginning of a message that contain the id of the measurement and the time of the send."""
MAX_UNDER_WAY = 10_000
"""The maximum number of messages under way while latency is measured. Others are not sent, and reported."""
LAST_MESSAGES_S = 10.0
"""The time, in seconds, for which a measurement of latency waits for its last messages."""
REPORT_INTERVAL_S = 0.2
PRODUCER_GROUP = "cometmq-bench"


class Figures:
    """What a measurement counts.

    Attributes:
        messages: The number of messages that were sent or received.
        size: The bytes of their bodies.
        failed: The number of failed sends.
        lost: The number of messages that were sent and not received.
        skipped: The number of messages that were not sent because too many were under way.
        failure: The last failure.
        seconds: The length of the measurement.
    """

    def __init__(self) -> None:
        self.messages = self.size = self.failed = self.lost = self.skipped = 0
        self.failure: CometError | None = None
        self.seconds = 0.0
        # By the rounded logarithm of the time, so that memory is bounded and a percentile is right to 1 %.
        self._latencies: Counter[int] = Counter()

    def add(self, count: int, size: int) -> None:
        """Count messages with their bytes."""
        self.messages += count
        self.size += size

    def fail(self, error: CometError) -> None:
        """Count a failed send."""
        self.failed += 1
        self.failure = error

    def took(self, seconds: float) -> None:
        """Count a latency."""
        self._latencies[round(math.log(max(seconds, 1e-6)) * 50)] += 1

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

    def show(self, what: str, as_json: bool) -> None:
        """Print the figures. Raises click.ClickException if no message was counted."""
        reason = printable(str(self.failure), MAX_ERROR_CHARS)
        if not self.messages:
            raise click.ClickException(f"no message was {what}" + (f": {reason}" if self.failure else ""))
        latency = self.latency_ms()
        if as_json:
            facts = {
                "messages": self.messages, "bytes": self.size, "seconds": round(self.seconds, 3),
                "perSecond": round(self.messages / self.seconds, 1), "failed": self.failed,
                "lost": self.lost, "skipped": self.skipped, "latencyMs": latency,
            }  # fmt: skip
            click.echo(json.dumps(facts))
            return
        speed = f"{rate(self.messages, self.seconds)}, {self.size / self.seconds / 2**20:.1f} MiB/s"
        click.echo(f"{what} {counted(self.messages, 'message')} in {self.seconds:.2f} s ({speed})")
        if latency:
            click.echo("latency: " + ", ".join(f"{name} {value:.2f} ms" for name, value in latency.items()))
        if self.failed:
            click.echo(f"{counted(self.failed, 'send')} failed, the last one: {reason}", err=True)
        if self.lost:
            click.echo(f"{counted(self.lost, 'message')} did not arrive", err=True)
        if self.skipped:
            text = f"{counted(self.skipped, 'send')} skipped: {MAX_UNDER_WAY} messages were under way"
            click.echo(text, err=True)


@asynccontextmanager
async def _new_group(admin: Admin) -> AsyncIterator[str]:
    """Make up the name of a group, and delete the group at the end."""
    group = f"cometmq-bench-{secrets.token_hex(4)}"
    failed = True
    try:
        yield group
        failed = False
    finally:
        try:
            retry_topic = RETRY_PREFIX + group
            for addr in (await admin.masters()).values():
                # This order, because the deletion of a topic wakes pulls, which create their group.
                await admin.delete_topic_in_brokers(retry_topic, broker_addr=addr)
                await admin.delete_group(addr, group, with_offsets=True)
            await admin.delete_topic_in_name_servers(retry_topic)
        except CometError as error:
            if not failed:  # otherwise the failure of the measurement is the one that matters
                text = printable(str(error), MAX_ERROR_CHARS)
                click.echo(f"the group {group} could not be deleted: {text}", err=True)


async def _due_times(count: int, per_second: int) -> AsyncIterator[int]:
    """Yield `count` times at a rate, each when it has come, as ns of `time.perf_counter_ns`."""
    begin_ns = time.perf_counter_ns()
    for number in range(count):
        due_ns = begin_ns + number * 1_000_000_000 // per_second
        await asyncio.sleep((due_ns - time.perf_counter_ns()) / 1e9)
        yield due_ns


@click.group(cls=CometGroup, context_settings=HELP)
def bench() -> None:
    """Measure a cluster, CometMQ's or Apache's, with CometMQ's client on this machine."""


def _measuring(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the figures as a line of JSON."),
        click.option(
            "--seconds",
            type=FiniteRange(min=0, min_open=True),
            default=10.0,
            help="Length of the measurement.",
        ),
        namesrv_option,
    ):
        command = option(command)
    return command


_size = click.option(
    "--size", type=click.IntRange(MARK_BYTES, MAX_MESSAGE_SIZE), default=1024, help="Bytes of a body."
)


@bench.command("send")
@click.argument("topic")
@click.option(
    "--in-flight",
    type=click.IntRange(1, MAX_UNDER_WAY),
    default=64,
    help="Sends that wait for answers at once.",
)
@_size
@_measuring
def bench_send(topic: str, namesrv: str, seconds: float, as_json: bool, size: int, in_flight: int) -> None:
    """Send messages to TOPIC as fast as answers arrive. Latency: from a send to its answer."""
    from cometmq.client import Producer

    check_topic_name(topic)
    body = os.urandom(size)

    async def run() -> Figures:
        figures, ended = Figures(), stop_on_signals()

        async def caller(producer: Producer) -> None:
            while not ended.is_set():
                began = time.perf_counter()
                try:
                    await producer.send(Message(topic, body))
                except CometError as error:
                    figures.fail(error)
                else:
                    figures.took(time.perf_counter() - began)
                    figures.add(1, size)

        async with Producer(PRODUCER_GROUP, namesrv=namesrv) as producer:
            await producer.send(Message(topic, body))  # creates the topic and the connection
            asyncio.get_running_loop().call_later(seconds, ended.set)
            async with figures.timed():
                await asyncio.gather(*(caller(producer) for _ in range(in_flight)))
        return figures

    asyncio.run(run()).show("sent", as_json)


@bench.command("consume")
@click.argument("topic")
@click.option(
    "--batch", type=click.IntRange(1, 1024), default=32, help="Messages that a listener gets at once."
)
@_measuring
def bench_consume(topic: str, namesrv: str, seconds: float, as_json: bool, batch: int) -> None:
    """Consume the messages of TOPIC from the first one, as a new group that is deleted at the end.

    The measurement ends early when all messages that were stored at its start are consumed.
    """
    from cometmq.admin import Admin
    from cometmq.client import ConsumeFromWhere, PushConsumer, PushOptions

    check_topic_name(topic)
    options = PushOptions(
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET, consume_batch_max_size=batch, drain_timeout_s=1.0
    )

    async def run() -> Figures:
        figures, ended = Figures(), stop_on_signals()
        async with Admin(namesrv) as admin, _new_group(admin) as group:
            stored = sum(each.max_offset - each.min_offset for each in await admin.topic_status(topic))

            async def listener(messages: list[MessageExt]) -> None:
                if not ended.is_set():
                    figures.add(len(messages), sum(len(message.body) for message in messages))
                if figures.messages >= stored:
                    ended.set()

            async with (
                PushConsumer(group, listener, topic, client=admin.client, options=options),
                figures.timed(),
            ):
                asyncio.get_running_loop().call_later(seconds, ended.set)
                await ended.wait()
        return figures

    asyncio.run(run()).show("consumed", as_json)


@bench.command("latency")
@click.argument("topic")
@click.option(
    "--rate", "per_second", type=click.IntRange(1, 100_000), default=100, help="Messages per second."
)
@_size
@_measuring
def bench_latency(
    topic: str, namesrv: str, seconds: float, as_json: bool, size: int, per_second: int
) -> None:
    """Send messages to TOPIC at a rate and consume them. Latency: from a send to the listener.

    Messages are sent on time even if answers are late, so a broker that stands still is seen.
    """
    from cometmq.admin import Admin
    from cometmq.client import Producer, PushConsumer, PushOptions

    check_topic_name(topic)
    mark, rest = os.urandom(8), os.urandom(size - MARK_BYTES)
    options = PushOptions(consume_batch_max_size=32, drain_timeout_s=1.0)

    async def run() -> Figures:
        figures, ended = Figures(), stop_on_signals()
        sends: set[asyncio.Task[None]] = set()
        waiting: set[int] = (
            set()
        )  # the messages that were sent and not received, by the times when they were due
        arrived = asyncio.Event()

        async def listener(messages: list[MessageExt]) -> None:
            now = time.perf_counter_ns()
            for message in messages:
                due_ns = int.from_bytes(message.body[len(mark) : MARK_BYTES], "big")
                if message.body.startswith(mark) and due_ns in waiting:
                    waiting.remove(due_ns)
                    figures.took((now - due_ns) / 1e9)
                    figures.add(1, size)
            arrived.set()

        async def send(producer: Producer, due_ns: int) -> None:
            waiting.add(due_ns)
            try:
                await producer.send(Message(topic, mark + due_ns.to_bytes(8, "big") + rest))
            except CometError as error:
                waiting.discard(due_ns)
                figures.fail(error)

        async def send_all(producer: Producer) -> None:
            async for due_ns in _due_times(round(seconds * per_second), per_second):
                if ended.is_set():
                    return
                if len(waiting) >= MAX_UNDER_WAY:
                    figures.skipped += 1
                    continue
                task = asyncio.create_task(send(producer, due_ns))
                sends.add(task)
                task.add_done_callback(sends.discard)

        async with (
            Admin(namesrv) as admin,
            _new_group(admin) as group,
            Producer(PRODUCER_GROUP, client=admin.client) as producer,
        ):
            await producer.send(Message(topic, bytes(size)))  # creates the topic and the connection
            await skip_to_end(admin.client, group, topic)
            async with PushConsumer(group, listener, topic, client=admin.client, options=options):
                async with figures.timed():
                    await send_all(producer)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_MESSAGES_S):
                        await asyncio.gather(*sends)
                        while waiting:
                            arrived.clear()
                            await arrived.wait()
        figures.lost = len(waiting)
        return figures

    asyncio.run(run()).show("received", as_json)
