"""The same thing done for many items, some of them at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sized
from typing import TypeVar

__all__ = ["for_each"]

T = TypeVar("T")
R = TypeVar("R")


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
