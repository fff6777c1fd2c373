"""The option `--watch`, which repeats a command until Ctrl-C. A terminal shows only the last output."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import click

from cometmq.errors import CometError
from cometmq.text import local_time, seconds

if TYPE_CHECKING:
    from rich.live import Live

Work = Callable[[], Awaitable[None]]
ShowError = Callable[[CometError | click.ClickException], None]
TERMINATED = 128 + signal.SIGTERM


class _Block(io.TextIOWrapper):
    """The output of one run of the command. `isatty` is true, so that the command prints colours."""

    def __init__(self) -> None:
        self.data = io.BytesIO()
        super().__init__(self.data, encoding="utf-8", errors="backslashreplace", write_through=True)

    def isatty(self) -> bool:
        return True


async def repeated(
    work: Work,
    interval_s: float | None,
    show_error: ShowError,
    *,
    as_json: bool = False,
    keys: Mapping[str, Callable[[], None]] | None = None,
) -> None:
    """Run `work`, which prints its result: once if `interval_s` is None, otherwise repeatedly.

    Args:
        show_error: Prints an error of `work`. An error of the first run is raised instead.
        as_json: Whether the output is JSON, which is never drawn in place.
        keys: Functions by terminal key. The key `q` ends the command.

    Raises:
        click.exceptions.Exit: A key or SIGTERM has ended the command.
    """
    if interval_s is None:
        await work()
    elif as_json or not sys.stdout.isatty():
        turns = 0
        while True:
            if turns and not as_json:
                click.echo()
            await _turn(work, None if not turns else show_error)
            turns += 1
            await asyncio.sleep(interval_s)
    else:
        await _in_place(work, interval_s, show_error, keys or {})


async def _turn(work: Work, show_error: ShowError | None) -> None:
    try:
        await work()
    except click.exceptions.Exit:
        pass  # `work` has printed an incomplete result
    except (CometError, click.ClickException) as error:
        if show_error is None:
            raise
        show_error(error)


async def _in_place(
    work: Work, interval_s: float, show_error: ShowError, keys: Mapping[str, Callable[[], None]]
) -> None:
    from rich.text import Text

    pressed = asyncio.Event()
    ended_by: list[int] = []
    block, turns = _Block(), 0

    def on_key(key: str) -> None:
        if key == "q":
            ended_by.append(0)
        elif key in keys:
            keys[key]()
        else:
            return
        pressed.set()

    def on_sigterm() -> None:
        ended_by.append(TERMINATED)
        pressed.set()

    try:
        async with _screen(on_key, on_sigterm) as live:
            while not ended_by:
                pressed.clear()
                fresh = _Block()
                with contextlib.redirect_stdout(fresh), contextlib.redirect_stderr(fresh):
                    turn = asyncio.create_task(_turn(work, show_error if turns else None))
                    press = asyncio.create_task(pressed.wait())
                    await asyncio.wait({turn, press}, return_when=asyncio.FIRST_COMPLETED)
                    press.cancel()
                    if ended_by:
                        break
                    await turn
                block, turns = fresh, turns + 1
                now = local_time(int(time.time() * 1000))
                title = Text(f"{now}, every {seconds(interval_s)}; keys: {', '.join(['q', *keys])}\n", "dim")
                shown = Text.from_ansi(block.data.getvalue().decode(), no_wrap=True, overflow="ellipsis")
                live.update(title + shown, refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pressed.wait(), interval_s)
    finally:
        # The terminal shows its former content again. Print the last output below it.
        click.echo(block.data.getvalue().decode(), nl=False)
    raise click.exceptions.Exit(ended_by[0])


@asynccontextmanager
async def _screen(on_key: Callable[[str], None], on_sigterm: Callable[[], None]) -> AsyncIterator[Live]:
    """Use the whole terminal during a block. Its content and its settings are restored at the end."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    live = Live(
        console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            import termios
            import tty

            loop.add_signal_handler(signal.SIGTERM, on_sigterm)
            stack.callback(loop.remove_signal_handler, signal.SIGTERM)
            if sys.stdin is not None and sys.stdin.isatty():
                fd = sys.stdin.fileno()
                stack.callback(termios.tcsetattr, fd, termios.TCSADRAIN, termios.tcgetattr(fd))
                tty.setcbreak(fd)  # unlike raw mode, Ctrl-C still sends SIGINT
                loop.add_reader(fd, lambda: on_key(os.read(fd, 1).decode("latin-1")))
                stack.callback(loop.remove_reader, fd)
        stack.enter_context(live)
        yield live
