"""`cometmq send`: send the messages given as arguments, or each line of standard input as a message."""

from __future__ import annotations

import asyncio
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from cometmq.cli.options import (
    HELP,
    UNIT_MS,
    check_utf8,
    json_line,
    namesrv_option,
    progress_bar,
    stop_on_signals,
)
from cometmq.command_options import opt
from cometmq.text import counted, printable, rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from cometmq.client import Producer
    from cometmq.message import Message, SendResult

    MessageOf = Callable[[bytes], Message]

MAX_BATCH_LINES = 1024  # maximum number of lines that are sent as one batch
CHUNK_BYTES = 65_536  # maximum bytes per read of standard input: the capacity of a pipe
MAX_CHUNKS_AHEAD = 16  # maximum number of unprocessed chunks; this and MAX_LINE_BYTES limit the memory
MAX_LINE_BYTES = 4 * 1024 * 1024  # maximum bytes of a line, equal to the producer's max_message_size


def name_and_value(text: str) -> tuple[str, str]:
    """Return a user property given as NAME=VALUE. Raises click.BadParameter."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def time_span(text: str) -> int:
    """Return the value of `--delay` in ms. Raises click.BadParameter."""
    found = re.fullmatch(r"([0-9]{1,9})(ms|[smhd])", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not a time span such as 1500ms, 90s, 10m, 2h, 1d")
    return int(found[1]) * {"ms": 1, **UNIT_MS}[found[2]]


def point_in_time(text: str) -> int:
    """Return the value of `--at` in ms since 1970. Raises click.BadParameter."""
    from cometmq.admin.commands.formats import parse_time

    try:
        return parse_time(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither ms since 1970 nor yyyy-MM-dd#HH:mm:ss:SSS") from None


EXAMPLES = """
\b
Examples:
  cometmq send orders "hello" --tag new --key 4711
  seq 1 1000 | cometmq send orders
  cometmq send orders "later" --delay 10m

