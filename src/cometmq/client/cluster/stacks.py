"""The stacks of all tasks and threads of this process, for an operator who examines a stalled consumer."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

__all__ = ["stacks"]

_TASKS, _DEPTH = 500, 50
"""Maximum number of tasks and of innermost calls per task. The text has a few MB at most."""


def stacks() -> str:
    """Return the stacks as text, innermost call first. Must be called on the loop.

    The text contains names of functions, files and line numbers, but no values.
    """
    return "\n".join(itertools.chain(_threads(), _tasks()))


def _threads() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # noqa: SLF001 - documented, and there is no other way
    for ident, frame in frames.items():
        yield f'"{names.get(ident, ident)}"'
        yield from _lines(_called(frame))
        yield ""


def _tasks() -> Iterator[str]:
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    for task in tasks[:_TASKS]:
        yield f'task "{task.get_name()}"'
        yield from _lines(reversed(list(_awaited(task.get_coro()))))
        yield ""
    if len(tasks) > _TASKS:
        yield f"and {len(tasks) - _TASKS} more tasks"


def _called(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def _awaited(waiting: Any) -> Iterator[tuple[CodeType, int]]:
    """Yield the calls of a coroutine, outermost first, following what each one awaits."""
    while waiting is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(waiting, f"{kind}_frame")), None)
        frame = None if kind is None else getattr(waiting, f"{kind}_frame")
        if frame is None:
            return  # a future, or a coroutine that has just ended
        yield frame.f_code, frame.f_lineno
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _lines(calls: Iterator[tuple[CodeType, int]]) -> Iterator[str]:
    for code, line in itertools.islice(calls, _DEPTH):
        yield f"    at {code.co_qualname} ({code.co_filename}:{line})"
