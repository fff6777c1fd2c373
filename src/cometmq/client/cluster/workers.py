"""Helpers to process many items concurrently, and to call user functions."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Sized
from concurrent.futures import Executor
from contextvars import copy_context
from typing import Any, TypeVar

from cometmq import logs
from cometmq.text import counted, seconds

log = logs.logger("cometmq.client")

T = TypeVar("T")
R = TypeVar("R")

_CANCELLED_WITHIN_S = 1.0
_AGAIN_S = 1.0


def is_async(function: Callable[..., object]) -> bool:
    """Return whether a function is async. It may be a functools.partial or have an async `__call__`."""
    call = type(function).__call__ if callable(function) else None
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def call_user_function(executor: Executor | None, function: Callable[..., Any], *given: object) -> Any:
    """Call an async user function in this task, a plain one in a thread. Raises as `call_on_loop` does."""
    if is_async(function):
        return await call_on_loop(function, *given)
    return await call_in_thread(executor, function, *given)


async def call_on_loop(function: Callable[..., Awaitable[R]], *given: object) -> R:
    """Call an async user function in this task.

    Some exceptions have a special meaning for the interpreter or the event loop, and would affect more than
    this call: StopIteration, StopAsyncIteration, GeneratorExit, CancelledError, SystemExit and
    KeyboardInterrupt. A RuntimeError replaces them, whose `__cause__` they are. Not replaced are
    CancelledError while this task is being cancelled, and SystemExit and KeyboardInterrupt in the main
    thread, which end the program.
    """
    task = asyncio.current_task()
    try:
        return await function(*given)
    except BaseException as error:
        if (failure := failure_of(error, task)) is None:
            raise
        raise failure from error


def failure_of(error: BaseException, task: asyncio.Task[Any] | None) -> RuntimeError | None:
    """Return the error that replaces an exception in `task`, see `call_on_loop`, None if nothing does."""
    if _is_ordinary(error) or _is_for_program(error):
        return None
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        return None
    if isinstance(error, GeneratorExit) and not _is_current(task):
        return None  # close() was called on the coroutine outside of its task
    return _as_failure(error)


async def call_in_thread(executor: Executor | None, function: Callable[..., R], *given: object) -> R:
    """Call a plain user function in a thread, with the context variables of the caller.

    A RuntimeError replaces StopIteration and exceptions that end a program. These must not reach the event
    loop: a future refuses StopIteration, so the caller would wait forever, and SystemExit would end the loop.
    """
    run = copy_context().run
    return await asyncio.get_running_loop().run_in_executor(executor, run, _call_here, function, *given)


def _call_here(function: Callable[..., R], *given: object) -> R:
    try:
        return function(*given)
    except BaseException as error:
        if _is_ordinary(error):
            raise
        raise _as_failure(error) from error


def call_hook(function: Callable[..., R], *given: object) -> R:
    """Call a plain user function on the loop. Exceptions are replaced as in `call_on_loop`."""
    try:
        return function(*given)
    except BaseException as error:
        if _is_ordinary(error) or _is_for_program(error):
            raise
        raise _as_failure(error) from error


def _is_ordinary(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration)


def _is_for_program(error: BaseException) -> bool:
    """Return whether `error` is SystemExit or KeyboardInterrupt in the main thread, which ends the program.

    In any other thread they must not end the event loop, which also serves other clients.
    """
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and isinstance(error, SystemExit | KeyboardInterrupt)


def _is_current(task: asyncio.Task[Any] | None) -> bool:
    try:
        return asyncio.current_task() is task
    except RuntimeError:  # no event loop runs in this thread
        return False


def _as_failure(error: BaseException) -> RuntimeError:
    return RuntimeError(f"the function raised {error!r}, which ends only its call")


async def cancel_all(tasks: Collection[asyncio.Task[Any]], what: str) -> None:
    """Cancel tasks of user functions, which may ignore that, and wait at most one second for their end."""
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    done, pending = await asyncio.wait(tasks, timeout=_CANCELLED_WITHIN_S)
    # Retrieve the exceptions, because asyncio would log unretrieved ones.
    await asyncio.gather(*done, return_exceptions=True)
    if pending:
        log.error(
            "%s: %s still running %s after the cancellation",
            what, counted(len(pending), "task"), seconds(_CANCELLED_WITHIN_S),
        )  # fmt: skip


def again_if_cancelled(task: asyncio.Task[Any], again: Callable[[], object]) -> None:
    """Call `again` one second after `task` was cancelled, for example by a user function.

    `again` must check whether the owner of the task has cancelled the task on purpose.
    """

    def ended(task: asyncio.Task[Any]) -> None:
        if task.cancelled() and not task.get_loop().is_closed():
            task.get_loop().call_later(_AGAIN_S, again)

    task.add_done_callback(ended)


async def all_of(*works: Awaitable[None]) -> None:
    """Wait for all works, which run concurrently. Then raise the first failure, if there is one."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[R]], at_once: int) -> list[R]:
    """Return the results of `work` for all items, in their order. At most `at_once` calls run concurrently.

    After a failure no further item is processed. When the calls in progress have ended, the first failure is
    raised.
    """
    if isinstance(items, Sized):
        at_once = min(at_once, len(items))
    source = enumerate(items)
    results: dict[int, R] = {}
    failures: list[Exception] = []

    async def worker() -> None:
        # The workers can share the iterator, because no other task runs while a worker fetches the next item.
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