--delay-level, --delay and --at exclude each other.
"""


@click.command(context_settings=HELP, epilog=EXAMPLES)
@click.argument("topic")
@click.argument("body", nargs=-1)
@namesrv_option
@opt("-t --tag", metavar="TAG", help="Tag of each message, by which consumers filter.")
@opt("-k --key keys", multiple=True, metavar="KEY", help="Key for message queries; may be repeated.")
@opt(
    "-p --property properties",
    multiple=True,
    type=name_and_value,
    metavar="NAME=VALUE",
    help="User property; may be repeated.",
)
@opt(
    "-d --delay-level",
    type=click.IntRange(0, 18),
    metavar="LEVEL",
    help="Delay level for a later delivery: 1 is 1 s, 2 is 5 s, 3 is 10 s, 18 is 2 h.",
)
@opt("--delay delay_ms", type=time_span, metavar="SPAN", help="Deliver after 1500ms, 90s, 10m, 2h, 1d.")
@opt(
    "--at deliver_at_ms",
    type=point_in_time,
    metavar="WHEN",
    help="Deliver at this time: ms since 1970, or yyyy-MM-dd#HH:mm:ss:SSS.",
)
@opt("-g --group", default="cometmq-cli", metavar="NAME", help="Producer group.")
@opt("--json as_json", is_flag=True, help="Print each result as a line of JSON.")
def send(
    topic: str,
    body: tuple[str, ...],
    namesrv: str,
    tag: str | None,
    keys: tuple[str, ...],
    properties: tuple[tuple[str, str], ...],
    delay_level: int | None,
    delay_ms: int | None,
    deliver_at_ms: int | None,
    group: str,
    as_json: bool,
) -> None:
    """Send each BODY as a message to TOPIC; for `-` or without BODY, each line of standard input."""
    from cometmq.client import Producer
    from cometmq.message import Message

    if sum(given is not None for given in (delay_level, delay_ms, deliver_at_ms)) > 1:
        raise click.UsageError("Give one of --delay-level, --delay and --at.")
    check_utf8(tag, *keys, *(word for pair in properties for word in pair))

    def message(text: bytes) -> Message:
        return Message(
            topic=topic,
            body=text,
            tags=tag,
            keys=keys,
            delay_level=delay_level or 0,
            delay_ms=delay_ms or 0,
            deliver_at_ms=deliver_at_ms or 0,
            properties=dict(properties),
        )

    async def run() -> None:
        async with Producer(group, namesrv=namesrv) as producer:
            for text in body or ("-",):
                if text == "-":
                    await send_lines(producer, message, as_json)
                else:
                    show(await producer.send(message(os.fsencode(text))), as_json)

    asyncio.run(run())


async def send_lines(producer: Producer, message: MessageOf, as_json: bool) -> None:
    """Send the lines of standard input in batches of the available lines, and print a summary.

    SIGINT and SIGTERM end the reading; lines already read are sent. Raises click's Exit with the signal's
    code.
    """
    lines = InputLines()
    if lines.typed:
        click.echo("type lines; Ctrl-D ends the input", err=True)
    stop = stop_on_signals()
    count = size = 0
    began = time.monotonic()
    with nullcontext(lambda *_: None) if lines.typed else progress_bar("sending") as report:
        async for some in lines.read(stop):
            results = await producer.send_many(map(message, some))
            count, size = count + len(some), size + sum(map(len, some))
            report(count, None)
            if as_json or lines.typed:
                for result in results:
                    show(result, as_json)
    seconds = time.monotonic() - began
    sent = f"sent {counted(count, 'message')}, {counted(size, 'byte')}"
    click.echo(f"{sent} in {seconds:.2f} s ({rate(count, seconds)})", err=as_json)
    if stop.is_set():
        raise click.exceptions.Exit(128 + stop.signum)


class InputLines:
    """The lines of standard input. Empty lines are skipped: RocketMQ has no messages without a body.

    A separate thread reads the lines, because a read could block the event loop and cannot be cancelled.
    Construct the object in the running event loop.
    """

    def __init__(self) -> None:
        if sys.stdin is None:
            raise click.ClickException("standard input is closed")
        self.typed = sys.stdin.isatty()
        self._descriptor = sys.stdin.fileno()
        self._loop = asyncio.get_running_loop()
        self.chunks: deque[bytes | OSError] = deque()
        self._news = asyncio.Event()
        self._room = threading.Semaphore(MAX_CHUNKS_AHEAD)
        self._begun: list[bytes] = []
        """The parts of an incomplete line that were read so far."""
        self._begun_size = 0

    async def read(self, stop: asyncio.Event) -> AsyncIterator[list[bytes]]:
        """Yield available lines as soon as there are any, until the end of input or until `stop` is set."""
        # This is a daemon thread, because it may wait for input forever. It reads the file descriptor instead
        # of sys.stdin: the interpreter would crash at exit while a thread holds the lock of sys.stdin's
        # buffer.
        threading.Thread(target=self._read_chunks, name="cometmq-stdin", daemon=True).start()
        stopped = asyncio.ensure_future(stop.wait())
        stopped.add_done_callback(lambda _: self._news.set())
        ended = False
        failure: Exception | None = None
        while not ended and (self.chunks or not stop.is_set()):
            lines: list[bytes] = []
            while self.chunks and not ended and len(lines) < MAX_BATCH_LINES:
                try:
                    ended = self._split(self.chunks.popleft(), lines)
                except (OSError, click.ClickException) as error:
                    # The lines before the failure are valid, so they are yielded first.
                    failure, ended = error, True
            for at in range(0, len(lines), MAX_BATCH_LINES):
                yield lines[at : at + MAX_BATCH_LINES]
            if not (self.chunks or stop.is_set() or ended):
                self._news.clear()
                await self._news.wait()
        stopped.cancel()
        if failure is not None:
            raise failure
        if self._begun:
            click.echo("the last line was incomplete and was not sent", err=True)

    def _arrived(self, chunk: bytes | OSError) -> None:
        self.chunks.append(chunk)
        self._news.set()

    def _split(self, chunk: bytes | OSError, lines: list[bytes]) -> bool:
        """Add the lines that end in a chunk of standard input. Return whether it was the last chunk.

        Raises the OSError of a failed read. A line that is too long for a message raises ClickException as
        soon as possible, because the rest of such a line may be endless.
        """
        self._room.release()
        if isinstance(chunk, OSError):
            raise chunk
        first, *more = chunk.split(b"\n") if chunk else (b"", b"")
        self._begun.append(first)
        self._begun_size += len(first)
        if more:
            whole = [b"".join(self._begun), *more[:-1]]
            self._begun = [more[-1]] if more[-1] else []
            self._begun_size = len(more[-1])
            lines += [text for line in whole if (text := line.removesuffix(b"\r"))]
        if self._begun_size > MAX_LINE_BYTES + 1:  # the additional byte permits \r at the end of the line
            raise click.ClickException(
                f"a line has more than {MAX_LINE_BYTES} bytes, the maximum size of a message"
            )
        return not chunk

    def _read_chunks(self) -> None:
        chunk: bytes | OSError = b"-"
        while chunk and not isinstance(chunk, OSError):
            self._room.acquire()
            try:
                chunk = os.read(self._descriptor, CHUNK_BYTES)
            except BlockingIOError:
                select.select([self._descriptor], [], [])
                self._room.release()
                continue
            except OSError as error:
                chunk = error
            try:
                self._loop.call_soon_threadsafe(self._arrived, chunk)
            except RuntimeError:
                return  # the event loop is closed, because the command has ended


def show(result: SendResult, as_json: bool) -> None:
    """Print one line for a sent message."""
    if as_json:
        from cometmq.admin.values import SendView

        click.echo(json_line(SendView.of(result)))
        return
    queue = result.queue
    place = f"{queue.broker_name} queue {queue.queue_id} offset {result.queue_offset}"
    line = f"{result.status.name} {result.msg_id} {place} (offset id {result.offset_msg_id})"
    if result.recall_handle:
        line += f" recall {result.recall_handle}"
    click.echo(printable(line, None))
