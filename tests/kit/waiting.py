"""Functions that wait for conditions instead of fixed times."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 90.0
"""Limit, in seconds, for a condition on a machine that other tests keep busy."""


async def until(
    condition: Callable[[], Any], what: str = "the condition is true", within_s: float = PATIENCE_S
) -> Any:
    """Poll a condition until it is true, and return its value.

    Args:
        condition: A function. If it returns an awaitable, the awaited result is the value.
        what: The condition in words, for the error.
        within_s: Limit in seconds.

    Raises:
        AssertionError: The condition was not true within the limit.
    """
    try:
        async with asyncio.timeout(within_s):
            while True:
                value = condition()
                if inspect.isawaitable(value):
                    value = await value
                if value:
                    return value
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None


async def soon(awaitable: Awaitable[T], within_s: float = PATIENCE_S) -> T:
    """Return the result of an awaitable; fail after `within_s` seconds."""
    return await asyncio.wait_for(awaitable, within_s)


def wait_until(what: str, check: Callable[[], T], timeout_s: float = PATIENCE_S, every_s: float = 0.02) -> T:
    """Poll `check` in this thread until it returns something true, and return that.

    Raises:
        AssertionError: No true value within `timeout_s`; the text contains `what`.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(every_s)
    return found
