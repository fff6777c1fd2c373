"""The same thing done for many items, some at a time; functions of users in threads, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sized
from concurrent.futures import Executor
from contextvars import copy_context
from typing import Any, TypeVar

from cometmq import logs
from cometmq.text import counted, seconds

__all__ = ["again_if_cancelled", "cancel_all", "for_each", "in_thread"]

log = logs.logger("cometmq.client")

T = TypeVar("T")
R = TypeVar("R")

_CANCELLED_WITHIN_S = 1.0
_AGAIN_S = 1.0


async def in_thread(executor: Executor | None, function: Callable[..., R], *given: object) -> R:
    """What a plain function of the user's returns, called in a thread, in the context of the caller.

    Raises RuntimeError for its sys.exit(): in a thread that ends the thread, and would end the loop here.
    """
    run = copy_context().run
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, run, function, *given)
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the function raised {error!r}, which ends its call only") from error


async def cancel_all(tasks: Collection[asyncio.Task[Any]], what: str) -> None:
    """Cancel tasks that run functions of the user's, and wait for them, but not for ever: such a function may
    go on. what: these, for the log."""
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    done, pending = await asyncio.wait(tasks, timeout=_CANCELLED_WITHIN_S)
    await asyncio.gather(*done, return_exceptions=True)  # seen
    if pending:
        log.error(
            "%s: %s not end within %s of being cancelled, and go on by themselves",
            what, counted(len(pending), "task") + (" does" if len(pending) == 1 else " do"),
            seconds(_CANCELLED_WITHIN_S),
        )  # fmt: skip


def again_if_cancelled(task: asyncio.Task[Any], again: Callable[[], object]) -> None:
    """Have `again` called a second after the task was cancelled: by the user's function that runs in it, or
    by somebody who cancels all tasks. It has to look whether its owner has cancelled it on purpose."""

    def ended(task: asyncio.Task[Any]) -> None:
        if task.cancelled() and not task.get_loop().is_closed():
            task.get_loop().call_later(_AGAIN_S, again)

    task.add_done_callback(ended)


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[R]], at_once: int) -> list[R]:
    """What `work` gives for each item, in their order, with up to `at_once` of them under way.

    After a failure no new item is taken; the work under way ends, then the first failure is raised.
    """
    if isinstance(items, Sized):
        at_once = min(at_once, len(items))
    source = enumerate(items)
    results: dict[int, R] = {}
    failures: list[Exception] = []

    async def worker() -> None:
        # The workers share the iterator: taking the next item is one step that no other task can interrupt.
        for number, item in source:
            try:
                results[number] = await work(item)
            except Exception as error:
                failures.append(error)
            if failures:
                return

    await asyncio.gather(*(worker() for _ in range(at_once)))
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(results))]
