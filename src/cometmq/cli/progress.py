"""Progress bars on standard error: a bar for a person, nothing for a pipe or a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

Advance = Callable[[int], None]


def make_progress() -> Progress:
    """A rich progress display with description, bar, count, rate and time."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed
    from rich.text import Text

    class Rate(ProgressColumn):
        """Items per second, once there is one to tell."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:,.0f}/s" if speed else "", style="dim")

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), Rate(), Elapsed())
    return Progress(*columns, console=console, disable=not console.is_terminal)


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Advance]:
    """Yield a function that advances the bar by a number of items; `total` None when nobody knows."""
    with make_progress() as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
