"""Prints messages as they arrive, one line each, and reports for each line whether it was written."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import sys
import threading
from typing import TYPE_CHECKING

import click

from cometmq.text import printable, printable_json

if TYPE_CHECKING:
    from cometmq.message import MessageExt

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
        self._lines: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
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
        import msgspec

        return printable_json(msgspec.json.encode(view)) + b"\n"
    facts = [f"{view.broker_name}/{view.queue_id}/{view.queue_offset}"]
    if view.tags:
        facts.append(f"tag={view.tags}")
    if view.keys:
        facts.append(f"keys={','.join(view.keys)}")
    if view.reconsume_times:
        facts.append(f"tries={view.reconsume_times}")
    if properties:
        facts += [f"{name}={value}" for name, value in view.properties.items()]
    head = f"{' '.join(facts)}  "
    if raw:
        return head.encode("utf-8", "surrogateescape") + bytes(message.body) + b"\n"
    return f"{printable(head, None)}{printable(view.body, None)}\n".encode(
        sys.stdout.encoding, "backslashreplace"
    )
